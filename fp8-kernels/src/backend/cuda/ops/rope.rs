//! `rope` on a GPU.

use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
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
    let y = gpu.alloc(x.dtype(), x.numel())?;
    let heads = x.shape().get(2).copied().unwrap_or(1);
    // SAFETY: x and y have the elements of x's shape.
    unsafe { launch(gpu, [x.cuda("rope")?, &y], x, heads, table, positions, back) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

/// Rotates the first heads of each token, in place.
pub(crate) fn rope_in_place(
    gpu: &Gpu,
    x: &mut Tensor,
    heads: usize,
    table: &RopeTable,
    positions: Positions<'_>,
    back: bool,
    name: &str,
) -> Result<()> {
    let values = x.cuda_mut(name)?.clone();
    // SAFETY: x has the elements of its shape, and nobody else has it.
    unsafe { launch(gpu, [&values, &values], x, heads, table, positions, back) }
}

/// # Safety
/// `from` and `to`, which may be the same, have as many elements of x's type as x.
unsafe fn launch(
    gpu: &Gpu,
    [from, to]: [&Buffer; 2],
    x: &Tensor,
    heads: usize,
    table: &RopeTable,
    positions: Positions<'_>,
    back: bool,
) -> Result<()> {
    let (cos, sin) = (table.cos().cuda("rope")?, table.sin().cuda("rope")?);
    let half = table.cos().shape().last_dim();
    let [batch, sequence] = [0, 1].map(|dim| x.shape().get(dim).copied().unwrap_or(1));
    let pitch: usize = x.shape().iter().skip(2).product();
    let rows = batch * sequence * heads;
    let kernel = gpu.load(kernels::ROPE)?;
    // As the kernel: eight pairs of a row at a time, or one.
    let pieces = if half.is_multiple_of(8) { half / 8 } else { half };
    let (start, of) = match positions {
        Positions::From(start) => (start, None),
        Positions::Of(positions) => (0, Some(positions.cuda("rope")?)),
    };
    let limit = table.cos().shape().matrix()[0];
    let [rows, sequence, heads, half, pitch, start, limit] =
        [rows, sequence, heads, half, pitch, start, limit].map(|number| number as u64);
    let direction = if back { -1.0f32 } else { 1.0 };
    let (dtype, grid) = (dtype_number(x.dtype()), Grid::strided(gpu, rows * pieces as u64));
    let fault = gpu.fault();
    let args = kernels::Rope {
        x: In::void(from),
        y: Out::void(to),
        cos: In::f32(cos),
        sin: In::f32(sin),
        positions: In::i32(of),
        rows,
        sequence,
        heads,
        half,
        pitch,
        start,
        limit,
        dtype,
        direction,
        fault: Out::i64(fault),
    };
    // SAFETY: x and y have rows / heads tokens of `pitch` elements of that type, at least heads · 2 · half, both tables
    // `limit` rows of half f32, at least start + sequence (checked by `ops::rope`, as is that there is a position for each
    // token, if any); others are reported.
    unsafe { kernel.launch(gpu, grid, &args) }
}
