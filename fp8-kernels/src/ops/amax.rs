//! The largest absolute value of a tensor: NaN is skipped, infinity counts, no elements give 0.

use crate::device::Backend;
use crate::{Result, Tensor, cpu};

/// `max |x|`, one f32.
///
/// # Errors
/// A dtype that is not a float.
pub fn amax(x: &Tensor) -> Result<Tensor> {
    x.expect_float("amax", "x")?;
    match x.device().backend() {
        Backend::Cpu => cpu::amax::amax(x),
    }
}
