//! Changes of cells on a GPU that are more than copies.

use super::{Buffer, Gpu, Grid, Known, Source, args};
use crate::{Cell, Device, Result};

/// The cells from `address` on keep the larger of themselves and their value.
pub(crate) fn merge_max(gpu: &Gpu, address: u64, values: &[f32]) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let uploaded = gpu.upload(values)?;
    let kernel = gpu.kernel(Source::Cells, "cells_merge_max")?;
    let len = values.len() as u64;
    // SAFETY: the kernel's parameters (cells, values, n); n values were just uploaded, and the caller names as many cells.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, len), &args![address, &uploaded, len]) }
}

/// The cell at `address` keeps the larger of itself and the cell at `other`.
pub(crate) fn merge_cell(gpu: &Gpu, address: u64, other: u64) -> Result<()> {
    let kernel = gpu.kernel(Source::Cells, "cells_merge_max")?;
    // SAFETY: the kernel's parameters (cells, values, n); the caller holds both cells, one f32 each.
    unsafe { kernel.launch(gpu, Grid { blocks: 1, threads: 256, shared: 0 }, &args![address, other, 1u64]) }
}

/// Each cell that is below 0 becomes `value`.
pub(crate) fn replace_negative(gpu: &Gpu, cells: &Buffer, value: f32) -> Result<()> {
    let kernel = gpu.kernel(Source::Cells, "cells_replace_negative")?;
    let len = cells.len() as u64;
    // SAFETY: the kernel's parameters (cells, value, n); the buffer holds n f32.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, len), &args![cells, value, len]) }
}

/// The cell of one f32 into which queued work writes a scale above 0.
pub(crate) fn of_scale(gpu: &Gpu, buffer: Buffer, device: &Device) -> Result<Cell> {
    Ok(Cell::from_cuda(buffer, Known::new(gpu, 1, 1.0)?, device))
}
