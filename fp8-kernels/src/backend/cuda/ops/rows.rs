//! `rows` on a GPU: one copy, since rows are contiguous.

use super::Gpu;
use crate::{Result, Shape, Tensor};

/// `shape` is the result's.
pub(crate) fn rows(gpu: &Gpu, x: &Tensor, start: usize, shape: Shape) -> Result<Tensor> {
    let out = gpu.alloc(x.dtype(), shape.numel())?;
    let width = shape[1..].iter().product::<usize>() * x.dtype().size();
    gpu.copy(out.ptr(), x.cuda("rows")?.ptr() + (start * width) as u64, out.bytes())?;
    Ok(Tensor::from_cuda(out, shape, x.device()))
}
