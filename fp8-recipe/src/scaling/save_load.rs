//! Saves and loads the state of a `Scaling`. Checkpoints store it; resuming from it is exact.

use crate::arenas::domain::Domain;
use crate::state::pending_arena::PendingArena;
use crate::state::state_terms::StateTerms;
use crate::{
    ArenaState, Direction, Error, Result, Scaling, ScalingState, SlotUse, StateReport, WeightVersion,
};
use std::sync::Arc;

impl Scaling {
    /// Returns the present state. It does not include recipes without state, such as current scaling.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn state(&self) -> Result<ScalingState> {
        let mut state = ScalingState::default();
        for (index, domain) in self.domains.iter().enumerate() {
            for direction in Direction::ALL {
                let names = self.slots.names(direction);
                let Some(mut arena) = domain.arena_state(direction, names)? else { continue };
                match direction {
                    Direction::Forward => arena.weights = self.weights.state(index, names)?,
                    Direction::Backward => arena.awaits_backward = self.scopes.awaiting().includes(index),
                }
                state.arenas.push(arena);
            }
        }
        for mut arena in self.inherited.pending().iter().map(PendingArena::as_saved) {
            arena.awaits_backward &= !self.scopes.awaiting().is_answered();
            state.arenas.push(arena);
        }
        state.dropout = self.randomness.progress()?;
        Ok(state)
    }

    /// Replaces the state by a saved one, and reports for each slot how it was used: see [`StateReport`].
    ///
    /// Recipes that have been used or prepared ([`prepare`](Self::prepare)) continue at once: from their own state, or from
    /// other recipes' amaxes, from which they compute new scales. The rest is used by the first scopes of its recipes and
    /// listed as unused until then; call [`state_report`](Self::state_report) for a report after that. The FP8 copies of
    /// weights are dropped. Those of weights that have not changed since are made again with the same scales, once
    /// [`bind_weights`](Self::bind_weights) has told which these are.
    ///
    /// A recipe that differs from a saved one only in the length of its history continues with the same scales and counts its
    /// updates anew. If the saved history is longer, only its newest rows are used. If it is shorter, zeros are added on its old
    /// side. The group may differ if all saved arenas belong to one group.
    ///
    /// States of earlier versions, which had five slots for each GEMM, load too: slots `*.output` and `*.grad_input` that
    /// this model does not register and that never ran are ignored, and the report does not list them.
    ///
    /// With several ranks, all must load the same state. The next commit that reduces amaxes compares the states and returns
    /// an error on every rank if they differ.
    ///
    /// # Errors
    /// An arena that does not fit this model or that no training run can produce: other slots, a scale that is neither −1 nor
    /// normal and positive, an amax that is negative or NaN, or infinite although the recipe records none, counts beyond
    /// 2⁶²; a user's scale policy that returns no usable scale for another recipe's amaxes. Nothing has changed then. A
    /// device that failed.
    pub fn load_state(&mut self, state: &ScalingState) -> Result<StateReport> {
        let mut saved = Vec::new();
        for (position, arena) in state.arenas.iter().enumerate() {
            let refused = |problem| {
                let (recipe, direction) = (arena.label().to_string(), arena.direction.name());
                Err(Error::State { recipe, direction, problem })
            };
            let arena = arena.without_dropped_slots(|name| self.always_has(arena.direction, name));
            if let Some(problem) = arena.problem(&self.expected_slots(&arena)) {
                return refused(problem);
            }
            let is_same = |other: &ArenaState| {
                (&other.recipe, &other.group, other.direction, other.amax_history.len())
                    == (&arena.recipe, &arena.group, arena.direction, arena.amax_history.len())
            };
            if state.arenas[..position].iter().any(is_same) {
                return refused("recipe: it occurs twice with the same group and history length".to_owned());
            }
            let Some(terms) = StateTerms::parse(&arena.recipe) else {
                return refused(
                    "recipe: expected the options of a recipe with state, as `state` writes them".to_owned(),
                );
            };
            let arena = arena.with_last_updates(position as u64 + 1);
            saved.push(PendingArena::new(&arena, terms, self.slots.names(arena.direction)));
        }
        self.settle()?;
        self.restart(saved)?;
        if let Some(dropout) = state.dropout {
            self.randomness.set(dropout)?;
        }
        self.domains.iter_mut().for_each(Domain::forget_agreement);
        Ok(self.inherited.report())
    }

    /// Tells which weights the loaded state describes. `version` returns the version of the weight with this slot, whose value
    /// must be the one that the state was saved with, or `None` for a slot that is not such a weight's.
    /// `fp8_nn::checkpoint::load` calls it after it has read the parameters.
    ///
    /// A state that comes from the same process knows its weights already. Weights of a state from a file that are not bound are
    /// quantized with their slots' scales, and recorded again.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor};
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling, WeightVersion};
    /// use std::sync::Arc;
    ///
    /// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
    /// let (recipe, version) = (DelayedScaling::default().into(), Arc::new(WeightVersion::new()));
    /// let w = Tensor::from_vec(vec![3.5f32], [1, 1], &device)?;
    /// let mut scaling = Scaling::new(&fc, &device)?;
    /// let mut quantize = |scaling: &mut Scaling, version: &Arc<WeightVersion>| {
    ///     let mut cx = scaling.autocast(&recipe)?;
    ///     cx.quantize_parameter(&fc.weight, version, true, &w)?;
    ///     cx.commit()?;
    ///     scaling.state()
    /// };
    /// let state = quantize(&mut scaling, &version)?;
    ///
    /// let (mut resumed, loaded) = (Scaling::new(&fc, &device)?, Arc::new(WeightVersion::new()));
    /// resumed.load_state(&state)?;
    /// resumed.bind_weights(&mut |slot| (slot == "fc.weight").then(|| loaded.clone()))?;
    /// let resumed = quantize(&mut resumed, &loaded)?;
    /// assert_eq!(resumed.arenas[0].last_updates, [0, 1]); // the amax was not recorded again
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn bind_weights(
        &mut self,
        version: &mut dyn FnMut(&str) -> Option<Arc<WeightVersion>>,
    ) -> Result<()> {
        for weight in self.inherited.pending_mut().iter_mut().flat_map(|saved| &mut saved.arena.weights) {
            if let Some(version) = version(&weight.slot) {
                weight.bind(&version);
            }
        }
        Ok(self.weights.bind(version, |slot| self.slots.position(slot), &self.device)?)
    }

    /// Returns whether the model has a slot that all recipes use.
    fn always_has(&self, direction: Direction, name: &str) -> bool {
        let slot = self.slots.by_name(name).filter(|slot| slot.direction() == direction);
        slot.is_some_and(|slot| slot.used_by() == SlotUse::Always)
    }

    /// Returns the slots that a saved arena must have: those that all recipes use, and of the others those that it has.
    fn expected_slots(&self, arena: &ArenaState) -> Vec<Arc<str>> {
        let always = self.slots.always_used(arena.direction);
        let is_optional = |name: &&Arc<str>| {
            let slot = self.slots.by_name(name).filter(|slot| slot.direction() == arena.direction);
            slot.is_some_and(|slot| slot.used_by() != SlotUse::Always)
        };
        let mut expected: Vec<_> =
            always.iter().chain(arena.slots.iter().filter(is_optional)).cloned().collect();
        expected.sort();
        expected
    }
}
