//! Arrays in host memory of any element type.

use super::parallel;
use crate::element::{Buffer, Element, Float};
use crate::host::{self, Array};
use crate::{DType, Error, MemoryKind, Result};
use half::{bf16, f16};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Runs `$body` with `$data` bound to the array, whichever type it has.
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
            Ok(T::wrap(Arc::new(Array::zeroed(op, len)?)))
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
            Ok(T::wrap(Arc::new(Array::filled(op, rounded[0], len)?)))
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
    pub(crate) fn from_f32(data: impl Into<Array<f32>>, dtype: DType, op: &'static str) -> Result<Self> {
        fn round<T: Float>(data: &[f32], op: &'static str) -> Result<Arc<Array<T>>> {
            let mut out = Array::for_overwrite(op, data.len())?;
            parallel::zip(&mut out, data, |out, data| T::round(data, out));
            Ok(Arc::new(out))
        }
        let data = data.into();
        match dtype {
            DType::F32 => Ok(Self::F32(Arc::new(data))),
            DType::BF16 => Ok(Self::BF16(round(&data, op)?)),
            DType::F16 => Ok(Self::F16(round(&data, op)?)),
            found => Err(not_a_float(op, "the output", found)),
        }
    }

    /// Returns the values in f32: borrowed if they are f32, otherwise widened.
    pub(crate) fn read_f32(&self, op: &'static str) -> Result<Widened<'_>> {
        fn widened<T: Float>(data: &[T], op: &'static str) -> Result<Widened<'static>> {
            let mut out = Array::for_overwrite(op, data.len())?;
            widen(data, &mut out);
            Ok(Widened::Copied(out))
        }
        match self {
            Self::F32(data) => Ok(Widened::Borrowed(data)),
            Self::BF16(data) => widened(data, op),
            Self::F16(data) => widened(data, op),
            _ => Err(not_a_float(op, "the tensor", self.dtype())),
        }
    }

    /// As [`read_f32`](Self::read_f32), but only the values at `part` of every `step` values.
    pub(crate) fn read_f32_parts(
        &self,
        op: &'static str,
        step: usize,
        part: Range<usize>,
    ) -> Result<Array<f32>> {
        fn widened<T: Float>(
            data: &[T],
            op: &'static str,
            step: usize,
            part: Range<usize>,
        ) -> Result<Array<f32>> {
            let (count, len) = (data.len().checked_div(step).unwrap_or(0), part.len());
            let mut out = Array::for_overwrite(op, count * len)?;
            parallel::rows(&mut out, len, |first, out| {
                let steps = data[first * step..].chunks_exact(step);
                out.chunks_exact_mut(len)
                    .zip(steps)
                    .for_each(|(out, data)| T::widen(&data[part.clone()], out));
            });
            Ok(out)
        }
        match self {
            Self::F32(data) => widened(data, op, step, part),
            Self::BF16(data) => widened(data, op, step, part),
            Self::F16(data) => widened(data, op, step, part),
            _ => Err(not_a_float(op, "the tensor", self.dtype())),
        }
    }

    /// Copies the values in f32 to a vector.
    pub(crate) fn to_f32_vec(&self, op: &'static str) -> Result<Vec<f32>> {
        fn widened<T: Float>(data: &[T], op: &'static str) -> Result<Vec<f32>> {
            let mut out = host::zeroed(op, data.len())?;
            widen(data, &mut out);
            Ok(out)
        }
        match self {
            Self::F32(data) => host::copied(op, data),
            Self::BF16(data) => widened(data, op),
            Self::F16(data) => widened(data, op),
            _ => Err(not_a_float(op, "the tensor", self.dtype())),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        fn dtype<T: Element>(_: &[T]) -> DType {
            T::DTYPE
        }
        each!(self, data => dtype(data))
    }

    pub(crate) fn set_memory_kind(&self, kind: MemoryKind) {
        each!(self, data => data.set_memory_kind(kind));
    }

    /// The address of the elements.
    pub(crate) fn address(&self) -> u64 {
        each!(self, data => Arc::as_ptr(data).cast::<()>().addr() as u64)
    }

    pub(crate) fn holders(&self) -> usize {
        each!(self, data => Arc::strong_count(data) - 1)
    }
}

/// The values of a float tensor in f32.
#[derive(Debug)]
pub(crate) enum Widened<'a> {
    Borrowed(&'a [f32]),
    Copied(Array<f32>),
}

impl Deref for Widened<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Borrowed(values) => values,
            Self::Copied(values) => values,
        }
    }
}

fn widen<T: Float>(data: &[T], out: &mut [f32]) {
    parallel::zip(out, data, |out, data| T::widen(data, out));
}

fn not_a_float(op: &'static str, what: &'static str, found: DType) -> Error {
    Error::DType { op, what, found, expected: "f32, bf16 or f16" }
}
