//! Compares what the ranks of a group pass to one collective call.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Checks that all ranks of a group made the same call, with the same scale for their shards of one tensor.
///
/// Use it before gathering quantized shards yourself: codes of different scales cannot be joined. `calls` is i32 `[ranks]`
/// and contains, for each rank, a number that is equal for equal calls. `scales` is f32 `[ranks]` and contains the ranks'
/// scale cells; they must have equal bits and be committed, that is, finite and greater than 0. `what` names the call in
/// errors.
///
/// On a GPU the comparison is queued like every operation and can be recorded in a graph; the next call that waits for the
/// device returns its error.
///
/// # Errors
/// [`Error::RankCalls`] or [`Error::RankScales`] with the first rank that differs from rank 0 or has no committed scale.
/// Other dtypes; more than one dimension; a different number of scales than calls.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let calls = Tensor::from_vec(vec![7, 7], [2], &Device::cpu())?;
/// let scales = Tensor::from_vec(vec![2.0f32, 2.5], [2], &Device::cpu())?;
/// let error = ops::compare_calls("gather `w`", &calls, Some(&scales)).unwrap_err().to_string();
/// assert!(error.starts_with("gather `w`: the scale is 2.5 on rank 1 and 2 on rank 0"));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn compare_calls(what: &str, calls: &Tensor, scales: Option<&Tensor>) -> Result<()> {
    let op = "compare_calls";
    calls.expect_dtype(op, "calls", DType::I32)?;
    let ranks = *calls.shape();
    if ranks.len() != 1 {
        let remedy = "calls are [ranks]".to_owned();
        return Err(Error::Shape { op, shape: ranks, remedy });
    }
    if let Some(scales) = scales {
        scales.expect_dtype(op, "scales", DType::F32)?;
        calls.device().expect_same(op, scales.device())?;
        if *scales.shape() != ranks {
            let (lhs, remedy) = (*scales.shape(), "give one scale for each rank's call");
            return Err(Error::Shapes { op, what: "scales and calls", lhs, rhs: ranks, remedy });
        }
    }
    u32::try_from(calls.numel()).map_err(|_| too_many(op, ranks))?;
    dispatch!(calls.device(), compare_calls::compare_calls(what, calls, scales))
}

fn too_many(op: &'static str, shape: Shape) -> Error {
    Error::Shape { op, shape, remedy: format!("give at most {} ranks", u32::MAX) }
}
