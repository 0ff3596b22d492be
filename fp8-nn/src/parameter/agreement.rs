//! The groups that have compared a parameter between their ranks.

use crate::optimizer::Counts;
use fp8_dist::StateDigest;
use std::any::Any;
use std::sync::Weak;

/// Records which groups have compared a parameter, and the optimizer state that was loaded with it.
#[derive(Debug, Default)]
pub(crate) struct Agreement {
    /// The handles of the groups that have compared the value since it was last set.
    groups: Vec<u64>,
    /// The optimizer state that was last loaded with it.
    loaded: Option<LoadedState>,
}

/// Digests of the optimizer state of one parameter, as it was loaded.
#[derive(Debug, Clone)]
pub(crate) struct LoadedState {
    /// A handle to the optimizer. Nothing is compared after the optimizer was dropped.
    pub(crate) optimizer: Weak<dyn Any + Send + Sync>,
    pub(crate) parts: Vec<StateDigest>,
    pub(crate) counts: Counts,
}

impl Agreement {
    /// Notes that the value was set, so that it may differ between ranks.
    pub(crate) fn forget_groups(&mut self) {
        self.groups.clear();
    }

    pub(crate) fn set_loaded(&mut self, loaded: Option<LoadedState>) {
        self.loaded = loaded;
    }

    pub(crate) fn loaded(&self) -> Option<&LoadedState> {
        self.loaded.as_ref().filter(|loaded| loaded.optimizer.strong_count() > 0)
    }

    /// Returns whether a group has compared the value since it was last set.
    pub(crate) fn has_compared(&self, group: u64) -> bool {
        self.groups.contains(&group)
    }

    /// Notes that a group has compared the value.
    pub(crate) fn note_group(&mut self, group: u64) {
        if !self.has_compared(group) {
            self.groups.push(group);
        }
    }
}
