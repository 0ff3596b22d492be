//! The cross-entropy of logits and target ids, and its gradient.

use super::{LossScale, Part};
use crate::backend::dispatch;
use crate::{Cell, DType, Error, Result, Shape, Tensor};

/// Options of [`cross_entropy`](cross_entropy()).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CrossEntropyOptions {
    /// Rows with this target are ignored; it may be outside the vocabulary. Default: `None` (PyTorch's is -100).
    pub ignore_index: Option<i32>,
    /// The divisor of the sum of losses, for example the number of targets in the global batch if this call sees only a part of
    /// it. `None` means the number of targets in this call that are not ignored. Default: `None`.
    pub normalizer: Option<f32>,
}

/// The numbers that [`cross_entropy_backward`] needs besides the inputs: `softmax(x)ⱼ = exp(xⱼ − row_max) / row_sum`.
#[derive(Debug, Clone)]
pub struct CrossEntropySaved {
    /// The largest logit of each row, f32 `[rows]`.
    pub row_max: Tensor,
    /// `Σ exp(x − row_max)`, f32 `[rows]`.
    pub row_sum: Tensor,
    /// The number of targets that were not ignored, one i32.
    pub count: Tensor,
}

/// Computes the mean cross-entropy of logits and target ids: `Σᵢ (ln Σⱼ exp xᵢⱼ − xᵢ,ₜᵢ) / n`.
///
/// `logits` is `[.., vocabulary]` in f32, bf16 or f16, and `targets` has one i32 per row. The sum is over the rows whose
/// target is not ignored, and n is their number unless [`CrossEntropyOptions::normalizer`] is set. Returns the loss, one f32,
/// which is 0 if all targets are ignored, and what [`cross_entropy_backward`] needs.
///
/// Exponentials and their sums are f32, relative to the row's largest logit. Logarithms and the sum over rows are f64 on the
/// CPU, and pairs of f32, which are nearly as precise, on a GPU.
///
/// # Errors
/// A number of targets that is not the number of rows; more than 2³¹ − 1 rows; other dtypes; a normalizer that is not finite
/// and greater than 0; a target outside the vocabulary, which a GPU reports at the next call that waits for it.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let logits = Tensor::from_vec(vec![0.0f32; 8], [2, 4], &Device::cpu())?;
/// let targets = Tensor::from_vec(vec![3, -1], [2], &Device::cpu())?;
/// let options = ops::CrossEntropyOptions { ignore_index: Some(-1), ..Default::default() };
/// let (loss, saved) = ops::cross_entropy(&logits, &targets, &options)?;
/// assert_eq!((loss.item()?, saved.count.to_vec::<i32>()?), (4f32.ln(), vec![1]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    check("cross_entropy", logits, targets, options)?;
    let total = logits.shape().last_dim();
    let rows = dispatch!(logits.device(), cross_entropy::rows(logits, targets, Part::whole(total), options))?;
    let (row_max, sums) = (&rows.row_max, &rows.sums);
    dispatch!(logits.device(), cross_entropy::cross_entropy(row_max, sums, targets, total, options))
}

/// Returns the gradient of the logits: `dxᵢⱼ = loss_scale / n · (softmax(xᵢ)ⱼ − [j = tᵢ])`, and 0 for ignored rows.
///
/// Pass the inputs and options of the forward call and what it returned; n is that of [`cross_entropy`](cross_entropy()). The result has
/// the shape and dtype of the logits. Pass a `loss_scale` of 1 unless the gradients would underflow in 16 bits.
///
/// # Errors
/// Those of [`cross_entropy`](cross_entropy()); a `saved` of another call.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let logits = Tensor::from_vec(vec![0.0f32; 4], [1, 4], &Device::cpu())?;
/// let targets = Tensor::from_vec(vec![3], [1], &Device::cpu())?;
/// let options = ops::CrossEntropyOptions::default();
/// let (_, saved) = ops::cross_entropy(&logits, &targets, &options)?;
/// let dx = ops::cross_entropy_backward(&logits, &targets, &saved, &options, 1.0)?;
/// assert_eq!(dx.to_vec::<f32>()?, [0.25, 0.25, 0.25, -0.75]); // softmax, less 1 at the target
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: f32,
) -> Result<Tensor> {
    backward("cross_entropy_backward", logits, targets, None, saved, options, Factor::Given(loss_scale))
}

/// [`cross_entropy_backward`] with a loss scale that is read on the device when the work runs, so that a recorded call uses
/// the scale of each replay.
///
/// The product with the scale is rounded to the dtype of the logits once, so probabilities that f16 could not hold count.
///
/// # Errors
/// Those of [`cross_entropy_backward`]; a scale on another device.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let logits = Tensor::from_vec(vec![0.0f32; 4], [1, 4], &Device::cpu())?;
/// let targets = Tensor::from_vec(vec![3], [1], &Device::cpu())?;
/// let options = ops::CrossEntropyOptions::default();
/// let (_, saved) = ops::cross_entropy(&logits, &targets, &options)?;
/// let scale = ops::LossScale::new(&ops::LossScaleState { scale: 8.0, ..Default::default() }, &Device::cpu())?;
/// let dx = ops::cross_entropy_backward_scaled(&logits, &targets, &saved, &options, &scale)?;
/// assert_eq!(dx.to_vec::<f32>()?, [2.0, 2.0, 2.0, -6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_backward_scaled(
    logits: &Tensor,
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: &LossScale,
) -> Result<Tensor> {
    let op = "cross_entropy_backward_scaled";
    logits.device().expect_same(op, loss_scale.device())?;
    backward(op, logits, targets, None, saved, options, Factor::OnDevice(loss_scale.cell()))
}

/// The factor of a loss's gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Factor<'a> {
    Given(f32),
    OnDevice(&'a Cell),
}

/// Checks the arguments and computes the gradient of all columns, or of those of a part.
pub(super) fn backward(
    op: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    part: Option<Part>,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    factor: Factor<'_>,
) -> Result<Tensor> {
    check_backward(op, logits, targets, saved, options)?;
    let columns = logits.shape().last_dim();
    let part = part.unwrap_or(Part::whole(columns));
    part.check(op, "part", columns)?;
    dispatch!(
        logits.device(),
        cross_entropy::cross_entropy_backward(logits, targets, part, saved, options, factor)
    )
}

fn check_backward(
    op: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
) -> Result<()> {
    check(op, logits, targets, options)?;
    let rows = Shape::from([logits.shape().matrix()[0]]);
    for (what, tensor) in [("row_max", &saved.row_max), ("row_sum", &saved.row_sum)] {
        tensor.expect_dtype(op, what, DType::F32)?;
        logits.device().expect_same(op, tensor.device())?;
        if *tensor.shape() != rows {
            let (lhs, rhs, what) = (*tensor.shape(), rows, "the saved rows and the logits' rows");
            return Err(Error::Shapes { op, what, lhs, rhs, remedy: "pass what cross_entropy returned" });
        }
    }
    saved.count.expect_dtype(op, "count", DType::I32)?;
    logits.device().expect_same(op, saved.count.device())?;
    if saved.count.numel() != 1 {
        let remedy = "count holds one value: pass what cross_entropy returned".to_owned();
        return Err(Error::Shape { op, shape: *saved.count.shape(), remedy });
    }
    Ok(())
}

pub(super) fn check(
    op: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<()> {
    logits.expect_float(op, "logits")?;
    targets.expect_dtype(op, "targets", DType::I32)?;
    logits.device().expect_same(op, targets.device())?;
    let [rows, _] = logits.shape().matrix();
    if logits.shape().is_empty() {
        let remedy = "logits are [.., vocabulary]; reshape a single row to [1, vocabulary]".to_owned();
        return Err(Error::Shape { op, shape: *logits.shape(), remedy });
    }
    if targets.numel() != rows {
        let (lhs, rhs) = (*logits.shape(), *targets.shape());
        let remedy = "give one target per row of logits";
        return Err(Error::Shapes { op, what: "logits and targets", lhs, rhs, remedy });
    }
    check_options(op, logits.shape(), rows, options)
}

/// Checks the number of rows, which errors blame on `shape`, and the normalizer.
pub(super) fn check_options(
    op: &'static str,
    shape: &Shape,
    rows: usize,
    options: &CrossEntropyOptions,
) -> Result<()> {
    if i32::try_from(rows).is_err() {
        let remedy = format!("{rows} rows: give at most {}, since targets are counted in an i32", i32::MAX);
        return Err(Error::Shape { op, shape: *shape, remedy });
    }
    match options.normalizer {
        Some(n) if !(n.is_finite() && n > 0.0) => {
            let remedy = "give a finite number greater than 0, or None for the number of targets".to_owned();
            Err(Error::Option { op, option: "normalizer", value: n.to_string(), remedy })
        }
        _ => Ok(()),
    }
}
