//! Loaded state that waits for its recipe.

use crate::recipe::Terms;
use crate::{ArenaState, UnusedArena};

/// A loaded arena that waits for its recipe.
#[derive(Debug, Clone)]
pub(crate) struct Saved {
    pub(crate) arena: ArenaState,
    pub(crate) terms: Terms,
    /// Whether a slot of another recipe started from it.
    pub(crate) is_source: bool,
}

impl Saved {
    pub(crate) fn name(&self) -> String {
        let ArenaState { recipe, group, amax_history, .. } = &self.arena;
        name(&format!("{recipe},len={}", amax_history.len() + 1), group.as_deref())
    }

    pub(crate) fn unused(&self) -> UnusedArena {
        UnusedArena {
            recipe: self.name().into(),
            direction: self.arena.direction,
            updates: self.arena.updates,
        }
    }
}

/// What recipe and group are called.
fn name(recipe: &str, group: Option<&str>) -> String {
    match group {
        Some(group) => format!("{recipe} group={group}"),
        None => recipe.to_owned(),
    }
}
