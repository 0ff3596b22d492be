//! The scale that a rule gives for an amax, as a cell on the amax's device: what [`ScaleRule::scale`] returns for it and an
//! old scale of 1. A rest value of −1 (no element was read) counts as 0.

use crate::backend::dispatch;
use crate::{Cell, DType, Error, Result, ScaleRule, Tensor};

/// Computes the scale without reading the amax to the host, except for a user's policy, which runs there.
///
/// # Errors
/// An amax that is not one f32; a user's scale policy that returns no usable scale, or whose call would have to be recorded.
///
/// ```
/// use fp8_kernels::{Device, ScaleRule, Tensor, ops};
/// let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
/// let amax = Tensor::scalar(3.5, &Device::cpu())?;
/// assert_eq!(ops::scale_from_amax(&amax, &rule)?.read()?, 128.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn scale_from_amax(amax: &Tensor, rule: &ScaleRule) -> Result<Cell> {
    let op = "scale_from_amax";
    amax.expect_dtype(op, "amax", DType::F32)?;
    if amax.numel() != 1 {
        let remedy = "an amax is one number".to_owned();
        return Err(Error::Shape { op, shape: *amax.shape(), remedy });
    }
    dispatch!(amax.device(), scale_from_amax::scale_from_amax(amax, rule))
}
