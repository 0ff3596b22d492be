//! What a tensor's elements are.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

/// Element types of a [`Tensor`](crate::Tensor).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32.
    BF16,
    /// IEEE half precision.
    F16,
    /// Token ids, targets, lengths.
    I32,
    /// FP8 codes and masks.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// Whether it is one of the three high-precision types.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::BF16 | Self::F16)
    }

    /// `f32`, `bf16`, `f16`, `i32` or `u8`.
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

/// A Rust type that tensors can hold.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + PartialEq + Send + Sync + fmt::Debug {
    /// Its tag.
    const DTYPE: DType;
}

/// An [`Element`] with a value in f32, exact; and the nearest one to an f32, ties to even. Whole slices, of one length, go
/// through vectors.
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
    use std::sync::Arc;

    #[expect(unnameable_types, reason = "so that nobody else implements Element")]
    pub trait Sealed: Sized {
        fn wrap(data: Arc<Vec<Self>>) -> Buffer;
        fn unwrap(buffer: &Buffer) -> Option<&Arc<Vec<Self>>>;
        fn unwrap_mut(buffer: &mut Buffer) -> Option<&mut Arc<Vec<Self>>>;
    }
}

macro_rules! element {
    ($type:ty, $variant:ident) => {
        impl Element for $type {
            const DTYPE: DType = DType::$variant;
        }

        impl sealed::Sealed for $type {
            fn wrap(data: std::sync::Arc<Vec<Self>>) -> crate::backend::cpu::Buffer {
                crate::backend::cpu::Buffer::$variant(data)
            }

            fn unwrap(buffer: &crate::backend::cpu::Buffer) -> Option<&std::sync::Arc<Vec<Self>>> {
                if let crate::backend::cpu::Buffer::$variant(data) = buffer { Some(data) } else { None }
            }

            fn unwrap_mut(
                buffer: &mut crate::backend::cpu::Buffer,
            ) -> Option<&mut std::sync::Arc<Vec<Self>>> {
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
    /// Without branches; a NaN stays one.
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

// half looks for the CPU's instructions once a call: here once a slice.
impl Float for f16 {
    fn widen(data: &[Self], out: &mut [f32]) {
        data.convert_to_f32_slice(out);
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(values);
    }
}
