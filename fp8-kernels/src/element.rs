//! The Rust types of tensors' elements, and arrays of them in host memory.

use crate::DType;
use crate::host::Array;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use std::sync::Arc;

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

/// An [`Element`] that is converted to f32 exactly and from f32 to the nearest value, ties to even. The methods that take slices
/// of equal length use vector instructions.
///
/// A 16-bit type stores every NaN as 0x7FFF, whatever its sign and payload, as GPUs do when they round.
pub(crate) trait Float: Element + fp8_format::slice::Source {
    #[inline(always)]
    fn widen(data: &[Self], out: &mut [f32]) {
        out.iter_mut().zip(data).for_each(|(o, &v)| *o = v.to_f32());
    }

    #[inline(always)]
    fn round(values: &[f32], out: &mut [Self]) {
        out.iter_mut().zip(values).for_each(|(o, &v)| *o = Self::nearest(v));
    }

    /// Rounds one value.
    fn nearest(value: f32) -> Self;
}

/// The NaN of both 16-bit types.
const NAN16: u16 = 0x7FFF;

/// Host memory of a tensor: one shared array per element type.
#[expect(unnameable_types, reason = "seen by the sealed half of Element alone")]
#[derive(Clone)]
pub enum Buffer {
    F32(Arc<Array<f32>>),
    BF16(Arc<Array<bf16>>),
    F16(Arc<Array<f16>>),
    I32(Arc<Array<i32>>),
    U8(Arc<Array<u8>>),
}

pub(crate) mod sealed {
    use super::Buffer;
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
            fn wrap(data: Arc<Array<Self>>) -> Buffer {
                Buffer::$variant(data)
            }

            fn unwrap(buffer: &Buffer) -> Option<&Arc<Array<Self>>> {
                if let Buffer::$variant(data) = buffer { Some(data) } else { None }
            }

            fn unwrap_mut(buffer: &mut Buffer) -> Option<&mut Arc<Array<Self>>> {
                if let Buffer::$variant(data) = buffer { Some(data) } else { None }
            }
        }
    };
}

element!(f32, F32);
element!(bf16, BF16);
element!(f16, F16);
element!(i32, I32);
element!(u8, U8);

impl Float for f32 {
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        value
    }
}

impl Float for bf16 {
    /// Rounds without branches, so that a loop of it is vectorized.
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        Self::from_bits(if value.is_nan() { NAN16 } else { rounded as u16 })
    }
}

// `half` detects the CPU's instructions at each call, so this converts a whole slice per call.
impl Float for f16 {
    fn widen(data: &[Self], out: &mut [f32]) {
        data.convert_to_f32_slice(out);
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(values);
        // The conversion keeps signs and payloads of NaN.
        out.iter_mut().for_each(|o| *o = one_nan(*o));
    }

    fn nearest(value: f32) -> Self {
        one_nan(Self::from_f32(value))
    }
}

#[inline(always)]
fn one_nan(value: f16) -> f16 {
    if value.to_bits() & 0x7FFF > 0x7C00 { f16::from_bits(NAN16) } else { value }
}
