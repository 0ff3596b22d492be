//! Work compiled for the instructions of each path, and run on those that the CPU has. The instances for a path are in its file, which
//! the compiler translates beside the others.

use super::lanes::{Job, Portable};
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
                    return unsafe { super::avx2::run(job, lanes, proof) };
                }
                job.run(lanes)
            }
            // SAFETY: the value of the lanes proves their features.
            #[cfg(target_arch = "aarch64")]
            Self::Neon(lanes) => unsafe { super::neon::run(job, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => unsafe { super::avx2::run(job, lanes, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => unsafe { super::avx512::run(job, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(lanes) => unsafe { super::avx512::run_bf16(job, lanes) },
            #[cfg(test)]
            Self::Model8(lanes) => super::models::run(job, lanes),
            #[cfg(test)]
            Self::Model16(lanes) => super::models::run(job, lanes),
            #[cfg(test)]
            Self::Model16Pairs(lanes) => super::models::run(job, lanes),
        }
    }
}
