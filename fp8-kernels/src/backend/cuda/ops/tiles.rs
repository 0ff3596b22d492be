//! Grids of kernels that go by tiles of 128 rows and 64 columns.

use super::{Gpu, Grid};
use crate::{DType, Result, Tensor};

/// Rows and columns of a tile, as the kernels' prelude has them.
pub(super) const TILE: [usize; 2] = [128, 64];
pub(super) const THREADS: u32 = 256;
/// Tiles that one block takes at most. More of them share the reductions at a block's end.
const LONGEST_RUN: usize = 8;
/// Blocks a multiprocessor, at least, before blocks take more than one tile.
const PER_SM: usize = 12;

/// Returns the number of tiles of a `[rows, cols]` matrix.
pub(super) const fn tiles(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE[0]) * cols.div_ceil(TILE[1])
}

/// One block for each run of tiles below each other, and the length of a run.
///
/// # Errors
/// More blocks than a grid can have.
pub(super) fn strips(gpu: &Gpu, op: &'static str, rows: usize, cols: usize) -> Result<(Grid, u64)> {
    let (down, across) = (rows.div_ceil(TILE[0]), cols.div_ceil(TILE[1]));
    let run = run(gpu, down * across);
    let blocks = across * down.div_ceil(run);
    Ok((Grid::new(op, blocks as u64, THREADS)?, run as u64))
}

/// Returns the number of tiles that each block takes if there are `tiles`.
pub(super) fn run(gpu: &Gpu, tiles: usize) -> usize {
    (tiles / (gpu.sms() as usize * PER_SM)).clamp(1, LONGEST_RUN)
}

/// A block for each tile, or for several of a grid that strides over them.
pub(super) fn grid(gpu: &Gpu, tiles: usize, per_sm: u32) -> Grid {
    Grid { blocks: gpu.blocks(tiles as u64, 1, per_sm), threads: THREADS, shared: 0 }
}

/// Rows and columns of a matrix of bf16 that consists of whole tiles, for the kernels that take nothing else.
pub(super) fn whole_bf16(x: &Tensor, tile: [usize; 2]) -> Option<[u32; 2]> {
    let matrix @ [rows, cols] = x.shape().matrix();
    let is_whole = x.dtype() == DType::BF16
        && x.numel() > 0
        && rows.is_multiple_of(tile[0])
        && cols.is_multiple_of(tile[1]);
    let [rows, cols] = matrix.map(u32::try_from);
    if is_whole { Some([rows.ok()?, cols.ok()?]) } else { None }
}

/// The number of something that a grid has, as the kernels for whole tiles take it.
///
/// # Errors
/// More than a grid can have.
pub(super) fn number(op: &'static str, tiles: usize) -> Result<u32> {
    Grid::new(op, tiles as u64, THREADS).map(|grid| grid.blocks)
}
