//! Saves and loads the state of a `Scaling`. Checkpoints store it; resuming from it is exact.

use crate::domain::Domain;
use crate::saved::Saved;
use crate::terms::Terms;
use crate::{ArenaState, Direction, Error, Result, Scaling, ScalingState, SlotUse, StateReport};
use std::sync::Arc;

impl Scaling {
    /// Returns the present state. It does not include recipes without state, such as current scaling.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn state(&self) -> Result<ScalingState> {
        let mut state = ScalingState::default();
        for domain in &self.domains {
            for direction in Direction::ALL {
                state.arenas.extend(domain.arena_state(direction, &self.names[direction])?);
            }
        }
        state.arenas.extend(self.pending.iter().map(Saved::as_saved));
        state.dropout = self.randomness.progress()?;
        Ok(state)
    }

    /// Replaces the state by a saved one, and reports for each slot how it was used: see [`StateReport`].
    ///
    /// Recipes that have been used or prepared ([`prepare`](Self::prepare)) continue at once: from their own state, or from
    /// other recipes' amaxes, from which they compute new scales. The rest is used by the first scopes of its recipes and
    /// listed as unused until then; call [`state_report`](Self::state_report) for a report after that. The FP8 copies of
    /// weights are dropped.
    ///
    /// The length of a saved history may differ from the recipe's. If it is longer, only its newest rows are kept. If it is
    /// shorter, zeros are added on its old side. The group may differ too if all saved arenas belong to one group.
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
            let Some(terms) = Terms::parse(&arena.recipe) else {
                return refused(
                    "recipe: expected the options of a recipe with state, as `state` writes them".to_owned(),
                );
            };
            let arena = arena.with_last_updates(position as u64 + 1);
            saved.push(Saved::new(&arena, terms, &self.names[arena.direction]));
        }
        self.settle()?;
        self.restart(saved)?;
        if let Some(dropout) = state.dropout {
            self.randomness.set(dropout)?;
        }
        self.domains.iter_mut().for_each(Domain::forget_agreement);
        Ok(self.state_report())
    }

    /// Returns whether the model has a slot that all recipes use.
    fn always_has(&self, direction: Direction, name: &str) -> bool {
        let slot = self.slot_at(name).filter(|slot| slot.direction() == direction);
        slot.is_some_and(|slot| slot.used_by() == SlotUse::Always)
    }

    /// Returns the slots that a saved arena must have: those that all recipes use, and of the others those that it has.
    fn expected_slots(&self, arena: &ArenaState) -> Vec<Arc<str>> {
        let always = self.slot_names(arena.direction);
        let is_optional = |name: &&Arc<str>| {
            let slot = self.slot_at(name).filter(|slot| slot.direction() == arena.direction);
            slot.is_some_and(|slot| slot.used_by() != SlotUse::Always)
        };
        let mut expected: Vec<_> =
            always.iter().chain(arena.slots.iter().filter(is_optional)).cloned().collect();
        expected.sort();
        expected
    }
}
