//! The element types of tensors.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

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

impl FromStr for DType {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [Self::F32, Self::BF16, Self::F16, Self::I32, Self::U8]
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| crate::Error::Option {
                op: "dtype",
                option: "name",
                value: name.to_owned(),
                remedy: "expected f32, bf16, f16, i32 or u8".to_owned(),
            })
    }
}

/// A Rust type that can be an element of a [`Tensor`](crate::Tensor): f32, bf16, f16, i32 or u8.
///
/// ```
/// use fp8_kernels::{DType, Device, Element, Tensor, bf16};
/// fn first<T: Element>(x: &Tensor) -> fp8_kernels::Result<Option<T>> {
///     Ok(x.to_vec::<T>()?.first().copied())
/// }
/// assert_eq!(bf16::DTYPE, DType::BF16);
/// let x = Tensor::from_vec(vec![bf16::ONE], [1], &Device::cpu())?;
/// assert_eq!(first::<bf16>(&x)?, Some(bf16::ONE));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + PartialEq + Send + Sync + fmt::Debug {
    /// The type as a value.
    const DTYPE: DType;
}

/// An [`Element`] that is converted to f32 exactly and from f32 to the nearest value, ties to even. The methods convert slices
/// of equal length with vector instructions.
pub(crate) trait Float: Element + fp8_format::slice::Source {
    #[inline(always)]
    fn widen(data: &[Self], out: &mut [f32]) {
        out.iter_mut().zip(data).for_each(|(o, &v)| *o = v.to_f32());
    }

    #[inline(always)]
    fn round(values: &[f32], out: &mut [Self]) {
        out.iter_mut().zip(values).for_each(|(o, &v)| *o = Self::from_f32(v));
    }
}

pub(crate) mod sealed {
    use crate::backend::cpu::Buffer;
    use crate::host::Array;
    use std::sync::Arc;

    #[expect(unnameable_types, reason = "so that other crates cannot implement Element")]
    pub trait Sealed: Sized {
        fn wrap(data: Arc<Array<Self>>) -> Buffer;
        fn unwrap(buffer: &Buffer) -> Option<&Arc<Array<Self>>>;
        fn unwrap_mut(buffer: &mut Buffer) -> Option<&mut Arc<Array<Self>>>;
    }
}

macro_rules! element {
    ($type:ty, $variant:ident) => {
        impl Element for $type {
            const DTYPE: DType = DType::$variant;
        }

        impl sealed::Sealed for $type {
            fn wrap(data: std::sync::Arc<crate::host::Array<Self>>) -> crate::backend::cpu::Buffer {
                crate::backend::cpu::Buffer::$variant(data)
            }

            fn unwrap(
                buffer: &crate::backend::cpu::Buffer,
            ) -> Option<&std::sync::Arc<crate::host::Array<Self>>> {
                if let crate::backend::cpu::Buffer::$variant(data) = buffer { Some(data) } else { None }
            }

            fn unwrap_mut(
                buffer: &mut crate::backend::cpu::Buffer,
            ) -> Option<&mut std::sync::Arc<crate::host::Array<Self>>> {
                if let crate::backend::cpu::Buffer::$variant(data) = buffer { Some(data) } else { None }
            }
        }
    };
}

element!(f32, F32);
element!(bf16, BF16);
element!(f16, F16);
element!(i32, I32);
element!(u8, U8);

impl Float for f32 {}

impl Float for bf16 {
    /// Rounds without branches, so that the loop is vectorized; NaN stays NaN.
    #[inline(always)]
    fn round(values: &[f32], out: &mut [Self]) {
        for (o, v) in out.iter_mut().zip(values) {
            let bits = v.to_bits();
            let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
            let quiet = bits >> 16 | 0x40;
            *o = Self::from_bits(if v.is_nan() { quiet } else { rounded } as u16);
        }
    }
}

// `half` detects the CPU's instructions at each call, so this converts a whole slice per call.
impl Float for f16 {
    fn widen(data: &[Self], out: &mut [f32]) {
        data.convert_to_f32_slice(out);
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(values);
    }
}
