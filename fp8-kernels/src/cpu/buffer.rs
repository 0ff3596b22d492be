//! Host memory of a tensor: one shared vector per element type.

use super::parallel;
use crate::dtype::{Element, Float};
use crate::{DType, Error, Result};
use half::{bf16, f16};
use std::borrow::Cow;
use std::sync::Arc;

#[expect(unnameable_types, reason = "seen by the sealed half of Element alone")]
#[derive(Debug, Clone)]
pub enum Buffer {
    F32(Arc<Vec<f32>>),
    BF16(Arc<Vec<bf16>>),
    F16(Arc<Vec<f16>>),
    I32(Arc<Vec<i32>>),
    U8(Arc<Vec<u8>>),
}

/// Runs `$body` with `$data` bound to the vector, whichever type it has.
macro_rules! each {
    ($buffer:expr, $data:ident => $body:expr) => {
        match $buffer {
            Buffer::F32($data) => $body,
            Buffer::BF16($data) => $body,
            Buffer::F16($data) => $body,
            Buffer::I32($data) => $body,
            Buffer::U8($data) => $body,
        }
    };
}

impl Buffer {
    pub(crate) fn zeros(dtype: DType, len: usize) -> Self {
        fn zeros<T: Element>(len: usize) -> Buffer {
            T::wrap(Arc::new(vec![T::default(); len]))
        }
        match dtype {
            DType::F32 => zeros::<f32>(len),
            DType::BF16 => zeros::<bf16>(len),
            DType::F16 => zeros::<f16>(len),
            DType::I32 => zeros::<i32>(len),
            DType::U8 => zeros::<u8>(len),
        }
    }

    /// Rounds once to `dtype`; f32 is taken as it is.
    pub(crate) fn from_f32(data: Vec<f32>, dtype: DType, op: &'static str) -> Result<Self> {
        fn round<T: Float>(data: &[f32]) -> Arc<Vec<T>> {
            let mut out = vec![T::default(); data.len()];
            parallel::zip(&mut out, data, |out, data| T::round(data, out));
            Arc::new(out)
        }
        match dtype {
            DType::F32 => Ok(Self::F32(Arc::new(data))),
            DType::BF16 => Ok(Self::BF16(round(&data))),
            DType::F16 => Ok(Self::F16(round(&data))),
            found => Err(Error::DType { op, what: "the output", found, expected: "f32, bf16 or f16" }),
        }
    }

    /// The values in f32: borrowed if they are, widened if not.
    pub(crate) fn read_f32(&self, op: &'static str) -> Result<Cow<'_, [f32]>> {
        fn widen<T: Float>(data: &[T]) -> Cow<'static, [f32]> {
            let mut out = vec![0.0; data.len()];
            parallel::zip(&mut out, data, |out, data| T::widen(data, out));
            Cow::Owned(out)
        }
        match self {
            Self::F32(data) => Ok(Cow::Borrowed(data)),
            Self::BF16(data) => Ok(widen(data)),
            Self::F16(data) => Ok(widen(data)),
            _ => Err(Error::DType {
                op,
                what: "the tensor",
                found: self.dtype(),
                expected: "f32, bf16 or f16",
            }),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        fn dtype<T: Element>(_: &[T]) -> DType {
            T::DTYPE
        }
        each!(self, data => dtype(data))
    }

    pub(crate) fn holders(&self) -> usize {
        each!(self, data => Arc::strong_count(data) - 1)
    }
}
