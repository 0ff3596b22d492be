//! Float elements of whichever type, read as f32 in pieces that stay in the first caches, and tensors made that way.

use super::{Buffer, dispatch::vectorized, parallel, scratch};
use crate::element::Float;
use crate::host::Array;
use crate::{DType, Device, Error, Result, Shape, Tensor};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;

/// The elements of a float tensor: that they are floats was checked when this was made.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    pub(crate) fn of(x: &'a Tensor, op: &'static str, what: &'static str) -> Result<Self> {
        match x.cpu_buffer(op)? {
            Buffer::F32(data) => Ok(Self::F32(data)),
            Buffer::BF16(data) => Ok(Self::BF16(data)),
            Buffer::F16(data) => Ok(Self::F16(data)),
            _ => Err(Error::DType { op, what, found: x.dtype(), expected: "f32, bf16 or f16" }),
        }
    }

    /// The elements at `range`, in f32: borrowed if they are, else widened into `scratch`.
    #[inline(always)]
    pub(crate) fn read<'s>(self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        scratch.resize(if matches!(self, Self::F32(_)) { 0 } else { range.len() }, 0.0);
        match self {
            Self::F32(data) => return &data[range],
            Self::BF16(data) => Float::widen(&data[range], scratch),
            Self::F16(data) => Float::widen(&data[range], scratch),
        }
        scratch
    }
}

/// A tensor of `dtype` whose values `fill(first element, values)` computes in f32, in pieces of `step` elements, each
/// rounded once. `op` is what errors name.
pub(crate) fn build(
    op: &'static str,
    shape: Shape,
    dtype: DType,
    device: &Device,
    step: usize,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<Tensor> {
    fn rounded<T: Float>(
        op: &'static str,
        len: usize,
        step: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<Buffer> {
        let mut out = Array::<T>::for_overwrite(op, len)?;
        parallel::try_for_each(out.chunks_mut(step).enumerate(), |(piece, out)| {
            scratch::with(op, out.len(), |values| {
                vectorized(|| {
                    fill(piece * step, values);
                    T::round(values, out);
                });
            })
        })?;
        Ok(T::wrap(Arc::new(out)))
    }
    let len = shape.numel();
    let buffer = match dtype {
        DType::F32 => {
            let mut out = Array::for_overwrite(op, len)?;
            let piece = |(piece, out): (usize, &mut [f32])| vectorized(|| fill(piece * step, out));
            parallel::for_each(out.chunks_mut(step).enumerate(), piece);
            Buffer::F32(Arc::new(out))
        }
        DType::BF16 => rounded::<bf16>(op, len, step, fill)?,
        DType::F16 => rounded::<f16>(op, len, step, fill)?,
        found => {
            return Err(Error::DType { op, what: "the output", found, expected: "f32, bf16 or f16" });
        }
    };
    Ok(Tensor::from_buffer(buffer, shape, device))
}

/// [`build`] in pieces that only depend on the number of elements.
pub(crate) fn build_flat(
    op: &'static str,
    shape: Shape,
    dtype: DType,
    device: &Device,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<Tensor> {
    build(op, shape, dtype, device, parallel::CHUNK, fill)
}
