//! Cross-entropy of logits and target ids: `loss = Σ (ln Σⱼ exp xᵢⱼ − xᵢ,ₜᵢ) / n`, over rows whose target counts.
//!
//! `logits` is `[.., vocabulary]`, f32, bf16 or f16; `targets` i32, one per row. The loss is one f32: exponentials and their
//! sums in f32 relative to the row's largest logit, logarithms and the sum of rows in f64. n is the number of targets
//! that count, or the caller's. `dxᵢⱼ = loss_scale / n · (softmax(xᵢ)ⱼ − [j = tᵢ])`, 0 for ignored rows, in the logits' type.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Options of [`cross_entropy`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CrossEntropyOptions {
    /// Rows with this target count for nothing; it may lie outside the vocabulary.
    pub ignore_index: Option<i32>,
    /// What the sum is divided by, where it is only a part: targets of the whole global batch, for example. `None`: the
    /// number of targets that count here.
    pub normalizer: Option<f32>,
}

/// What [`cross_entropy_backward`] needs beyond its inputs: `softmax(x)ⱼ = exp(xⱼ − row_max) / row_sum`.
#[derive(Debug, Clone)]
pub struct CrossEntropySaved {
    /// The largest logit of each row, f32 `[rows]`.
    pub row_max: Tensor,
    /// `Σ exp(x − row_max)`, f32 `[rows]`.
    pub row_sum: Tensor,
    /// How many targets counted, one i32.
    pub count: Tensor,
}

/// The mean loss, one f32; 0 if no target counts.
///
/// # Errors
/// Another number of targets than rows, more rows than 2³¹ − 1, a target out of range, other dtypes than the module names, a normalizer that is
/// not finite and greater than 0.
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
    dispatch!(logits.device(), cross_entropy::cross_entropy(logits, targets, options))
}

/// The gradient of the logits, times `loss_scale`, in their type.
///
/// # Errors
/// As [`cross_entropy`]; a saved state of another call.
pub fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: f32,
) -> Result<Tensor> {
    let op = "cross_entropy_backward";
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
    dispatch!(
        logits.device(),
        cross_entropy::cross_entropy_backward(logits, targets, saved, options, loss_scale)
    )
}

fn check(op: &'static str, logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Result<()> {
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
    if i32::try_from(rows).is_err() {
        let remedy = format!("{rows} rows: give at most {}, since targets are counted in an i32", i32::MAX);
        return Err(Error::Shape { op, shape: *logits.shape(), remedy });
    }
    match options.normalizer {
        Some(n) if !(n.is_finite() && n > 0.0) => {
            let remedy = "give a finite number greater than 0, or None for the number of targets".to_owned();
            Err(Error::Option { op, option: "normalizer", value: n.to_string(), remedy })
        }
        _ => Ok(()),
    }
}
