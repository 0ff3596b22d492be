//! `amax` on a GPU.

use super::slot::AmaxRequest;
use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::{DType, Result, Shape, Tensor};

const THREADS: u32 = 256;
/// Elements of one step of a block, as the kernel has them.
const PER_BLOCK: u64 = 256 * 8 * 4;

pub(crate) fn amax(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let out = gpu.zeros(DType::F32, 1)?;
    record(gpu, "amax", x, &AmaxRequest { unset: 0, cell: out.ptr() })?;
    Ok(Tensor::from_cuda(out, Shape::from([]), x.device()))
}

/// Max-combines the amax of `x`, read as it is stored; nothing for no elements.
pub(super) fn record(gpu: &Gpu, op: &'static str, x: &Tensor, request: &AmaxRequest) -> Result<()> {
    let n = x.numel() as u64;
    let kernel = gpu.load(kernels::AMAX)?;
    let grid = Grid { blocks: gpu.blocks(n, PER_BLOCK, 8), threads: THREADS, shared: 0 };
    let args = kernels::Amax {
        x: In::void(x.cuda(op)?),
        dtype: dtype_number(x.dtype()),
        n,
        unset: In::f32(request.unset),
        cell: Out::i32(request.cell),
    };
    // SAFETY: x holds n elements of that type, `cell` is an f32 and `unset` one or null.
    unsafe { kernel.launch(gpu, grid, &args) }
}
