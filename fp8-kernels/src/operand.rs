//! One side of a GEMM, in high precision or in FP8.

use crate::{DType, Device, Fp8Tensor, Result, Shape, Tensor};

/// With it a layer is written once, for FP8 and for high precision.
#[expect(clippy::large_enum_variant, reason = "few at a time, and a box would cost every GEMM an allocation")]
#[derive(Debug, Clone)]
pub enum Operand {
    /// Values.
    High(Tensor),
    /// Codes and their factor.
    Fp8(Fp8Tensor),
}

impl Operand {
    /// The extents.
    pub fn shape(&self) -> &Shape {
        match self {
            Self::High(x) => x.shape(),
            Self::Fp8(x) => x.shape(),
        }
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        match self {
            Self::High(x) => x.device(),
            Self::Fp8(x) => x.device(),
        }
    }

    /// Whether it is FP8.
    pub const fn is_fp8(&self) -> bool {
        matches!(self, Self::Fp8(_))
    }

    /// The FP8 tensor, if it is one.
    pub const fn as_fp8(&self) -> Option<&Fp8Tensor> {
        if let Self::Fp8(x) = self { Some(x) } else { None }
    }

    /// The high-precision tensor, if it is one.
    pub const fn as_high(&self) -> Option<&Tensor> {
        if let Self::High(x) = self { Some(x) } else { None }
    }

    /// What backward needs of it.
    #[must_use]
    pub fn for_backward(&self) -> Self {
        match self {
            Self::High(x) => Self::High(x.clone()),
            Self::Fp8(x) => Self::Fp8(x.for_backward()),
        }
    }

    /// The values: dequantized, or as they are.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::High(x) => crate::ops::cast(x, dtype),
            Self::Fp8(x) => x.dequantize(dtype),
        }
    }
}
