//! Changes of cells on a GPU that are more than copies.

use super::{Buffer, Gpu, Grid, In, Out, kernels};
use crate::Result;

/// The cells from `address` on keep the larger of themselves and their value.
pub(crate) fn merge_max(gpu: &Gpu, address: u64, values: &[f32]) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let uploaded = gpu.upload(values)?;
    let kernel = gpu.load(kernels::CELLS_MERGE_MAX)?;
    let len = values.len() as u64;
    // SAFETY: n values were just uploaded, and the caller names as many cells.
    unsafe {
        kernel.launch(
            gpu,
            Grid::strided(gpu, len),
            &kernels::CellsMergeMax { cells: Out::i32(address), values: In::i32(&uploaded), n: len },
        )
    }
}

/// The cell at `address` keeps the larger of itself and the cell at `other`.
pub(crate) fn merge_cell(gpu: &Gpu, address: u64, other: u64) -> Result<()> {
    let kernel = gpu.load(kernels::CELLS_MERGE_MAX)?;
    // SAFETY: the caller holds both cells, one f32 each.
    unsafe {
        kernel.launch(
            gpu,
            Grid { blocks: 1, threads: 256, shared: 0 },
            &kernels::CellsMergeMax { cells: Out::i32(address), values: In::i32(other), n: 1 },
        )
    }
}

/// Each cell that is below 0 becomes `value`.
pub(crate) fn replace_negative(gpu: &Gpu, cells: &Buffer, value: f32) -> Result<()> {
    let kernel = gpu.load(kernels::CELLS_REPLACE_NEGATIVE)?;
    let len = cells.len() as u64;
    // SAFETY: the buffer holds n f32.
    unsafe {
        kernel.launch(
            gpu,
            Grid::strided(gpu, len),
            &kernels::CellsReplaceNegative { cells: Out::f32(cells), value, n: len },
        )
    }
}
