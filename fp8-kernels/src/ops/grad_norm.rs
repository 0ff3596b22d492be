//! The L2 norm over several tensors.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// Returns the L2 norm over all elements of all `grads`, `√(Σ gᵢ²)`, as one f32 on their device.
///
/// The tensors are f32, bf16 or f16 and may have different shapes. Squares and their sum do not overflow: the norm is
/// infinite only if a gradient is, or if it exceeds `f32::MAX`, and NaN if a gradient is NaN. The order of the sum depends on
/// the sizes alone, so the result is the same each time. Pass it to [`clip_in_place`](super::clip_in_place) or
/// [`NormCheck`](super::NormCheck); neither reads it to the host.
///
/// # Errors
/// An empty list; a dtype that is not a float; tensors on different devices.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let (a, b) = (Tensor::scalar(3.0, &Device::cpu())?, Tensor::scalar(4.0, &Device::cpu())?);
/// assert_eq!(ops::grad_norm(&[&a, &b])?.item()?, 5.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn grad_norm(grads: &[&Tensor]) -> Result<Tensor> {
    let op = "grad_norm";
    let Some(first) = grads.first() else {
        let remedy = "give at least one tensor".to_owned();
        return Err(Error::Option { op, option: "grads", value: "[]".to_owned(), remedy });
    };
    for grad in grads {
        grad.expect_float(op, "a gradient")?;
        first.device().expect_same(op, grad.device())?;
    }
    dispatch!(first.device(), grad_norm::grad_norm(grads, first.device()))
}
