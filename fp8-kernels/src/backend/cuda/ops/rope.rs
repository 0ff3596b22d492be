//! `rope` on a GPU.

use super::{Gpu, Grid, Source, args, dtype_number};
use crate::ops::RopeTable;
use crate::{Result, Tensor};

/// Rotates by θ, or back by −θ.
pub(crate) fn rope(gpu: &Gpu, x: &Tensor, table: &RopeTable, start: usize, back: bool) -> Result<Tensor> {
    let values = x.cuda("rope")?;
    let (cos, sin) = (table.cos().cuda("rope")?, table.sin().cuda("rope")?);
    let half = table.cos().shape().last_dim();
    let [sequence, heads] = [1, 2].map(|dim| x.shape().get(dim).copied().unwrap_or(1));
    let rows = x.numel() / (2 * half).max(1);
    let y = gpu.alloc(x.dtype(), x.numel())?;
    let kernel = gpu.kernel(Source::Rope, "rope")?;
    // As the kernel: eight pairs of a row at a time, or one.
    let pieces = if half.is_multiple_of(8) { half / 8 } else { half };
    let [rows, sequence, heads, half, start] =
        [rows, sequence, heads, half, start].map(|number| number as u64);
    let direction = if back { -1.0f32 } else { 1.0 };
    let (dtype, grid) = (dtype_number(x.dtype()), Grid::strided(gpu, rows * pieces as u64));
    let args = args![values, &y, cos, sin, rows, sequence, heads, half, start, dtype, direction];
    // SAFETY: the kernel's parameters (x, y, cos, sin, rows, sequence, heads, half, start, dtype, direction); x and y have
    // rows · 2 · half elements of that type, both tables at least start + sequence rows of half f32 (checked by `ops::rope`).
    unsafe { kernel.launch(gpu, grid, &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}
