//! What the key of a saved recipe says about its state.

use crate::fp8_attention::Fp8Attention;
use crate::{DelayedScaling, custom_recipe};

/// What the key of a saved recipe says about its state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) reduce_amax: bool,
    pub(crate) calibrate_first_step: bool,
    /// What the saved rows contain.
    pub(crate) rows: Rows,
}

/// What the saved rows of an arena contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Past amaxes, which may be infinite if `record_non_finite`.
    Amaxes { record_non_finite: bool },
    /// Numbers of a user's recipe, and the newest amax in the last row.
    Custom,
}

impl Terms {
    /// Reads the key of a recipe with state; `None` for anything else.
    pub(crate) fn parse(key: &str) -> Option<Self> {
        let key = Fp8Attention::strip(key);
        if let Some((reduce_amax, calibrate_first_step, record_non_finite)) = DelayedScaling::read_key(key) {
            return Some(Self {
                reduce_amax,
                calibrate_first_step,
                rows: Rows::Amaxes { record_non_finite },
            });
        }
        let (reduce_amax, calibrate_first_step) = custom_recipe::read_key(key)?;
        Some(Self { reduce_amax, calibrate_first_step, rows: Rows::Custom })
    }
}
