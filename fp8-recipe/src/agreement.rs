//! Whether ranks that should be replicas of each other have the same scaling state.
//!
//! Ranks compare digests, not values: one collective for a whole arena, whatever the length of its histories. A digest is
//! the first 128 bits of a SHA-256 over the bits of the values, so equal NaNs are equal.

use crate::domain::Domain;
use crate::recipe::Terms;
use crate::{ArenaState, Direction, Result, Scaling};
use sha2::{Digest as _, Sha256};
use std::sync::Arc;

/// The name of a piece of training state, and a digest of its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDigest {
    /// What the piece is, in the words of an error: ``the value of `fc.weight` ``.
    pub name: Arc<str>,
    /// The first 128 bits of the SHA-256 of its value.
    pub digest: [u8; 16],
}

impl StateDigest {
    /// Digests the bytes of `parts`, one after the other.
    ///
    /// ```
    /// use fp8_recipe::StateDigest;
    /// let of = |bytes: &[u8]| StateDigest::new("the number of steps", [bytes]);
    /// assert_eq!(of(&7u64.to_le_bytes()), of(&7u64.to_le_bytes()));
    /// assert_ne!(of(&7u64.to_le_bytes()), of(&8u64.to_le_bytes()));
    /// ```
    pub fn new<P: AsRef<[u8]>>(name: impl Into<Arc<str>>, parts: impl IntoIterator<Item = P>) -> Self {
        let mut hasher = Sha256::new();
        parts.into_iter().for_each(|part| hasher.update(part));
        let mut digest = [0; 16];
        digest.iter_mut().zip(hasher.finalize()).for_each(|(to, from)| *to = from);
        Self { name: name.into(), digest }
    }
}

impl ArenaState {
    /// One digest for each slot's scale and history, and one for the number of updates; `of` ends their names.
    fn digests(&self, of: &str) -> Vec<StateDigest> {
        let mut all = Vec::new();
        for (index, (slot, scale)) in self.slots.iter().zip(&self.scale).enumerate() {
            all.push(StateDigest::new(format!("the scale of `{slot}`{of}"), [scale.to_le_bytes()]));
            let history =
                self.amax_history.iter().filter_map(|row| row.get(index)).map(|amax| amax.to_le_bytes());
            all.push(StateDigest::new(format!("the amax history of `{slot}`{of}"), history));
        }
        let name = format!("the number of {} updates{of}", self.direction);
        all.push(StateDigest::new(name, [self.updates.to_le_bytes()]));
        all
    }

    /// Whether all ranks of a group have it in common: it has been updated, from amaxes that were reduced. An arena that
    /// was never updated starts from others whenever they change, and says nothing by itself.
    fn is_common(&self) -> bool {
        self.updates > 0 && Terms::parse(&self.recipe).is_none_or(|terms| terms.reduce_amax)
    }
}

impl Domain {
    /// What the ranks of its group compare before they reduce an arena for the first time.
    pub(crate) fn digests(&self, direction: Direction, names: &[Arc<str>]) -> Result<Vec<StateDigest>> {
        Ok(self.arena_state(direction, names)?.map(|arena| arena.digests("")).unwrap_or_default())
    }
}

impl Scaling {
    /// Returns a digest of every scale, amax history and update count that replicas have in common, in an order that
    /// depends on names alone. [`AmaxGroup::agree_on_state`](crate::AmaxGroup::agree_on_state) compares them.
    ///
    /// A first scale that was not committed counts as not calibrated. Loaded state that no recipe has continued yet is
    /// included. Arenas that were never updated are left out, and those of recipes without `reduce_amax`, whose amaxes are
    /// each rank's own.
    ///
    /// This reads all arenas, and on a GPU waits for the work queued so far.
    ///
    /// # Errors
    /// A step is being recorded; the device failed. None on the CPU.
    pub fn state_digests(&self) -> Result<Vec<StateDigest>> {
        let mut arenas = self.state()?.arenas;
        arenas.retain(ArenaState::is_common);
        let key = |arena: &ArenaState| {
            let (recipe, group) = (arena.recipe.clone(), arena.group.clone());
            (recipe, arena.amax_history.len(), group, arena.direction as usize)
        };
        arenas.sort_by_cached_key(key);
        let under = |arena: &ArenaState| {
            let (recipe, len) = (&arena.recipe, arena.amax_history.len() + 1);
            let group = arena.group.as_ref().map(|group| format!(", group `{group}`")).unwrap_or_default();
            format!(" under {recipe}, history length {len}{group}")
        };
        Ok(arenas.iter().flat_map(|arena| arena.digests(&under(arena))).collect())
    }
}
