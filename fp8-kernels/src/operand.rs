//! One side of a GEMM, in high precision or in FP8.

use crate::{DType, Device, Fp8Tensor, Result, Shape, Tensor};

/// A tensor in high precision or in FP8: what quantizing operations return and GEMMs take.
///
/// Code that passes operands on works for both, so a layer is written once.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Operand, Scale, ScaleRule, Slot, Tensor, ops};
/// fn product(x: &Operand, w: &Operand) -> fp8_kernels::Result<f32> {
///     ops::fprop(x, w, None, DType::F32, ops::Accumulation::Fast)?.item()
/// }
/// let x = Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &Device::cpu())?;
/// let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
/// let on = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
/// for slot in [on, Slot::off(Encoding::E4M3)] {
///     let x = ops::quantize(&x, &slot)?;
///     assert_eq!(x.is_fp8(), !slot.is_off());
///     assert_eq!(product(&x, &x)?, 5.0); // 1·1 + 2·2
/// }
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(
    clippy::large_enum_variant,
    reason = "operands are few, and a box would cost each GEMM an allocation"
)]
#[derive(Debug, Clone)]
pub enum Operand {
    /// Values in high precision: f32, bf16 or f16.
    High(Tensor),
    /// FP8 codes and their dequantization factor.
    Fp8(Fp8Tensor),
}

impl Operand {
    /// Returns the shape.
    pub fn shape(&self) -> &Shape {
        match self {
            Self::High(x) => x.shape(),
            Self::Fp8(x) => x.shape(),
        }
    }

    /// Returns the device that the tensor is on.
    pub fn device(&self) -> &Device {
        match self {
            Self::High(x) => x.device(),
            Self::Fp8(x) => x.device(),
        }
    }

    /// Returns true if the tensor is in FP8.
    pub const fn is_fp8(&self) -> bool {
        matches!(self, Self::Fp8(_))
    }

    /// Returns the FP8 tensor, or `None` in high precision.
    pub const fn as_fp8(&self) -> Option<&Fp8Tensor> {
        if let Self::Fp8(x) = self { Some(x) } else { None }
    }

    /// Returns the high-precision tensor, or `None` in FP8.
    pub const fn as_high(&self) -> Option<&Tensor> {
        if let Self::High(x) = self { Some(x) } else { None }
    }

    /// Returns what a backward pass needs of the tensor: [`Fp8Tensor::for_backward`] in FP8, a shared clone in high precision.
    #[must_use]
    pub fn for_backward(&self) -> Self {
        match self {
            Self::High(x) => Self::High(x.clone()),
            Self::Fp8(x) => Self::Fp8(x.for_backward()),
        }
    }

    /// Returns the values in `dtype`: dequantized from FP8, or converted by [`ops::cast`](crate::ops::cast()).
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
