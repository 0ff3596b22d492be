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
    E2m1,
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
            33 => Ok(Self::E2m1),
            _ => Err(Code::BLAS_NOT_SUPPORTED),
        }
    }

    pub(crate) const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 | Self::E5m2 => 8,
            Self::E2m1 => 4,
        }
    }

    /// The bytes of so many elements in a row.
    pub(crate) const fn bytes(self, count: usize) -> usize {
        count.saturating_mul(self.bits()).div_ceil(8)
    }

    /// The alignment of an element, in bytes.
    pub(crate) const fn alignment(self) -> u64 {
        self.bytes(1) as u64
    }

    pub(crate) const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    /// Whether operands of the type have factors.
    pub(crate) const fn has_factors(self) -> bool {
        self.is_fp8() || matches!(self, Self::E2m1)
    }
}

/// `cublasLtMatmulMatrixScale_t`: what the factors of an FP8 or FP4 operand `[rows, k]` are, k the dimension that is summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScaleMode {
    /// SCALAR_32F: one f32.
    Scalar,
    /// VEC16_UE4M3: E4M3 for 16 values of k.
    Vec16,
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
    const BLOCKS_SINCE: usize = 12_08_00;
    const HOPPER_SINCE: usize = 12_09_00;

    pub(crate) fn from_number(number: i32, version: usize) -> Outcome<Self> {
        let (mode, since) = match number {
            0 => (Self::Scalar, Self::BLOCKS_SINCE),
            1 => (Self::Vec16, Self::BLOCKS_SINCE),
            2 => (Self::Vec32, Self::BLOCKS_SINCE),
            3 => (Self::Outer, Self::HOPPER_SINCE),
            4 => (Self::Vec128, Self::HOPPER_SINCE),
            5 => (Self::Tile128, Self::HOPPER_SINCE),
            _ => return Err(Code::BLAS_NOT_SUPPORTED),
        };
        match version {
            ..Self::BLOCKS_SINCE => Err(Code::BLAS_INVALID_VALUE),
            version if version < since => Err(Code::BLAS_NOT_SUPPORTED),
            _ => Ok(mode),
        }
    }

    /// Values of k that share a factor.
    pub(crate) const fn depth(self) -> Option<usize> {
        match self {
            Self::Scalar | Self::Outer => None,
            Self::Vec16 => Some(16),
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
    /// CUBLASLT_POINTER_MODE_DEVICE: alpha and beta are on the device.
    pub(crate) device_factors: bool,
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
