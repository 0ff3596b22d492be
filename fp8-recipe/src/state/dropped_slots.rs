//! Slots that states of earlier versions contain although no layer wrote them.
//!
//! Earlier versions registered five slots for each GEMM. The slots `*.output` and `*.grad_input` were never written by the
//! layers of fp8-nn, so they are registered only by layers that use them now. Loading ignores
//! such slots of a saved state if the model does not register them and they never ran.

use crate::{ArenaState, SlotRole};
use std::borrow::Cow;

impl ArenaState {
    /// Returns the arena without the output and input-gradient slots that never ran and that are not registered. An arena whose parts differ in length is returned unchanged, so that its check refuses it.
    pub(crate) fn without_dropped_slots(&self, is_registered: impl Fn(&str) -> bool) -> Cow<'_, Self> {
        let slots = self.slots.len();
        let has_all = |len: usize| len == slots;
        let is_whole = has_all(self.scale.len())
            && self.amax_history.iter().all(|row| has_all(row.len()))
            && (self.last_updates.is_empty() || has_all(self.last_updates.len()));
        let kept: Vec<bool> =
            (0..slots).map(|slot| !(is_whole && self.is_dropped(slot, &is_registered))).collect();
        if kept.iter().all(|&kept| kept) {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Self {
            slots: filtered(&self.slots, &kept),
            scale: filtered(&self.scale, &kept),
            amax_history: self.amax_history.iter().map(|row| filtered(row, &kept)).collect(),
            last_updates: filtered(&self.last_updates, &kept),
            undetermined: self.undetermined.clone(),
            weights: self.weights.clone(),
            recipe: self.recipe.clone(),
            group: self.group.clone(),
            ..*self
        })
    }

    fn is_dropped(&self, slot: usize, is_registered: impl Fn(&str) -> bool) -> bool {
        let name = &self.slots[slot];
        let role = name.rsplit_once('.').map(|(_, role)| role);
        let has_role = [SlotRole::Output, SlotRole::GradInput].iter().any(|of| role == Some(of.name()));
        has_role && !is_registered(name) && !self.has_run(slot)
    }

    /// Returns whether the scale or history of a slot was ever updated.
    fn has_run(&self, slot: usize) -> bool {
        self.scale[slot] != self.first_scale()
            || self.amax_history.iter().any(|row| row[slot] != 0.0)
            || self.last_updates.get(slot).is_some_and(|&last| last > 0)
    }
}

fn filtered<T: Clone>(values: &[T], kept: &[bool]) -> Vec<T> {
    values.iter().zip(kept).filter(|(_, kept)| **kept).map(|(value, _)| value.clone()).collect()
}
