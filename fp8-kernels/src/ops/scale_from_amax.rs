//! The scale that a rule gives for an amax on the device.

use crate::backend::dispatch;
use crate::{Cell, DType, Error, Result, ScaleRule, Tensor};

/// Returns the scale that `rule` gives for `amax`, as a cell on the amax's device.
///
/// This is current scaling with an amax that was reduced over ranks: take the [`amax`](super::amax()), reduce it, compute
/// the scale, and quantize with [`Scale::Cell`](crate::Scale::Cell). `amax` is one f32; the result is what
/// [`ScaleRule::scale`] returns for it and an old scale of 1. An amax of −1 ([`REST`](crate::REST): no element was read)
/// counts as 0.
///
/// The amax is not read to the host, so nothing waits, except for a custom scale policy, which runs there.
///
/// # Errors
/// An `amax` that is not one f32; a custom scale policy that returns an unusable scale; on a GPU, a custom policy in a step
/// that is being recorded in a graph.
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
