//! The choice of the instructions that the CPU backend uses.

use super::lanes::{Lanes, Portable};
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// The instruction set that the CPU backend uses. All give the same bits.
///
/// The environment variable `FP8_CPU_PATH` selects one by its name; the default is the fastest one that the CPU has.
///
/// ```
/// use fp8_kernels::CpuPath;
///
/// let path = CpuPath::current()?; // the last one available, unless FP8_CPU_PATH says otherwise
/// assert!(CpuPath::available().any(|available| available == path));
/// assert_eq!("scalar".parse::<CpuPath>()?, CpuPath::Scalar);
/// assert_eq!(CpuPath::Avx512Bf16.to_string(), "avx512-bf16");
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CpuPath {
    /// Portable code. It uses FMA where the CPU has it, and is slow where not.
    Scalar,
    /// NEON, on AArch64.
    Neon,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with BF16, for FP8 products; others are those of [`Avx512`](Self::Avx512).
    ///
    /// It is available if `vdpbf16ps` rounds as two fused multiply-adds. Products of more than 8 rows use the instruction only where
    /// it is faster than two f32 multiply-adds. Both are tested when the process first computes a product.
    Avx512Bf16,
}

impl CpuPath {
    const ALL: [Self; 5] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// Iterates over the paths of this CPU, from the slowest to the fastest.
    ///
    /// ```
    /// use fp8_kernels::CpuPath;
    /// assert_eq!(CpuPath::available().next(), Some(CpuPath::Scalar)); // every CPU has it
    /// ```
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::ALL.into_iter().filter(|path| path.is_available())
    }

    /// Returns the path in use: that of `FP8_CPU_PATH`, or the fastest one available. The variable is read once.
    ///
    /// # Errors
    /// `FP8_CPU_PATH` is not the name of a path that this CPU has.
    ///
    /// ```
    /// println!("the CPU backend uses {}", fp8_kernels::CpuPath::current()?);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn current() -> Result<Self> {
        static CURRENT: OnceLock<std::result::Result<CpuPath, String>> = OnceLock::new();
        let current = CURRENT.get_or_init(|| match crate::environment::cpu_path() {
            None => Ok(Self::best()),
            Some(name) => name.parse().ok().filter(|path: &Self| path.is_available()).ok_or(name),
        });
        current.as_ref().copied().map_err(|name| Self::unavailable(name))
    }

    fn best() -> Self {
        Self::available().next_back().unwrap_or(Self::Scalar)
    }

    fn unavailable(name: &str) -> Error {
        let names: Vec<_> = Self::available().map(Self::name).collect();
        let remedy = format!("this CPU has {}", names.join(", "));
        Error::Environment { name: "FP8_CPU_PATH", value: name.to_owned(), remedy }
    }

    /// Returns `scalar`, `neon`, `avx2`, `avx512` or `avx512-bf16`, which `Display` writes and `FromStr` parses.
    ///
    /// ```
    /// assert_eq!(fp8_kernels::CpuPath::Avx2.name(), "avx2");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
        }
    }

    fn is_available(self) -> bool {
        Vectors::detect(self).is_some()
    }

    /// Returns the vectors of a product.
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no other CPU has pairs"))]
    pub(super) fn vectors(self, pairs: Pairs) -> Vectors {
        let vectors = Vectors::detect(self).unwrap_or(Vectors::Scalar(Portable));
        #[cfg(target_arch = "x86_64")]
        if let (true, Some(singles)) = (vectors.has_pairs(), Vectors::detect(Self::Avx512)) {
            static IS_FASTER: OnceLock<bool> = OnceLock::new();
            let takes_pairs = match pairs {
                Pairs::Never => false,
                Pairs::IfFaster => *IS_FASTER.get_or_init(|| super::probe::is_faster(vectors, singles)),
                Pairs::Always => true,
            };
            return if takes_pairs { vectors } else { singles };
        }
        vectors
    }
}

impl fmt::Display for CpuPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Parses the name of a path, which this CPU need not have.
impl FromStr for CpuPath {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name).ok_or_else(|| Error::Option {
            op: "cpu_path",
            option: "name",
            value: name.to_owned(),
            remedy: format!("expected {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

/// Whether a product is computed with pairs of bf16 values, on a CPU that has them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pairs {
    /// It would have other bits.
    Never,
    /// If the CPU multiplies pairs faster than f32 values.
    IfFaster,
    /// It takes less time to decode pairs than to decode f32 values, however they are multiplied.
    Always,
}

/// Lanes that the CPU has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Vectors {
    Scalar(Portable<4, false>),
    #[cfg(target_arch = "aarch64")]
    Neon(super::neon::Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(super::avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(super::avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(super::avx512::Avx512Bf16),
    /// Models of the others, in plain Rust.
    #[cfg(test)]
    Model8(Portable<8, false>),
    #[cfg(test)]
    Model16(Portable<16, false>),
    #[cfg(test)]
    Model16Pairs(Portable<16, true>),
}

/// Work that is compiled for each kind of lanes.
pub(super) trait Job {
    /// `#[inline(always)]`, and so is all that it calls with `lanes`: only then is it compiled for their instructions.
    fn run<L: Lanes>(self, lanes: L) -> Result<()>;
}

impl Vectors {
    fn detect(path: CpuPath) -> Option<Self> {
        match path {
            CpuPath::Scalar => Some(Self::Scalar(Portable)),
            #[cfg(target_arch = "aarch64")]
            CpuPath::Neon => super::neon::Neon::detect().map(Self::Neon),
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx2 => super::avx2::Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx512 => super::avx512::Avx512::detect().map(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            CpuPath::Avx512Bf16 => super::avx512::Avx512Bf16::detect().map(Self::Avx512Bf16),
            _ => None,
        }
    }

    /// Whether operands are packed as pairs of bf16 values.
    pub(super) fn has_pairs(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => true,
            #[cfg(test)]
            Self::Model16Pairs(_) => true,
            _ => false,
        }
    }

    /// Runs `job`, compiled for these lanes.
    pub(super) fn run(self, job: impl Job) -> Result<()> {
        match self {
            Self::Scalar(lanes) => {
                // Without the instruction, `mul_add` calls a function.
                #[cfg(target_arch = "x86_64")]
                if let Some(proof) = super::avx2::Avx2::detect() {
                    // SAFETY: `proof` proves the features.
                    return unsafe { with_fma(job, lanes, proof) };
                }
                job.run(lanes)
            }
            // SAFETY: the value of the lanes proves their features.
            #[cfg(target_arch = "aarch64")]
            Self::Neon(lanes) => unsafe { with_neon(job, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => unsafe { with_avx2(job, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => unsafe { with_avx512(job, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(lanes) => unsafe { with_avx512_bf16(job, lanes) },
            #[cfg(test)]
            Self::Model8(lanes) => job.run(lanes),
            #[cfg(test)]
            Self::Model16(lanes) => job.run(lanes),
            #[cfg(test)]
            Self::Model16Pairs(lanes) => job.run(lanes),
        }
    }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn with_neon(job: impl Job, lanes: super::neon::Neon) -> Result<()> {
    job.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_fma<L: Lanes>(job: impl Job, lanes: L, _: super::avx2::Avx2) -> Result<()> {
    job.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2(job: impl Job, lanes: super::avx2::Avx2) -> Result<()> {
    job.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn with_avx512(job: impl Job, lanes: super::avx512::Avx512) -> Result<()> {
    job.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn with_avx512_bf16(job: impl Job, lanes: super::avx512::Avx512Bf16) -> Result<()> {
    job.run(lanes)
}
