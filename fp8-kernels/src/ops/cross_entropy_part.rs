//! The cross-entropy of logits whose vocabulary is cut into parts, each with a device of its own.

use super::cross_entropy::{backward, check, check_options};
use super::{CrossEntropyOptions, CrossEntropySaved, Factor, LossScale, Part};
use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// One part's numbers of each row, which [`cross_entropy_part`] returns. Nothing else is exchanged between the parts.
///
/// ```
/// use fp8_kernels::ops::{self, CrossEntropyOptions, CrossEntropyPart, Part};
/// use fp8_kernels::{Device, Tensor};
/// let logits = Tensor::from_vec(vec![7.0f32, 7.0], [1, 2], &Device::cpu())?;
/// let target = Tensor::from_vec(vec![3], [1], &Device::cpu())?;
/// let part = Part { first: 2, total: 4 };
/// let CrossEntropyPart { row_max, sums } =
///     ops::cross_entropy_part(&logits, &target, part, &CrossEntropyOptions::default())?;
/// assert_eq!((row_max.to_vec::<f32>()?, sums.to_vec::<f32>()?), (vec![7.0], vec![2.0, 7.0]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CrossEntropyPart {
    /// The largest logit of each row in this part, f32 `[rows]`: −∞ for no columns, 0 for a row that is ignored.
    pub row_max: Tensor,
    /// f32 `[2, rows]`: `Σ exp(x − row_max)` of each row in this part, then the target's logit, or 0 if another part has it.
    pub sums: Tensor,
}

/// Computes a part's share of the [`cross_entropy`](super::cross_entropy()) of logits whose vocabulary is cut into parts.
///
/// `logits` is `[.., columns]`, the columns `part.first ..` of `part.total`, and `targets` has one i32 per row, an id of the whole
/// vocabulary. The logits are read once and never gathered. The loss takes three steps more:
///
/// 1. Reduce `row_max` over the parts with a maximum.
/// 2. Pass the result to [`cross_entropy_part_sums`], and reduce what it returns over the parts with a sum.
/// 3. Pass both results to [`cross_entropy_of_parts`], which returns the same loss on each part.
///
/// Then [`cross_entropy_part_backward`] computes the gradient of the part's logits.
///
/// # Errors
/// Those of [`cross_entropy`](super::cross_entropy()), with a target outside the whole vocabulary; a part that does not end
/// within it.
///
/// ```
/// use fp8_kernels::ops::{self, CrossEntropyOptions, Part};
/// use fp8_kernels::{Device, Tensor};
/// let cpu = Device::cpu();
/// let logits = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 0.0], [1, 4], &cpu)?;
/// let targets = Tensor::from_vec(vec![2], [1], &cpu)?;
/// let options = CrossEntropyOptions::default();
/// // What two ranks compute, and in between what they reduce.
/// let parts = ops::split(&logits, &[2, 2])?;
/// let left = ops::cross_entropy_part(&parts[0], &targets, Part { first: 0, total: 4 }, &options)?;
/// let right = ops::cross_entropy_part(&parts[1], &targets, Part { first: 2, total: 4 }, &options)?;
/// let row_max = &right.row_max; // the larger of 2 and 3
/// let (left, right) = (ops::cross_entropy_part_sums(&left, row_max)?, ops::cross_entropy_part_sums(&right, row_max)?);
/// let sums = ops::add(&left, &right)?;
/// let (loss, saved) = ops::cross_entropy_of_parts(&targets, row_max, &sums, 4, &options)?;
/// let (whole, _) = ops::cross_entropy(&logits, &targets, &options)?;
/// assert!((loss.item()? - whole.item()?).abs() < 1e-6);
/// let part = Part { first: 2, total: 4 };
/// let dx = ops::cross_entropy_part_backward(&parts[1], &targets, part, &saved, &options, 1.0)?;
/// assert_eq!(dx.shape().to_string(), "[1, 2]");
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_part(
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyPart> {
    let op = "cross_entropy_part";
    check(op, logits, targets, options)?;
    part.check(op, "part", logits.shape().last_dim())?;
    dispatch!(logits.device(), cross_entropy::rows(logits, targets, part, options))
}

/// Returns a part's sums relative to the largest logits of the whole rows: f32 `[2, rows]`, to reduce over the parts with a sum.
///
/// `row_max` is the maximum over the parts of [`CrossEntropyPart::row_max`].
///
/// # Errors
/// A `row_max` that is not f32 `[rows]`, or is on another device; a `part` whose tensors do not fit together.
///
/// ```
/// use fp8_kernels::ops::{self, CrossEntropyPart};
/// use fp8_kernels::{Device, Tensor};
/// let of = |values: Vec<f32>| Tensor::from_vec(values, [1], &Device::cpu());
/// let sums = Tensor::from_vec(vec![1.0f32, 5.0], [2, 1], &Device::cpu())?;
/// let part = CrossEntropyPart { row_max: of(vec![2.0])?, sums };
/// let sums = ops::cross_entropy_part_sums(&part, &of(vec![3.0])?)?.to_vec::<f32>()?;
/// assert!((sums[0] - (-1f32).exp()).abs() < 1e-7); // 1 · exp(2 − 3)
/// assert_eq!(sums[1], 5.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_part_sums(part: &CrossEntropyPart, row_max: &Tensor) -> Result<Tensor> {
    let op = "cross_entropy_part_sums";
    check_rows(op, row_max, &part.row_max, &part.sums, row_max.numel())?;
    dispatch!(row_max.device(), cross_entropy::part_sums(part, row_max))
}

/// Returns the loss of rows whose parts were reduced, and what [`cross_entropy_part_backward`] needs: what
/// [`cross_entropy`](super::cross_entropy()) returns for the whole logits.
///
/// `row_max` is the maximum over the parts of [`CrossEntropyPart::row_max`], and `sums` the sum over the parts of what
/// [`cross_entropy_part_sums`] returned. `targets` and `options` are those of [`cross_entropy_part`], and `total` is the extent of
/// the whole vocabulary.
///
/// # Errors
/// A `row_max` or `sums` of other shapes or on another device; targets that are not i32; a normalizer that is not finite and
/// greater than 0; on the CPU a target outside the vocabulary, which on a GPU [`cross_entropy_part`] reports.
///
/// ```
/// use fp8_kernels::ops::{self, CrossEntropyOptions};
/// use fp8_kernels::{Device, Tensor};
/// let targets = Tensor::from_vec(vec![3], [1], &Device::cpu())?;
/// let row_max = Tensor::from_vec(vec![0.0f32], [1], &Device::cpu())?;
/// let sums = Tensor::from_vec(vec![4.0f32, 0.0], [2, 1], &Device::cpu())?; // of four logits that are 0
/// let (loss, _) = ops::cross_entropy_of_parts(&targets, &row_max, &sums, 4, &CrossEntropyOptions::default())?;
/// assert_eq!(loss.item()?, 4f32.ln());
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_of_parts(
    targets: &Tensor,
    row_max: &Tensor,
    sums: &Tensor,
    total: usize,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    let op = "cross_entropy_of_parts";
    targets.expect_dtype(op, "targets", DType::I32)?;
    check_options(op, targets.shape(), targets.numel(), options)?;
    row_max.device().expect_same(op, targets.device())?;
    check_rows(op, row_max, row_max, sums, targets.numel())?;
    dispatch!(row_max.device(), cross_entropy::cross_entropy(row_max, sums, targets, total, options))
}

/// Returns the gradient of a part's logits: the columns `part.first ..` of [`cross_entropy_backward`](super::cross_entropy_backward).
///
/// `logits`, `targets`, `part` and `options` are those of [`cross_entropy_part`], and `saved` is what [`cross_entropy_of_parts`]
/// returned. The result has the shape and dtype of the logits.
///
/// # Errors
/// Those of [`cross_entropy_part`]; a `saved` of another call.
///
/// ```
/// use fp8_kernels::ops::{self, CrossEntropyOptions, Part};
/// use fp8_kernels::{Device, Tensor};
/// let whole = Tensor::from_vec(vec![0.0f32; 4], [1, 4], &Device::cpu())?;
/// let targets = Tensor::from_vec(vec![3], [1], &Device::cpu())?;
/// let options = CrossEntropyOptions::default();
/// let (_, saved) = ops::cross_entropy(&whole, &targets, &options)?;
/// let last = Tensor::from_vec(vec![0.0f32; 2], [1, 2], &Device::cpu())?;
/// let part = Part { first: 2, total: 4 };
/// let dx = ops::cross_entropy_part_backward(&last, &targets, part, &saved, &options, 1.0)?;
/// assert_eq!(dx.to_vec::<f32>()?, [0.25, -0.75]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_part_backward(
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: f32,
) -> Result<Tensor> {
    let op = "cross_entropy_part_backward";
    backward(op, logits, targets, Some(part), saved, options, Factor::Given(loss_scale))
}

/// [`cross_entropy_part_backward`] with a loss scale that is read on the device when the work runs, so that a recorded call uses
/// the scale of each replay.
///
/// # Errors
/// Those of [`cross_entropy_part_backward`]; a scale on another device.
///
/// ```
/// use fp8_kernels::ops::{self, CrossEntropyOptions, LossScale, LossScaleState, Part};
/// use fp8_kernels::{Device, Tensor};
/// let whole = Tensor::from_vec(vec![0.0f32; 4], [1, 4], &Device::cpu())?;
/// let targets = Tensor::from_vec(vec![3], [1], &Device::cpu())?;
/// let options = CrossEntropyOptions::default();
/// let (_, saved) = ops::cross_entropy(&whole, &targets, &options)?;
/// let last = Tensor::from_vec(vec![0.0f32; 2], [1, 2], &Device::cpu())?;
/// let scale = LossScale::new(&LossScaleState { scale: 8.0, ..Default::default() }, &Device::cpu())?;
/// let part = Part { first: 2, total: 4 };
/// let dx = ops::cross_entropy_part_backward_scaled(&last, &targets, part, &saved, &options, &scale)?;
/// assert_eq!(dx.to_vec::<f32>()?, [2.0, -6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cross_entropy_part_backward_scaled(
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: &LossScale,
) -> Result<Tensor> {
    let op = "cross_entropy_part_backward_scaled";
    logits.device().expect_same(op, loss_scale.device())?;
    backward(op, logits, targets, Some(part), saved, options, Factor::OnDevice(loss_scale.cell()))
}

/// Checks that the maxima, reduced and a part's own, are `[rows]`, the sums `[2, rows]`, and all on one device.
fn check_rows(
    op: &'static str,
    row_max: &Tensor,
    own_max: &Tensor,
    sums: &Tensor,
    rows: usize,
) -> Result<()> {
    let maxima = Shape::from([rows]);
    for (name, what, tensor, rhs) in [
        ("row_max", "row_max and the rows", row_max, maxima),
        ("row_max", "the part's row_max and the rows", own_max, maxima),
        ("sums", "sums and [2, rows]", sums, Shape::from([2, rows])),
    ] {
        tensor.expect_dtype(op, name, DType::F32)?;
        row_max.device().expect_same(op, tensor.device())?;
        if *tensor.shape() != rhs {
            let (lhs, remedy) =
                (*tensor.shape(), "pass what cross_entropy_part returned, reduced over the parts");
            return Err(Error::Shapes { op, what, lhs, rhs, remedy });
        }
    }
    Ok(())
}
