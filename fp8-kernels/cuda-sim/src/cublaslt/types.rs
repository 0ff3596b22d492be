//! The contents of cuBLASLt's descriptors.

use crate::code::{Code, Outcome};

/// `cudaDataType_t`, as far as the products here use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
}

impl Type {
    /// cuBLAS documentation, cublasLtMatmul: types outside its tables are CUBLAS_STATUS_NOT_SUPPORTED.
    pub(crate) fn from_number(number: i32) -> Outcome<Self> {
        match number {
            0 => Ok(Self::F32),
            2 => Ok(Self::F16),
            14 => Ok(Self::Bf16),
            28 => Ok(Self::E4m3),
            29 => Ok(Self::E5m2),
            _ => Err(Code::BLAS_NOT_SUPPORTED),
        }
    }

    pub(crate) const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }

    pub(crate) const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }
}

/// `cublasLtMatmulMatrixScale_t`: what the factors of an FP8 operand `[rows, k]` are, k the dimension that is summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScaleMode {
    /// SCALAR_32F: one f32.
    Scalar,
    /// VEC32_UE8M0: E8M0 for 32 values of k.
    Vec32,
    /// OUTER_VEC_32F: an f32 a row.
    Outer,
    /// VEC128_32F: an f32 for 128 values of k.
    Vec128,
    /// BLK128x128_32F: an f32 for 128 rows of 128 values of k.
    Tile128,
}

impl ScaleMode {
    /// The first versions of cuBLAS that have a mode.
    const MX_SINCE: usize = 12_08_00;
    const HOPPER_SINCE: usize = 12_09_00;

    pub(crate) fn from_number(number: i32, version: usize) -> Outcome<Self> {
        let (mode, since) = match number {
            0 => (Self::Scalar, Self::MX_SINCE),
            2 => (Self::Vec32, Self::MX_SINCE),
            3 => (Self::Outer, Self::HOPPER_SINCE),
            4 => (Self::Vec128, Self::HOPPER_SINCE),
            5 => (Self::Tile128, Self::HOPPER_SINCE),
            _ => return Err(Code::BLAS_NOT_SUPPORTED),
        };
        match version {
            ..Self::MX_SINCE => Err(Code::BLAS_INVALID_VALUE),
            version if version < since => Err(Code::BLAS_NOT_SUPPORTED),
            _ => Ok(mode),
        }
    }

    /// Values of k that share a factor.
    pub(crate) const fn depth(self) -> Option<usize> {
        match self {
            Self::Scalar | Self::Outer => None,
            Self::Vec32 => Some(32),
            Self::Vec128 | Self::Tile128 => Some(128),
        }
    }
}

/// `cublasLtMatmulDesc_t`. Pointers are device addresses; 0 stands for one that was not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    /// A, B.
    pub(crate) transposed: [bool; 2],
    pub(crate) epilogue: u32,
    pub(crate) bias: u64,
    /// None where it was not set: D's type, or for FP8 inputs the one that D's type demands.
    pub(crate) bias_type: Option<i32>,
    /// A, B, C, D.
    pub(crate) scales: [u64; 4],
    /// A, B.
    pub(crate) modes: [ScaleMode; 2],
    pub(crate) amax_d: u64,
    pub(crate) fast: bool,
}

/// `cublasLtMatrixLayout_t`: column-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) kind: i32,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) ld: i64,
}

/// `cublasLtMatmulPreference_t`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Preference {
    pub(crate) workspace: u64,
    /// The alignment that the caller promises for each pointer, in bytes. `None` means 256.
    pub(crate) alignment: [Option<u32>; 4],
}
