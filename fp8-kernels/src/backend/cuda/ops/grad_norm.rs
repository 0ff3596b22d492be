//! `grad_norm` on a GPU: one launch over all tensors, one that finishes.

use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::{DType, Device, Result, Shape, Tensor};

const THREADS: u32 = 256;
/// Elements of a tile, as the kernel has them.
const TILE: u64 = 256 * 8 * 8;
/// No more blocks than this, whatever the GPU: the order of the sum depends on the sizes alone.
const MOST_BLOCKS: u64 = 1024;

pub(crate) fn grad_norm(gpu: &Gpu, grads: &[&Tensor], device: &Device) -> Result<Tensor> {
    let shape = Shape::from([]);
    let (mut table, mut tiles) = (Vec::with_capacity(grads.len()), 0);
    for grad in grads.iter().filter(|grad| grad.numel() > 0) {
        let (data, len) = (grad.cuda("grad_norm")?, grad.numel() as u64);
        table.push([data.ptr(), len, u64::from(dtype_number(grad.dtype()).unsigned_abs()), tiles]);
        tiles += len.div_ceil(TILE);
    }
    if table.is_empty() {
        return Ok(Tensor::from_cuda(gpu.zeros(DType::F32, 1)?, shape, device));
    }
    let blocks = tiles.min(MOST_BLOCKS) as u32;
    let (partial, out) = (gpu.alloc(DType::F32, 6 * blocks as usize)?, gpu.alloc(DType::F32, 1)?);
    let uploaded = gpu.upload(&table)?;
    let kernel = gpu.load(kernels::GRAD_NORM_SQUARES)?;
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    let args = kernels::GradNormSquares {
        table: In::entry(&uploaded),
        tensors: table.len() as u64,
        tiles,
        partial: Out::f32(&partial),
    };
    // SAFETY: the table names live tensors with their lengths and types, first tiles rising from 0; `partial` holds
    // six f32 a block.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    let kernel = gpu.load(kernels::GRAD_NORM)?;
    // SAFETY: the first launch wrote six f32 a block, `out` holds one.
    unsafe {
        kernel.launch(
            gpu,
            Grid { blocks: 1, ..grid },
            &kernels::GradNorm { partial: In::f32(&partial), blocks: u64::from(blocks), out: Out::f32(&out) },
        )
    }?;
    Ok(Tensor::from_cuda(out, shape, device))
}
