//! Loaded state that no recipe has used yet.

use crate::terms::Terms;
use crate::{ArenaState, UnusedArena};

/// A loaded arena that no recipe has used yet.
#[derive(Debug, Clone)]
pub(crate) struct Saved {
    pub(crate) arena: ArenaState,
    pub(crate) terms: Terms,
    /// Whether a slot of another recipe started from it.
    pub(crate) is_source: bool,
}

impl Saved {
    pub(crate) fn unused(&self) -> UnusedArena {
        UnusedArena {
            recipe: self.arena.label(),
            direction: self.arena.direction,
            updates: self.arena.updates,
        }
    }
}
