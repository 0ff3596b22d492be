//! Work compiled for the instructions of each path.

use super::lanes::{Lanes, Portable};
use super::path::CpuPath;
use crate::Result;

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
    pub(super) fn detect(path: CpuPath) -> Option<Self> {
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
