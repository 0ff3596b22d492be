//! `rope` on a GPU.

use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{Positions, RopeTable};
use crate::{Result, Tensor};

/// Rotates by θ, or back by −θ.
pub(crate) fn rope(
    gpu: &Gpu,
    x: &Tensor,
    table: &RopeTable,
    positions: Positions<'_>,
    back: bool,
) -> Result<Tensor> {
    let values = x.cuda("rope")?;
    let (cos, sin) = (table.cos().cuda("rope")?, table.sin().cuda("rope")?);
    let half = table.cos().shape().last_dim();
    let [sequence, heads] = [1, 2].map(|dim| x.shape().get(dim).copied().unwrap_or(1));
    let rows = x.numel() / (2 * half).max(1);
    let y = gpu.alloc(x.dtype(), x.numel())?;
    let kernel = gpu.load(kernels::ROPE)?;
    // As the kernel: eight pairs of a row at a time, or one.
    let pieces = if half.is_multiple_of(8) { half / 8 } else { half };
    let (start, of) = match positions {
        Positions::From(start) => (start, None),
        Positions::Of(positions) => (0, Some(positions.cuda("rope")?)),
    };
    let limit = table.cos().shape().matrix()[0];
    let [rows, sequence, heads, half, start, limit] =
        [rows, sequence, heads, half, start, limit].map(|number| number as u64);
    let direction = if back { -1.0f32 } else { 1.0 };
    let (dtype, grid) = (dtype_number(x.dtype()), Grid::strided(gpu, rows * pieces as u64));
    let fault = gpu.fault();
    let args = kernels::Rope {
        x: In::void(values),
        y: Out::void(&y),
        cos: In::f32(cos),
        sin: In::f32(sin),
        positions: In::i32(of),
        rows,
        sequence,
        heads,
        half,
        start,
        limit,
        dtype,
        direction,
        fault: Out::i64(fault),
    };
    // SAFETY: x and y have rows · 2 · half elements of that type, both tables `limit` rows of half f32, at least
    // start + sequence (checked by `ops::rope`, as is that there is a position for each token, if any); others are
    // reported.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}
