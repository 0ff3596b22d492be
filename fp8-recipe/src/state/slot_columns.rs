//! The arenas of a saved state, with the slots of a model or of a recipe.

use crate::ArenaState;
use crate::state::state_terms::StateTerms;
use fp8_kernels::UNSET;
use std::collections::HashMap;
use std::sync::Arc;

impl ArenaState {
    /// Returns the arena with the slots `names`, in this order. Slots that it does not have are as those that never ran.
    pub(crate) fn with_slots(&self, names: &[Arc<str>]) -> Self {
        if self.slots == names {
            return self.clone();
        }
        let own: HashMap<&str, usize> =
            self.slots.iter().enumerate().map(|(index, name)| (&**name, index)).collect();
        let columns: Vec<Option<usize>> = names.iter().map(|name| own.get(&**name).copied()).collect();
        let last_updates =
            if self.last_updates.is_empty() { Vec::new() } else { picked(&self.last_updates, &columns, 0) };
        Self {
            slots: names.to_vec(),
            scale: picked(&self.scale, &columns, self.first_scale()),
            amax_history: self.amax_history.iter().map(|row| picked(row, &columns, 0.0)).collect(),
            last_updates,
            recipe: self.recipe.clone(),
            group: self.group.clone(),
            undetermined: self.undetermined.clone(),
            weights: self.weights.clone(),
            ..*self
        }
    }

    /// Returns the scale of a slot that never ran.
    pub(crate) fn first_scale(&self) -> f32 {
        // Transformer Engine's first-step rule starts with scale 1.
        let calibrates = StateTerms::parse(&self.recipe).is_none_or(|terms| terms.calibrate_first_step);
        if calibrates { UNSET } else { 1.0 }
    }
}

fn picked<T: Copy>(values: &[T], columns: &[Option<usize>], missing: T) -> Vec<T> {
    let value = |column: &Option<usize>| column.and_then(|column| values.get(column)).copied();
    columns.iter().map(|column| value(column).unwrap_or(missing)).collect()
}
