//! Compares what the ranks of a group brought to one call: which call it was, and the scale of their shard.
//!
//! `calls` is i32 `[ranks]`, a number that is equal where the call is. `scales` is f32 `[ranks]`, the scale cells of the
//! ranks: they must have equal bits, and be committed (finite and greater than 0). On a GPU the comparison is queued like
//! every operation, can be recorded, and its error comes from the next call that waits for the device. The first rank that
//! differs from rank 0 is named.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Compares the ranks of the call that errors name `what`.
///
/// # Errors
/// Ranks that differ, or a scale that is not committed ([`Error::RankCalls`], [`Error::RankScales`]), at once or from the next
/// call that waits for the device; other dtypes than the module names, more than one dimension, or as many scales as calls
/// are not there.
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
