//! Loaded state that no recipe has used yet.

use crate::state::state_terms::StateTerms;
use crate::{ArenaState, UnusedArena, WeightState};
use std::sync::Arc;

/// A loaded arena that no recipe has used yet.
#[derive(Debug, Clone)]
pub(crate) struct PendingArena {
    /// With all slots of the model.
    pub(crate) arena: ArenaState,
    /// The slots that it was saved with.
    pub(crate) slots: Vec<Arc<str>>,
    pub(crate) terms: StateTerms,
    /// Whether a slot of another recipe started from it.
    pub(crate) is_source: bool,
}

impl PendingArena {
    /// `names` are the slots of the model.
    pub(crate) fn new(arena: &ArenaState, terms: StateTerms, names: &[Arc<str>]) -> Self {
        Self { arena: arena.with_slots(names), slots: arena.slots.clone(), terms, is_source: false }
    }

    /// Returns the arena as it was saved.
    pub(crate) fn as_saved(&self) -> ArenaState {
        let mut arena = self.arena.with_slots(&self.slots);
        arena.weights = arena.weights.iter().filter_map(WeightState::now).collect();
        arena
    }

    pub(crate) fn unused(&self) -> UnusedArena {
        UnusedArena {
            recipe: self.arena.label(),
            direction: self.arena.direction,
            updates: self.arena.updates,
        }
    }
}
