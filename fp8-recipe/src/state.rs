//! What lasts: histories, scales and update counts, by name. Checkpoints store it; resuming from it is exact.

use crate::{Direction, Error, Recipe, Result, Scaling};
use fp8_kernels::UNSET;
use std::sync::Arc;

/// The state of all arenas of a [`Scaling`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScalingState {
    /// Two per recipe and group: forward and backward.
    pub arenas: Vec<ArenaState>,
}

/// One arena. Slots and recipe must be those of the arena it is loaded into; the history's length and the group may
/// differ. Of a longer history the newest rows stay, a shorter one gets zeros on its old side.
#[derive(Debug, Clone, PartialEq)]
pub struct ArenaState {
    /// The recipe's options, without the history's length.
    pub recipe: String,
    /// The id of the group that amaxes are reduced over.
    pub group: Option<String>,
    /// The pass.
    pub direction: Direction,
    /// Committed scopes so far.
    pub updates: u64,
    /// Slot names, sorted.
    pub slots: Vec<Arc<str>>,
    /// One scale per slot; −1 is a slot not yet calibrated.
    pub scale: Vec<f32>,
    /// `[rows][slots]`, oldest row first; the staging row is not part of it.
    pub amax_history: Vec<Vec<f32>>,
}

impl Scaling {
    /// The state between two scopes. Recipes without state leave none.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn state(&self) -> Result<ScalingState> {
        let mut state = ScalingState::default();
        for domain in &self.domains {
            let (Recipe::Delayed(recipe), Some(arenas)) = (&domain.recipe, &domain.arenas) else { continue };
            for (direction, arena) in Direction::ALL.into_iter().zip(arenas) {
                let (history, slots) = (arena.history()?, arena.slots());
                let row = |row: usize| history[row * slots..(row + 1) * slots].to_vec();
                let scales = arena.scales()?.into_iter();
                state.arenas.push(ArenaState {
                    recipe: domain.recipe.state_key(),
                    group: domain.group().map(|group| group.id().to_owned()),
                    direction,
                    updates: arena.updates(),
                    slots: self.names[direction as usize].clone(),
                    scale: scales.map(|scale| if scale < 0.0 { UNSET } else { scale }).collect(),
                    amax_history: (0..recipe.amax_history_len - 1).map(row).collect(),
                });
            }
        }
        state.arenas.extend(self.pending.arenas.iter().cloned());
        Ok(state)
    }

    /// Takes a saved state in place of this one: into arenas that exist at once, into others when the first scope of their
    /// recipe makes them. Arenas that it does not have start anew, as they would have where it was saved.
    ///
    /// # Errors
    /// Slots other than this model's, or numbers that no state holds; nothing has changed then. A device that failed.
    pub fn load_state(&mut self, state: &ScalingState) -> Result<()> {
        for arena in &state.arenas {
            if let Some(problem) = self.problem(arena) {
                let (recipe, direction) = (arena.recipe.clone(), arena.direction.name());
                return Err(Error::State { recipe, direction, problem });
            }
        }
        self.settle()?;
        self.pending = state.clone();
        self.weights.clear();
        (0..self.domains.len()).try_for_each(|index| self.load_pending(index, true))
    }

    /// What keeps a saved arena from this model.
    fn problem(&self, arena: &ArenaState) -> Option<String> {
        let names = &self.names[arena.direction as usize];
        let slots = names.len();
        if let Some((theirs, ours)) = arena.slots.iter().zip(names).find(|(a, b)| a != b) {
            return Some(format!("it has slot `{theirs}` where this model has `{ours}`"));
        }
        if arena.slots.len() != slots {
            return Some(format!("it has {} slots, this model {slots}", arena.slots.len()));
        }
        if arena.scale.len() != slots || arena.amax_history.iter().any(|row| row.len() != slots) {
            return Some(format!("its scale or history does not have one value per slot ({slots})"));
        }
        let is_scale = |scale: f32| scale == UNSET || scale.is_finite() && scale > 0.0;
        if let Some(scale) = arena.scale.iter().find(|scale| !is_scale(**scale)) {
            return Some(format!("it has a scale of {scale}"));
        }
        let amax = arena.amax_history.iter().flatten().find(|amax| **amax < 0.0);
        amax.map(|amax| format!("it has an amax of {amax}"))
    }

    /// Whether loaded state waits for a domain's arenas.
    pub(crate) fn has_pending(&self, index: usize, records: bool) -> bool {
        Direction::ALL.into_iter().any(|direction| self.pending_for(index, direction, records).is_some())
    }

    /// Which loaded state is a domain's: of its own group and length. A scope that records takes over one of another length,
    /// too, or else the only other group's; an evaluation leaves these to the training that goes on with them.
    fn pending_for(&self, index: usize, direction: Direction, records: bool) -> Option<usize> {
        let domain = &self.domains[index];
        let Recipe::Delayed(recipe) = &domain.recipe else { return None };
        let key = domain.recipe.state_key();
        let group = domain.group().map(|group| group.id());
        let fits: Vec<(usize, &ArenaState)> = (self.pending.arenas.iter().enumerate())
            .filter(|(_, saved)| saved.direction == direction && saved.recipe == key)
            .collect();
        let same_group = || fits.iter().filter(|(_, saved)| saved.group.as_deref() == group);
        let same_length =
            |(_, saved): &&(usize, &ArenaState)| saved.amax_history.len() + 1 == recipe.amax_history_len;
        let own = same_group().find(same_length);
        let others = || {
            same_group().next().or_else(|| {
                let first = fits.first()?;
                let only = fits.iter().all(|(_, saved)| saved.group == first.1.group).then_some(first)?;
                Some(fits.iter().find(same_length).unwrap_or(only))
            })
        };
        own.or_else(|| if records { others() } else { None }).map(|(position, _)| *position)
    }

    /// Puts a domain's arenas to rest and loads what waits for them.
    pub(crate) fn load_pending(&mut self, index: usize, records: bool) -> Result<()> {
        for direction in Direction::ALL {
            let position = self.pending_for(index, direction, records);
            let Some(arenas) = &mut self.domains[index].arenas else { return Ok(()) };
            let arena = &mut arenas[direction as usize];
            let first_scale = arena.options().first_scale;
            let saved = position.map(|position| self.pending.arenas.remove(position));
            arena.set_updates(saved.as_ref().map_or(0, |saved| saved.updates));
            match saved {
                Some(saved) => {
                    arena.set_history(&saved.amax_history.concat())?;
                    arena.set_scales(&saved.scale)?;
                }
                None => {
                    arena.set_history(&[])?;
                    arena.set_scales(&vec![first_scale; arena.slots()])?;
                }
            }
        }
        Ok(())
    }
}
