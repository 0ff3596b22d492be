//! Reference of `scale_from_amax`; of a user's policy, also for an amax on a GPU, which it reads.

use crate::{Cell, Result, ScaleRule, Tensor};

pub(crate) fn scale_from_amax(amax: &Tensor, rule: &ScaleRule) -> Result<Cell> {
    let value = amax.item()?;
    // Not `max`, which would make a NaN 0.
    let value = if value < 0.0 { 0.0 } else { value };
    Cell::new(rule.scale(value, 1.0)?, amax.device())
}
