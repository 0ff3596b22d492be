//! `embedding` on a GPU. An id out of range is reported by the device's next synchronising call.

use super::split::unit;
use super::{Buffer, Gpu, Grid, Source, args, dtype_number};
use crate::{DType, Error, Result, Shape, Tensor};

/// The sort's numbers, as the kernels have them: bits of a pass, threads and ids of a block.
const BITS: u32 = 8;
const THREADS: u32 = 256;
const TILE: usize = 2048;
/// Sorted entries, and columns, that a warp of the sum takes at a time.
const GROUP: usize = 8;
const SLICE: usize = 256;

/// Returns the number that an id must be less than. Ids out of range are sorted as this number, and no i32 reaches 2³¹.
fn bound(rows: usize) -> u32 {
    u32::try_from(rows).unwrap_or(u32::MAX).min(1 << 31)
}

pub(crate) fn embedding(gpu: &Gpu, ids: &Tensor, table: &Tensor, shape: Shape) -> Result<Tensor> {
    let op = "embedding";
    let ([limit, hidden], n) = (table.shape().matrix(), ids.numel());
    let (positions, rows) = (ids.cuda(op)?, table.cuda(op)?);
    let y = gpu.alloc(table.dtype(), shape.numel())?;
    let kernel = gpu.kernel(Source::Embedding, "embedding")?;
    let bytes = hidden * table.dtype().size();
    let unit = unit(&[bytes]);
    let width = bytes / unit;
    let args = args![positions, rows, &y, n as u64, limit as u64, width as u64, unit as i32, gpu.fault()];
    // SAFETY: the kernel's parameters (ids, table, y, n, limit, width, unit, fault); n ids, a table of `limit` rows and n
    // rows of y, each of `width` units (checked by `ops::embedding`); ids outside the table are not followed.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, n as u64 * width.max(1) as u64), &args) }?;
    Ok(Tensor::from_cuda(y, shape, table.device()))
}

pub(crate) fn embedding_backward(
    gpu: &Gpu,
    dy: &Tensor,
    ids: &Tensor,
    dtable: &mut Tensor,
    name: &str,
) -> Result<()> {
    let op = "embedding_backward";
    let ([limit, hidden], n) = (dtable.shape().matrix(), ids.numel());
    let (rows, ids) = (dy.cuda(op)?, ids.cuda(op)?);
    let out = dtable.cuda_mut(name)?;
    if u32::try_from(n).is_err() {
        let (shape, remedy) = (*dy.shape(), format!("{n} ids: give at most {} at once", u32::MAX));
        return Err(Error::Shape { op, shape, remedy });
    }
    if n == 0 {
        return Ok(());
    }
    if hidden == 0 {
        return report(gpu, ids, bound(limit));
    }
    let sorted = sort(gpu, ids, bound(limit))?;
    let kernel = gpu.kernel(Source::Embedding, "embedding_backward_add")?;
    let items = n.div_ceil(GROUP) as u64 * hidden.div_ceil(SLICE) as u64;
    let grid = Grid { blocks: gpu.blocks(items, 8, 8), threads: 256, shared: 0 };
    let dtype = dtype_number(dy.dtype());
    let args = args![rows, &sorted, out, n as u64, hidden as u64, bound(limit), dtype, gpu.fault()];
    // SAFETY: the kernel's parameters (dy, sorted, dtable, n, hidden, limit, dtype, fault); n rows of `hidden` elements of
    // that type in dy, at least `limit` rows of `hidden` f32 in dtable, which nobody else holds (checked by
    // `ops::embedding_backward` and above); n entries whose positions are less than n, of which those with an id below
    // `limit` are followed.
    unsafe { kernel.launch(gpu, grid, &args) }
}

/// Reports ids out of range where there is nothing to add.
fn report(gpu: &Gpu, ids: &Buffer, limit: u32) -> Result<()> {
    let blocks = ids.len().div_ceil(TILE) as u32;
    let counts = gpu.alloc(DType::U8, 4 * (1 << BITS) * blocks as usize)?;
    let count = gpu.kernel(Source::Embedding, "embedding_backward_count")?;
    let args = args![ids, None::<&Buffer>, ids.len() as u64, limit, 0i32, &counts, gpu.fault()];
    // SAFETY: the kernel's parameters (ids, entries, n, limit, shift, counts, fault); n ids, a count for each of the bins and
    // blocks.
    unsafe { count.launch(gpu, Grid { blocks, threads: THREADS, shared: 0 }, &args) }
}

/// Entries `id << 32 | position` in the order of the ids, those of one id in the order of the positions; ids out of range,
/// as `limit`, last and reported. 0 < n < 2³².
fn sort(gpu: &Gpu, ids: &Buffer, limit: u32) -> Result<Buffer> {
    let n = ids.len();
    let blocks = n.div_ceil(TILE) as u32;
    let per_block = Grid { blocks, threads: THREADS, shared: 0 };
    let bins = 1usize << BITS;
    let words = |count: usize| gpu.alloc(DType::U8, 4 * count);
    let (counts, totals) = (words(bins * blocks as usize)?, words(bins)?);
    let count = gpu.kernel(Source::Embedding, "embedding_backward_count")?;
    let scan = gpu.kernel(Source::Embedding, "embedding_backward_scan")?;
    let place = gpu.kernel(Source::Embedding, "embedding_backward_place")?;
    let passes = (u32::BITS - limit.leading_zeros()).div_ceil(BITS).max(1);
    let mut sorted: Option<Buffer> = None;
    for pass in 0..passes {
        let shift = (pass * BITS) as i32;
        // The first pass reads the ids, the others what the one before it has written.
        let (ids, fault) = if pass == 0 { (Some(ids), gpu.fault()) } else { (None, 0) };
        let entries = sorted.as_ref();
        let args = args![ids, entries, n as u64, limit, shift, &counts, fault];
        // SAFETY: the kernel's parameters (ids, entries, n, limit, shift, counts, fault); n ids or n entries, a count for
        // each of the bins and blocks.
        unsafe { count.launch(gpu, per_block, &args) }?;
        let per_bin = Grid { blocks: bins as u32 / (THREADS / 32), threads: THREADS, shared: 0 };
        // SAFETY: the kernel's parameters (counts, totals, blocks), with as many of both as above; a warp for each bin.
        unsafe { scan.launch(gpu, per_bin, &args![&counts, &totals, blocks]) }?;
        let next = gpu.alloc(DType::U8, 8 * n)?;
        let args = args![ids, entries, &next, n as u64, limit, shift, &counts, &totals];
        // SAFETY: the kernel's parameters (ids, entries, sorted, n, limit, shift, counts, totals); as above, and room for n
        // entries, whose places are a permutation of 0 .. n.
        unsafe { place.launch(gpu, per_block, &args) }?;
        sorted = Some(next);
    }
    sorted.map_or_else(|| gpu.alloc(DType::U8, 0), Ok)
}
