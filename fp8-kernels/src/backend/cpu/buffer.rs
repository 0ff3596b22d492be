//! Host memory of a tensor: one shared vector per element type.

use super::parallel;
use crate::dtype::{Element, Float};
use crate::{DType, Error, Result, host};
use half::{bf16, f16};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

#[expect(unnameable_types, reason = "seen by the sealed half of Element alone")]
#[derive(Clone)]
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

/// Prints the first values.
impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        each!(self, data => {
            let mut list = f.debug_list();
            list.entries(data.iter().take(SHOWN));
            if data.len() > SHOWN { list.finish_non_exhaustive() } else { list.finish() }
        })
    }
}

impl Buffer {
    pub(crate) fn zeros(op: &'static str, dtype: DType, len: usize) -> Result<Self> {
        fn zeros<T: Element>(op: &'static str, len: usize) -> Result<Buffer> {
            Ok(T::wrap(Arc::new(host::zeroed(op, len)?)))
        }
        match dtype {
            DType::F32 => zeros::<f32>(op, len),
            DType::BF16 => zeros::<bf16>(op, len),
            DType::F16 => zeros::<f16>(op, len),
            DType::I32 => zeros::<i32>(op, len),
            DType::U8 => zeros::<u8>(op, len),
        }
    }

    /// `len` times `value`, rounded once to `dtype`.
    pub(crate) fn full(op: &'static str, value: f32, dtype: DType, len: usize) -> Result<Self> {
        fn full<T: Float>(op: &'static str, value: f32, len: usize) -> Result<Buffer> {
            let mut rounded = [T::default()];
            T::round(&[value], &mut rounded);
            Ok(T::wrap(Arc::new(host::filled(op, rounded[0], len)?)))
        }
        match dtype {
            _ if value.to_bits() == 0 && dtype.is_float() => Self::zeros(op, dtype, len),
            DType::F32 => full::<f32>(op, value, len),
            DType::BF16 => full::<bf16>(op, value, len),
            DType::F16 => full::<f16>(op, value, len),
            found => Err(not_a_float(op, "the output", found)),
        }
    }

    /// Rounds once to `dtype`; f32 is taken as it is.
    pub(crate) fn from_f32(data: Vec<f32>, dtype: DType, op: &'static str) -> Result<Self> {
        fn round<T: Float>(data: &[f32], op: &'static str) -> Result<Arc<Vec<T>>> {
            let mut out = host::zeroed(op, data.len())?;
            parallel::zip(&mut out, data, |out, data| T::round(data, out));
            Ok(Arc::new(out))
        }
        match dtype {
            DType::F32 => Ok(Self::F32(Arc::new(data))),
            DType::BF16 => Ok(Self::BF16(round(&data, op)?)),
            DType::F16 => Ok(Self::F16(round(&data, op)?)),
            found => Err(not_a_float(op, "the output", found)),
        }
    }

    /// The values in f32: borrowed if they are, widened if not.
    pub(crate) fn read_f32(&self, op: &'static str) -> Result<Cow<'_, [f32]>> {
        fn widen<T: Float>(data: &[T], op: &'static str) -> Result<Cow<'static, [f32]>> {
            let mut out = host::zeroed(op, data.len())?;
            parallel::zip(&mut out, data, |out, data| T::widen(data, out));
            Ok(Cow::Owned(out))
        }
        match self {
            Self::F32(data) => Ok(Cow::Borrowed(data)),
            Self::BF16(data) => widen(data, op),
            Self::F16(data) => widen(data, op),
            _ => Err(not_a_float(op, "the tensor", self.dtype())),
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

fn not_a_float(op: &'static str, what: &'static str, found: DType) -> Error {
    Error::DType { op, what, found, expected: "f32, bf16 or f16" }
}
