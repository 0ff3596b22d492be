//! Whether ranks that should be replicas of each other have the same scaling state.

use crate::{ArenaState, Result, Scaling, StateDigest};

impl Scaling {
    /// Returns a digest of every scale, amax history and update count that replicas have in common, in an order that
    /// depends only on names. [`AmaxGroup::agree_on_state`](crate::AmaxGroup::agree_on_state) compares them.
    ///
    /// A first scale that was not committed counts as not calibrated. Loaded state that no recipe has continued yet is
    /// included. Arenas that were never updated are left out, and those of recipes without `reduce_amax`, whose amaxes are
    /// each rank's own.
    ///
    /// This reads all arenas, and on a GPU waits for the work queued so far.
    ///
    /// # Errors
    /// A step that is being recorded; a device that failed. None on the CPU.
    pub fn state_digests(&self) -> Result<Vec<StateDigest>> {
        let mut arenas = self.state()?.arenas;
        arenas.retain(ArenaState::is_common);
        let key = |arena: &ArenaState| {
            let (recipe, group) = (arena.recipe.clone(), arena.group.clone());
            (recipe, arena.amax_history.len(), group, arena.direction as usize)
        };
        arenas.sort_by_cached_key(key);
        let digests = |arena: &ArenaState| arena.digests(&format!(" under {}", arena.label()));
        Ok(arenas.iter().flat_map(digests).collect())
    }
}
