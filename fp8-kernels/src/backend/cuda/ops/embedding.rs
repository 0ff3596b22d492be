//! `embedding` on a GPU. An id out of range is reported by the device's next synchronising call.

use super::split::unit;
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::Part;
use crate::{DType, Error, Result, Shape, Tensor};

/// The sort's numbers, as the kernels have them: bits of a pass, threads and ids of a block.
const BITS: u32 = 8;
const THREADS: u32 = 256;
const TILE: usize = 2048;
/// Sorted entries, and columns, that a warp of the sum takes at a time.
const GROUP: usize = 8;
const SLICE: usize = 256;

/// The rows of a table as the kernels of the gradient take them: no i32 reaches 2³¹, which stands for anything beyond.
#[derive(Clone, Copy)]
struct Rows {
    first: u32,
    /// The number of the table's rows. Ids of other rows are sorted as this number.
    limit: u32,
    /// The number that an id must be less than.
    total: u32,
}

impl Rows {
    fn new(rows: usize, part: Part) -> Self {
        let bound = |rows: usize| u32::try_from(rows).unwrap_or(u32::MAX).min(1 << 31);
        Self { first: bound(part.first), limit: bound(rows), total: bound(part.total) }
    }
}

pub(crate) fn embedding(gpu: &Gpu, ids: &Tensor, table: &Tensor, part: Part, shape: Shape) -> Result<Tensor> {
    let op = "embedding";
    let ([limit, hidden], n) = (table.shape().matrix(), ids.numel());
    let (positions, rows) = (ids.cuda(op)?, table.cuda(op)?);
    let y = gpu.alloc(table.dtype(), shape.numel())?;
    let kernel = gpu.load(kernels::EMBEDDING)?;
    let bytes = hidden * table.dtype().size();
    let unit = unit(&[bytes]);
    let width = bytes / unit;
    let args = kernels::Embedding {
        ids: In::i32(positions),
        table: In::void(rows),
        y: Out::void(&y),
        n: n as u64,
        first: part.first as u64,
        limit: limit as u64,
        total: part.total as u64,
        width: width as u64,
        unit: unit as i32,
        fault: Out::i64(gpu.fault()),
    };
    // SAFETY: n ids, a table of `limit` rows and n rows of y, each of `width` units (checked by `ops::embedding`);
    // ids outside the table are not followed.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, n as u64 * width.max(1) as u64), &args) }?;
    Ok(Tensor::from_cuda(y, shape, table.device()))
}

pub(crate) fn embedding_backward(
    gpu: &Gpu,
    dy: &Tensor,
    ids: &Tensor,
    dtable: &mut Tensor,
    part: Part,
    name: &str,
) -> Result<()> {
    let op = "embedding_backward";
    let ([limit, hidden], n) = (dtable.shape().matrix(), ids.numel());
    let table = Rows::new(limit, part);
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
        return report(gpu, ids, table);
    }
    let sorted = sort(gpu, ids, table)?;
    let kernel = gpu.load(kernels::EMBEDDING_BACKWARD_ADD)?;
    let items = n.div_ceil(GROUP) as u64 * hidden.div_ceil(SLICE) as u64;
    let grid = Grid { blocks: gpu.blocks(items, 8, 8), threads: 256, shared: 0 };
    let dtype = dtype_number(dy.dtype());
    let args = kernels::EmbeddingBackwardAdd {
        dy: In::void(rows),
        sorted: In::u64(&sorted),
        dtable: Out::f32(out),
        n: n as u64,
        hidden: hidden as u64,
        limit: table.limit,
        dtype,
        fault: In::i64(gpu.fault()),
    };
    // SAFETY: n rows of `hidden` elements of that type in dy, at least `limit` rows of `hidden` f32 in dtable, which
    // nobody else holds (checked by `ops::embedding_backward` and above); n entries whose positions are less than n,
    // of which those with a row below `limit` are followed.
    unsafe { kernel.launch(gpu, grid, &args) }
}

/// Reports ids out of range where there is nothing to add.
fn report(gpu: &Gpu, ids: &Buffer, table: Rows) -> Result<()> {
    let blocks = ids.len().div_ceil(TILE) as u32;
    let counts = gpu.alloc(DType::U8, 4 * (1 << BITS) * blocks as usize)?;
    let count = gpu.load(kernels::EMBEDDING_BACKWARD_COUNT)?;
    let args = kernels::EmbeddingBackwardCount {
        ids: In::i32(ids),
        entries: In::u64(0),
        n: ids.len() as u64,
        first_row: table.first,
        limit: table.limit,
        total: table.total,
        shift: 0,
        counts: Out::u32(&counts),
        fault: Out::i64(gpu.fault()),
    };
    // SAFETY: n ids, a count for each of the bins and blocks.
    unsafe { count.launch(gpu, Grid { blocks, threads: THREADS, shared: 0 }, &args) }
}

/// Entries `row << 32 | position` in the order of the rows, those of one row in the order of the positions; ids of other rows,
/// as `limit`, last. Those out of range are reported. 0 < n < 2³².
fn sort(gpu: &Gpu, ids: &Buffer, table: Rows) -> Result<Buffer> {
    let n = ids.len();
    let blocks = n.div_ceil(TILE) as u32;
    let per_block = Grid { blocks, threads: THREADS, shared: 0 };
    let bins = 1usize << BITS;
    let words = |count: usize| gpu.alloc(DType::U8, 4 * count);
    let (counts, totals) = (words(bins * blocks as usize)?, words(bins)?);
    let count = gpu.load(kernels::EMBEDDING_BACKWARD_COUNT)?;
    let scan = gpu.load(kernels::EMBEDDING_BACKWARD_SCAN)?;
    let place = gpu.load(kernels::EMBEDDING_BACKWARD_PLACE)?;
    let passes = (u32::BITS - table.limit.leading_zeros()).div_ceil(BITS).max(1);
    let mut sorted: Option<Buffer> = None;
    for pass in 0..passes {
        let shift = (pass * BITS) as i32;
        // The first pass reads the ids, the others what the one before it has written.
        let (ids, fault) = if pass == 0 { (Some(ids), gpu.fault()) } else { (None, 0) };
        let entries = sorted.as_ref();
        let args = kernels::EmbeddingBackwardCount {
            ids: In::i32(ids),
            entries: In::u64(entries),
            n: n as u64,
            first_row: table.first,
            limit: table.limit,
            total: table.total,
            shift,
            counts: Out::u32(&counts),
            fault: Out::i64(fault),
        };
        // SAFETY: n ids or n entries, a count for each of the bins and blocks.
        unsafe { count.launch(gpu, per_block, &args) }?;
        let per_bin = Grid { blocks: bins as u32 / (THREADS / 32), threads: THREADS, shared: 0 };
        // SAFETY: with as many of both as above; a warp for each bin.
        unsafe {
            scan.launch(
                gpu,
                per_bin,
                &kernels::EmbeddingBackwardScan {
                    counts: Out::u32(&counts),
                    totals: Out::u32(&totals),
                    blocks,
                },
            )
        }?;
        let next = gpu.alloc(DType::U8, 8 * n)?;
        let args = kernels::EmbeddingBackwardPlace {
            ids: In::i32(ids),
            entries: In::u64(entries),
            sorted: Out::u64(&next),
            n: n as u64,
            first_row: table.first,
            limit: table.limit,
            shift,
            counts: In::u32(&counts),
            totals: In::u32(&totals),
        };
        // SAFETY: as above, and room for n entries, whose places are a permutation of 0 .. n.
        unsafe { place.launch(gpu, per_block, &args) }?;
        sorted = Some(next);
    }
    sorted.map_or_else(|| gpu.alloc(DType::U8, 0), Ok)
}
