//! What the key of a saved recipe says about its state.

use crate::DelayedScaling;

/// What the key of a saved recipe says about its amaxes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) reduce_amax: bool,
    pub(crate) calibrate_first_step: bool,
    pub(crate) record_non_finite: bool,
}

impl Terms {
    /// Reads the key of a recipe with state; `None` for anything else.
    pub(crate) fn parse(key: &str) -> Option<Self> {
        let (reduce_amax, calibrate_first_step, record_non_finite) = DelayedScaling::read_key(key)?;
        Some(Self { reduce_amax, calibrate_first_step, record_non_finite })
    }
}
