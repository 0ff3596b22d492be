//! `sum`, `mean`, `max` and `column_sums` on a GPU: partial results of blocks, then one launch that adds them in order.

use super::tiles::{self, TILE, tiles};
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{GradientMut, Update};
use crate::{DType, Result, Shape, Tensor};

const THREADS: u32 = 256;
/// Elements that a block of the first launch takes at least; few blocks for what fits one.
const PER_BLOCK: u64 = 16 * 1024;
/// No more blocks than this, whatever the GPU: the order of a sum depends on the number of elements alone.
const MOST_BLOCKS: u64 = 1024;

pub(crate) fn sum(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    total(gpu, x, 1.0)
}

pub(crate) fn mean(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    total(gpu, x, x.numel() as f32)
}

pub(crate) fn max(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let (blocks, values) = (blocks(x), x.cuda("max")?);
    let kernel = gpu.load(kernels::REDUCE_MAX)?;
    let (partial, out) = (gpu.alloc(DType::F32, blocks as usize)?, gpu.alloc(DType::F32, 1)?);
    let first = if blocks == 1 { &out } else { &partial };
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    // SAFETY: x holds n elements of that type, `out` one f32 a block.
    unsafe {
        kernel.launch(
            gpu,
            grid,
            &kernels::ReduceMax {
                x: In::void(values),
                dtype: dtype_number(x.dtype()),
                n: x.numel() as u64,
                out: Out::f32(first),
            },
        )
    }?;
    if blocks > 1 {
        let args = kernels::ReduceMax {
            x: In::void(&partial),
            dtype: dtype_number(DType::F32),
            n: u64::from(blocks),
            out: Out::f32(&out),
        };
        // SAFETY: as above, for the first launch's f32 and a single block.
        unsafe { kernel.launch(gpu, Grid { blocks: 1, ..grid }, &args) }?;
    }
    Ok(Tensor::from_cuda(out, Shape::from([]), x.device()))
}

pub(crate) fn column_sums(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let cols = x.shape().last_dim();
    let sums = gpu.alloc(DType::F32, cols)?;
    column_sums_at(gpu, "column_sums", x, Place::new(&sums))?;
    Ok(Tensor::from_cuda(sums, Shape::from([cols]), x.device()))
}

pub(crate) fn column_sums_into(gpu: &Gpu, x: &Tensor, out: &mut GradientMut<'_>) -> Result<()> {
    let place = Place::of(out)?;
    column_sums_at(gpu, "column_sums_into", x, place)
}

/// The place of sums over rows, one f32 for each column.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) address: u64,
    /// Whether they are added to what is there.
    pub(super) is_added: bool,
}

impl Place {
    /// A buffer that nothing was written to.
    pub(super) fn new(buffer: &Buffer) -> Self {
        Self { address: buffer.ptr(), is_added: false }
    }

    pub(super) fn of(gradient: &mut GradientMut<'_>) -> Result<Self> {
        let is_added = gradient.update == Update::Add;
        Ok(Self { address: gradient.tensor.cuda_mut(gradient.name)?.ptr(), is_added })
    }

    /// Puts the sums of no rows there.
    pub(super) fn put_zeros(self, gpu: &Gpu, cols: usize) -> Result<()> {
        if self.is_added || cols == 0 { Ok(()) } else { gpu.clear_bytes(self.address, 4 * cols) }
    }
}

/// Puts the sums of the columns of `x` at a place.
pub(super) fn column_sums_at(gpu: &Gpu, op: &'static str, x: &Tensor, place: Place) -> Result<()> {
    let [rows, cols] = x.shape().matrix();
    let pieces = column_pieces(rows);
    let partial = gpu.alloc(DType::F32, pieces * cols)?;
    if pieces * cols > 0 {
        let kernel = gpu.load(kernels::REDUCE_COLUMNS)?;
        let grid = tiles::grid(gpu, tiles(rows, cols), 8);
        let args = kernels::ReduceColumns {
            x: In::void(x.cuda(op)?),
            dtype: dtype_number(x.dtype()),
            rows: rows as u64,
            cols: cols as u64,
            partial: Out::f32(&partial),
        };
        // SAFETY: x holds rows · cols elements of that type, and there is one partial row for each TILE[0] rows.
        unsafe { kernel.launch(gpu, grid, &args) }?;
    }
    finish_columns(gpu, op, &partial, pieces, cols, place)
}

/// Returns the number of rows of partial sums that a kernel writes for `rows` rows if it works by tiles.
pub(super) const fn column_pieces(rows: usize) -> usize {
    rows.div_ceil(TILE[0])
}

/// Puts the sums of the columns of `partial`, `[pieces, cols]` in f32, at a place: what ends every sum over rows. Zeros for no
/// pieces.
pub(super) fn finish_columns(
    gpu: &Gpu,
    op: &'static str,
    partial: &Buffer,
    pieces: usize,
    cols: usize,
    place: Place,
) -> Result<()> {
    if pieces == 0 {
        return place.put_zeros(gpu, cols);
    }
    let kernel = gpu.load(kernels::REDUCE_COLUMNS_FINISH)?;
    let lanes = cols.next_power_of_two().clamp(1, 32);
    let grid = Grid::new(op, cols.div_ceil(lanes) as u64, THREADS)?;
    let args = kernels::ReduceColumnsFinish {
        partial: In::f32(partial),
        pieces: pieces as u64,
        cols: cols as u64,
        lanes: lanes as i32,
        out: Out::f32(place.address),
        add: place.is_added.into(),
    };
    // SAFETY: the caller's buffer holds pieces · cols f32, its place cols, and the blocks cover all columns.
    unsafe { kernel.launch(gpu, grid, &args) }
}

fn total(gpu: &Gpu, x: &Tensor, divisor: f32) -> Result<Tensor> {
    let shape = Shape::from([]);
    if x.numel() == 0 {
        return Ok(Tensor::from_cuda(gpu.zeros(DType::F32, 1)?, shape, x.device()));
    }
    let (blocks, values, len) = (blocks(x), x.cuda("sum")?, x.numel() as u64);
    let (partial, out) = (gpu.alloc(DType::F32, 2 * blocks as usize)?, gpu.alloc(DType::F32, 1)?);
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    let kernel = gpu.load(kernels::REDUCE_SUM)?;
    let args = kernels::ReduceSum {
        x: In::void(values),
        dtype: dtype_number(x.dtype()),
        n: len,
        partial: Out::f32(&partial),
        out: Out::f32(&out),
        divisor,
    };
    // SAFETY: x holds n elements of that type, `partial` two f32 a block, `out` one.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    if blocks > 1 {
        let kernel = gpu.load(kernels::REDUCE_SUM_FINISH)?;
        let args = kernels::ReduceSumFinish {
            partial: In::f32(&partial),
            blocks: u64::from(blocks),
            out: Out::f32(&out),
            divisor,
        };
        // SAFETY: the first launch wrote two f32 a block.
        unsafe { kernel.launch(gpu, Grid { blocks: 1, ..grid }, &args) }?;
    }
    Ok(Tensor::from_cuda(out, shape, x.device()))
}

fn blocks(x: &Tensor) -> u32 {
    (x.numel() as u64).div_ceil(PER_BLOCK).clamp(1, MOST_BLOCKS) as u32
}
