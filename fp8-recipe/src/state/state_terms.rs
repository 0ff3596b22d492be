//! The properties of a recipe's saved state, as read from the recipe's key.

use crate::DelayedScaling;
use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::custom_recipe;

/// The properties of a recipe's saved state, as read from the recipe's key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateTerms {
    pub(crate) reduce_amax: bool,
    pub(crate) calibrate_first_step: bool,
    /// The contents of the saved rows.
    pub(crate) rows: SavedRows,
}

/// The contents of an arena's saved rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SavedRows {
    /// Past amaxes, which may be infinite if `record_non_finite`.
    Amaxes { record_non_finite: bool },
    /// Numbers of a user's recipe, and the newest amax in the last row.
    Custom,
}

impl StateTerms {
    /// Reads the key of a recipe with state; `None` for anything else.
    pub(crate) fn parse(key: &str) -> Option<Self> {
        let key = Fp8Attention::strip(key);
        if let Some((reduce_amax, calibrate_first_step, record_non_finite)) = DelayedScaling::read_key(key) {
            return Some(Self {
                reduce_amax,
                calibrate_first_step,
                rows: SavedRows::Amaxes { record_non_finite },
            });
        }
        let (reduce_amax, calibrate_first_step) = custom_recipe::read_key(key)?;
        Some(Self { reduce_amax, calibrate_first_step, rows: SavedRows::Custom })
    }
}
