//! The properties of a recipe's saved state, as read from the recipe's key.

use crate::recipes::recipe_key::RecipeKey;
use crate::recipes::{custom_recipe, delayed_scaling};

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
        let key = RecipeKey::parse_state(key)?;
        let first = key.options().first()?.name;
        let rows = match (key.kind, first) {
            (delayed_scaling::KIND, "margin") => {
                key.flag("zero_is_skipped")?;
                SavedRows::Amaxes { record_non_finite: key.flag("record_non_finite")? }
            }
            (custom_recipe::KIND, "name") => SavedRows::Custom,
            _ => return None,
        };
        let (reduce_amax, calibrate_first_step) =
            (key.flag("reduce_amax")?, key.flag("calibrate_first_step")?);
        Some(Self { reduce_amax, calibrate_first_step, rows })
    }
}
