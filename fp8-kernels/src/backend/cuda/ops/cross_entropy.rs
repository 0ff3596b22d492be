//! `cross_entropy` on a GPU: a launch over the rows, one that adds their losses. Targets out of range are told at the next
//! call that waits for the device.

use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{CrossEntropyOptions, CrossEntropyPart, CrossEntropySaved, Factor, Part};
use crate::{DType, Result, Shape, Tensor};

/// Threads of the block that adds the losses.
const FINISH_THREADS: u32 = 1024;

/// The largest logit of each row, the sum of exponentials relative to it, and the target's logit or 0.
pub(crate) fn rows(
    gpu: &Gpu,
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyPart> {
    let op = "cross_entropy";
    let [rows, columns] = logits.shape().matrix();
    let (row_max, sums) = (gpu.alloc(DType::F32, rows)?, gpu.alloc(DType::F32, 2 * rows)?);
    let (has_ignore, ignore) = ignored(options);
    let kernel = gpu.load(kernels::CROSS_ENTROPY_ROWS)?;
    let args = kernels::CrossEntropyRows {
        logits: In::void(logits.cuda(op)?),
        dtype: dtype_number(logits.dtype()),
        targets: In::i32(targets.cuda(op)?),
        rows: rows as u64,
        columns: columns as u64,
        first: part.first as u64,
        total: part.total as u64,
        has_ignore,
        ignore,
        row_max: Out::f32(&row_max),
        sums: Out::f32(&sums),
        fault: Out::i64(gpu.fault()),
    };
    let grid = Grid { blocks: gpu.blocks(rows as u64, 1, 32), threads: threads(columns as u64), shared: 0 };
    // SAFETY: logits hold rows · columns elements of that type, targets rows i32 (checked by `ops::cross_entropy`), the
    // outputs one and two f32 a row.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    let device = logits.device();
    let row_max = Tensor::from_cuda(row_max, Shape::from([rows]), device);
    Ok(CrossEntropyPart { row_max, sums: Tensor::from_cuda(sums, Shape::from([2, rows]), device) })
}

/// A part's sums, relative to other maxima.
pub(crate) fn part_sums(gpu: &Gpu, part: &CrossEntropyPart, row_max: &Tensor) -> Result<Tensor> {
    let (op, rows) = ("cross_entropy", row_max.numel());
    let sums = gpu.alloc(DType::F32, 2 * rows)?;
    let kernel = gpu.load(kernels::CROSS_ENTROPY_PART_SUMS)?;
    let args = kernels::CrossEntropyPartSums {
        own_max: In::f32(part.row_max.cuda(op)?),
        own_sums: In::f32(part.sums.cuda(op)?),
        row_max: In::f32(row_max.cuda(op)?),
        rows: rows as u64,
        sums: Out::f32(&sums),
    };
    // SAFETY: a maximum a row and two sums a row each, checked by `ops::cross_entropy_part_sums` and made above.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, rows as u64), &args) }?;
    Ok(Tensor::from_cuda(sums, *part.sums.shape(), row_max.device()))
}

/// The loss of the rows' numbers, those of a whole row each.
pub(crate) fn cross_entropy(
    gpu: &Gpu,
    row_max: &Tensor,
    sums: &Tensor,
    targets: &Tensor,
    total: usize,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    let (op, rows) = ("cross_entropy", targets.numel());
    let floats = |len| gpu.alloc(DType::F32, len);
    let (row_sum, loss, count) = (floats(rows)?, floats(1)?, gpu.alloc(DType::I32, 1)?);
    let (has_ignore, ignore) = ignored(options);
    let kernel = gpu.load(kernels::CROSS_ENTROPY)?;
    let args = kernels::CrossEntropy {
        row_max: In::f32(row_max.cuda(op)?),
        sums: In::f32(sums.cuda(op)?),
        targets: In::i32(targets.cuda(op)?),
        rows: rows as u64,
        total: total as u64,
        has_ignore,
        ignore,
        normalizer: options.normalizer.unwrap_or(0.0),
        row_sum: Out::f32(&row_sum),
        out: Out::f32(&loss),
        count: Out::i32(&count),
    };
    let threads = (rows as u64).next_multiple_of(32).clamp(32, FINISH_THREADS.into()) as u32;
    // SAFETY: a maximum, two sums and a target a row (made by `rows` or checked by `ops::cross_entropy_of_parts`), as many
    // `row_sum`; `out` and `count` hold one value each.
    unsafe { kernel.launch(gpu, Grid { blocks: 1, threads, shared: 0 }, &args) }?;

    let device = row_max.device();
    let saved = CrossEntropySaved {
        row_max: row_max.clone(),
        row_sum: Tensor::from_cuda(row_sum, Shape::from([rows]), device),
        count: Tensor::from_cuda(count, Shape::from([]), device),
    };
    Ok((Tensor::from_cuda(loss, Shape::from([]), device), saved))
}

pub(crate) fn cross_entropy_backward(
    gpu: &Gpu,
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: Factor<'_>,
) -> Result<Tensor> {
    let op = "cross_entropy_backward";
    let [rows, columns] = logits.shape().matrix().map(|number| number as u64);
    let dx = gpu.alloc(logits.dtype(), logits.numel())?;
    if logits.numel() == 0 {
        return Ok(Tensor::from_cuda(dx, *logits.shape(), logits.device()));
    }
    let (has_ignore, ignore) = ignored(options);
    let (given, on_device) = match loss_scale {
        Factor::Given(scale) => (scale, 0),
        Factor::OnDevice(cell) => (1.0, cell.cuda(op)?),
    };
    let threads = threads(columns);
    // Four groups of eight elements a thread.
    let span = u64::from(threads) * 32;
    let kernel = gpu.load(kernels::CROSS_ENTROPY_BACKWARD)?;
    let args = kernels::CrossEntropyBackward {
        logits: In::void(logits.cuda(op)?),
        dtype: dtype_number(logits.dtype()),
        targets: In::i32(targets.cuda(op)?),
        rows,
        columns,
        first_column: part.first as u64,
        total: part.total as u64,
        has_ignore,
        ignore,
        row_max: In::f32(saved.row_max.cuda(op)?),
        row_sum: In::f32(saved.row_sum.cuda(op)?),
        count: In::i32(saved.count.cuda(op)?),
        normalizer: options.normalizer.unwrap_or(0.0),
        loss_scale: given,
        device_scale: In::f32(on_device),
        span,
        dx: Out::void(&dx),
        fault: Out::i64(gpu.fault()),
    };
    let blocks = gpu.blocks(rows.saturating_mul((columns + 7).div_ceil(span)), 1, 32);
    // SAFETY: logits and dx hold rows · columns elements of that type, targets and the saved rows one value a row,
    // count one (checked by `ops::cross_entropy_backward`); the device's scale is null or one f32.
    unsafe { kernel.launch(gpu, Grid { blocks, threads, shared: 0 }, &args) }?;
    Ok(Tensor::from_cuda(dx, *logits.shape(), logits.device()))
}

/// Enough threads of a block for a row's groups of eight elements, a few each.
fn threads(columns: u64) -> u32 {
    (columns.div_ceil(32).next_multiple_of(32)).clamp(32, 512) as u32
}

/// Whether there is a target that counts for nothing, and which.
fn ignored(options: &CrossEntropyOptions) -> (i32, i32) {
    options.ignore_index.map_or((0, 0), |ignore| (1, ignore))
}
