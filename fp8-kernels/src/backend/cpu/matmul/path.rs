//! The names of the instruction sets that the CPU backend uses.

use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

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
    pub(super) const ALL: [Self; 5] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

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
