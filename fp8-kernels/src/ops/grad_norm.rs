//! The L2 norm over all gradients together: `√(Σ gᵢ²)`.
//!
//! f32, bf16 or f16 tensors of any shapes; squares and sums in f64, so that no f32 gradient overflows them, in an order
//! that depends on the sizes alone. One f32; infinite if a gradient is, NaN if one is.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// The norm of all `grads`, in their order.
///
/// # Errors
/// No tensor at all, a dtype that is not a float, tensors on two devices.
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
