//! The largest absolute value of a tensor: NaN is skipped, infinity counts, no elements give 0.

use crate::backend::dispatch;
use crate::{Result, Tensor};

/// `max |x|`, one f32.
///
/// # Errors
/// A dtype that is not a float.
pub fn amax(x: &Tensor) -> Result<Tensor> {
    x.expect_float("amax", "x")?;
    dispatch!(x.device(), amax::amax(x))
}
