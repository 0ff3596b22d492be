//! The element types of tensors.

mod parse;

use std::fmt;

/// The element type of a [`Tensor`](crate::Tensor), parsed from and displayed as its Rust name.
///
/// f32, bf16 and f16 are the *floats* of the operations' documentation. FP8 codes are [`DType::U8`]; their format is the
/// [`Encoding`](crate::Encoding) of an [`Fp8Tensor`](crate::Fp8Tensor).
///
/// ```
/// use fp8_kernels::DType;
/// assert_eq!("bf16".parse::<DType>()?, DType::BF16);
/// assert_eq!(DType::BF16.size(), 2);
/// assert!(DType::BF16.is_float() && !DType::I32.is_float());
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision, 32 bits.
    F32,
    /// bfloat16: 8 exponent bits, as f32, and 7 mantissa bits.
    BF16,
    /// IEEE half precision: 5 exponent bits and 10 mantissa bits.
    F16,
    /// 32-bit signed integers, for token ids, targets and lengths.
    I32,
    /// Bytes, for FP8 codes and masks.
    U8,
}

impl DType {
    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// Returns true for f32, bf16 and f16.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::BF16 | Self::F16)
    }

    /// Returns `f32`, `bf16`, `f16`, `i32` or `u8`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::I32 => "i32",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
