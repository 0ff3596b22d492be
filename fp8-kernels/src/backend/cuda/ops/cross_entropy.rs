//! `cross_entropy` on a GPU: a launch over the rows, one that adds their losses. Targets out of range are told at the next
//! call that waits for the device.

use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{CrossEntropyOptions, CrossEntropySaved, Factor};
use crate::{DType, Result, Shape, Tensor};

/// Threads of the block that adds the losses.
const FINISH_THREADS: u32 = 1024;

pub(crate) fn cross_entropy(
    gpu: &Gpu,
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    let op = "cross_entropy";
    let [rows, vocabulary] = logits.shape().matrix();
    let (values, ids) = (logits.cuda(op)?, targets.cuda(op)?);
    let floats = |len| gpu.alloc(DType::F32, len);
    let (row_max, row_sum, losses) = (floats(rows)?, floats(rows)?, floats(2 * rows)?);
    let (loss, count) = (floats(1)?, gpu.alloc(DType::I32, 1)?);
    let (has_ignore, ignore) = ignored(options);
    let [rows, vocabulary] = [rows, vocabulary].map(|number| number as u64);

    let kernel = gpu.load(kernels::CROSS_ENTROPY_ROWS)?;
    let dtype = dtype_number(logits.dtype());
    let args = kernels::CrossEntropyRows {
        logits: In::void(values),
        dtype,
        targets: In::i32(ids),
        rows,
        vocabulary,
        has_ignore,
        ignore,
        row_max: Out::f32(&row_max),
        row_sum: Out::f32(&row_sum),
        losses: Out::f32(&losses),
        fault: Out::i64(gpu.fault()),
    };
    let threads = threads(vocabulary);
    let grid = Grid { blocks: gpu.blocks(rows, 1, 32), threads, shared: 0 };
    // SAFETY: logits hold rows · vocabulary elements of that type, targets rows i32 (checked by
    // `ops::cross_entropy`), the outputs one, one and two f32 a row.
    unsafe { kernel.launch(gpu, grid, &args) }?;

    let kernel = gpu.load(kernels::CROSS_ENTROPY)?;
    let normalizer = options.normalizer.unwrap_or(0.0);
    let args = kernels::CrossEntropy {
        losses: In::f32(&losses),
        targets: In::i32(ids),
        rows,
        vocabulary,
        has_ignore,
        ignore,
        normalizer,
        out: Out::f32(&loss),
        count: Out::i32(&count),
    };
    let grid = Grid {
        blocks: 1,
        threads: rows.next_multiple_of(32).clamp(32, FINISH_THREADS.into()) as u32,
        shared: 0,
    };
    // SAFETY: the first launch wrote two f32 a row, `out` and `count` hold one value each.
    unsafe { kernel.launch(gpu, grid, &args) }?;

    let device = logits.device();
    let per_row = Shape::from([logits.shape().matrix()[0]]);
    let saved = CrossEntropySaved {
        row_max: Tensor::from_cuda(row_max, per_row, device),
        row_sum: Tensor::from_cuda(row_sum, per_row, device),
        count: Tensor::from_cuda(count, Shape::from([]), device),
    };
    Ok((Tensor::from_cuda(loss, Shape::from([]), device), saved))
}

pub(crate) fn cross_entropy_backward(
    gpu: &Gpu,
    logits: &Tensor,
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: Factor<'_>,
) -> Result<Tensor> {
    let op = "cross_entropy_backward";
    let [rows, vocabulary] = logits.shape().matrix().map(|number| number as u64);
    let dx = gpu.alloc(logits.dtype(), logits.numel())?;
    if logits.numel() == 0 {
        return Ok(Tensor::from_cuda(dx, *logits.shape(), logits.device()));
    }
    let (has_ignore, ignore) = ignored(options);
    let (given, on_device) = match loss_scale {
        Factor::Given(scale) => (scale, 0),
        Factor::OnDevice(cell) => (1.0, cell.cuda(op)?),
    };
    let threads = threads(vocabulary);
    // Four groups of eight elements a thread.
    let span = u64::from(threads) * 32;
    let kernel = gpu.load(kernels::CROSS_ENTROPY_BACKWARD)?;
    let args = kernels::CrossEntropyBackward {
        logits: In::void(logits.cuda(op)?),
        dtype: dtype_number(logits.dtype()),
        targets: In::i32(targets.cuda(op)?),
        rows,
        vocabulary,
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
    let blocks = gpu.blocks(rows.saturating_mul((vocabulary + 7).div_ceil(span)), 1, 32);
    // SAFETY: logits and dx hold rows · vocabulary elements of that type, targets and the saved rows one value a row,
    // count one (checked by `ops::cross_entropy_backward`); the device's scale is null or one f32.
    unsafe { kernel.launch(gpu, Grid { blocks, threads, shared: 0 }, &args) }?;
    Ok(Tensor::from_cuda(dx, *logits.shape(), logits.device()))
}

/// Enough threads of a block for a row's groups of eight elements, a few each.
fn threads(vocabulary: u64) -> u32 {
    (vocabulary.div_ceil(32).next_multiple_of(32)).clamp(32, 512) as u32
}

/// Whether there is a target that counts for nothing, and which.
fn ignored(options: &CrossEntropyOptions) -> (i32, i32) {
    options.ignore_index.map_or((0, 0), |ignore| (1, ignore))
}
