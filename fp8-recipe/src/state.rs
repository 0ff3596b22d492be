//! What lasts: histories, scales and update counts, by name. Checkpoints store it; resuming from it is exact.

use crate::domain::Domain;
use crate::recipe::{MAX_HISTORY_LEN, Terms};
use crate::start::Saved;
use crate::{Direction, Error, Recipe, Result, Scaling, StateReport};
use fp8_kernels::UNSET;
use std::sync::Arc;

/// Counts of updates beyond this one are refused: no training reaches it, and nothing that is counted on from it overflows.
const MAX_UPDATES: u64 = 1 << 62;

/// The state of all arenas of a [`Scaling`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScalingState {
    /// Two per recipe and group: forward and backward.
    pub arenas: Vec<ArenaState>,
}

/// One arena: what one recipe and group know of one pass. [`Scaling::load_state`] says what may differ where it is loaded.
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
    /// When each slot's history was last updated, counted slot by slot over all recipes: of two arenas, the one with the
    /// larger number has the newer history of a slot; 0 is a slot that was never updated. Empty in states saved by versions
    /// before this field: slots that have a past then count as updated last by the arena that comes later in the list.
    pub last_updates: Vec<u64>,
}

impl Scaling {
    /// The state between two scopes. Recipes without state leave none.
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
        state.arenas.extend(self.pending.iter().map(|saved| saved.arena.clone()));
        Ok(state)
    }

    /// Takes a saved state in place of this one, and returns what becomes of it, slot by slot: see [`StateReport`].
    ///
    /// Recipes that have arenas (they were used, or made ready by [`prepare`](Self::prepare)) go on at once: with their own
    /// state, or with other recipes' amaxes, from which they compute their scales anew. The rest waits for the first scopes of
    /// its recipes and is listed as unused until then; [`state_report`](Self::state_report) tells what became of it. The FP8
    /// copies of weights are dropped.
    ///
    /// A history's length may differ from the recipe's: of a longer one the newest rows stay, a shorter one gets zeros on its
    /// old side. So may the group, if all that was saved belongs to one group.
    ///
    /// States of earlier versions, which had five slots for each GEMM, load too: slots `*.output` and `*.grad_input` that
    /// this model does not register and that never ran are ignored, and the report does not list them.
    ///
    /// Among several ranks, all load the same state: the next commit that reduces amaxes compares it, and fails on every rank
    /// where they do not.
    ///
    /// # Errors
    /// An arena that does not fit this model or that no training leaves behind: other slots, a scale that is neither −1 nor
    /// normal and positive, an amax that is negative or NaN, or infinite although the recipe records none, counts beyond
    /// 2⁶²; a user's scale policy that returns no usable scale for another recipe's amaxes. Nothing has changed then. A
    /// device that failed.
    pub fn load_state(&mut self, state: &ScalingState) -> Result<StateReport> {
        let mut saved = Vec::new();
        for (position, arena) in state.arenas.iter().enumerate() {
            let refused = |problem| {
                let (recipe, direction) = (arena.recipe.clone(), arena.direction.name());
                Err(Error::State { recipe, direction, problem })
            };
            let arena = arena.without_dropped_slots(&self.names[arena.direction]);
            if let Some(problem) = self.problem(&arena) {
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
                    "recipe: expected the options of a delayed-scaling recipe, as `state` writes them"
                        .to_owned(),
                );
            };
            let arena = arena.with_last_updates(position as u64 + 1);
            saved.push(Saved { arena, terms, is_source: false });
        }
        self.settle()?;
        self.restart(saved)?;
        self.domains.iter_mut().for_each(Domain::forget_agreement);
        Ok(self.state_report())
    }

    /// What keeps a saved arena from this model: the field, what it holds, what would be right.
    fn problem(&self, arena: &ArenaState) -> Option<String> {
        let names = &self.names[arena.direction];
        let slots = names.len();
        let model = "load it into the model that it was saved from";
        if let Some((theirs, ours)) = arena.slots.iter().zip(names).find(|(a, b)| a != b) {
            return Some(format!("slots: it has `{theirs}` where this model has `{ours}`: {model}"));
        }
        if arena.slots.len() != slots {
            return Some(format!("slots: it has {}, this model {slots}: {model}", arena.slots.len()));
        }
        if arena.scale.len() != slots {
            return Some(format!("scale: it has {} values for {slots} slots", arena.scale.len()));
        }
        if let Some((row, values)) = arena.amax_history.iter().enumerate().find(|(_, row)| row.len() != slots)
        {
            return Some(format!("amax_history: row {row} has {} values for {slots} slots", values.len()));
        }
        if arena.amax_history.len() >= MAX_HISTORY_LEN {
            let rows = arena.amax_history.len();
            return Some(format!(
                "amax_history: it has {rows} rows: expected at most {}",
                MAX_HISTORY_LEN - 1
            ));
        }
        if !arena.last_updates.is_empty() && arena.last_updates.len() != slots {
            return Some(format!(
                "last_updates: it has {} values for {slots} slots",
                arena.last_updates.len()
            ));
        }
        let counts = [("updates", Some(&arena.updates)), ("last_updates", arena.last_updates.iter().max())];
        for (field, count) in counts {
            if let Some(count) = count.filter(|&&count| count > MAX_UPDATES) {
                return Some(format!("{field}: {count}: expected at most 2^62, which no training reaches"));
            }
        }
        let is_scale = |scale: f32| scale == UNSET || scale.is_finite() && scale >= f32::MIN_POSITIVE;
        if let Some((name, scale)) = names.iter().zip(&arena.scale).find(|(_, scale)| !is_scale(**scale)) {
            return Some(format!(
                "scale: {scale:e} for `{name}`: expected -1 (not calibrated) or a finite number of at least 2^-126"
            ));
        }
        // NaN is refused under every recipe: quantizing leaves it out of the amax.
        let records_infinity = Terms::parse(&arena.recipe).is_some_and(|terms| terms.record_non_finite);
        let is_amax = |amax: f32| {
            !amax.is_sign_negative() && (amax.is_finite() || amax == f32::INFINITY && records_infinity)
        };
        for row in &arena.amax_history {
            if let Some((name, amax)) = names.iter().zip(row).find(|(_, amax)| !is_amax(**amax)) {
                let or_infinity = if records_infinity { " or infinity" } else { "" };
                return Some(format!(
                    "amax_history: {amax:e} for `{name}`: expected a finite number of at least 0{or_infinity}"
                ));
            }
        }
        None
    }
}

impl Domain {
    /// The state of one of its arenas: `None` under a recipe without state, or before its first scope.
    pub(crate) fn arena_state(&self, direction: Direction, names: &[Arc<str>]) -> Result<Option<ArenaState>> {
        let (Recipe::Delayed(recipe), Some(arenas)) = (&self.recipe, &self.arenas) else { return Ok(None) };
        let arena = &arenas[direction];
        let (history, slots) = (arena.history()?, arena.slots());
        let row = |row: usize| history[row * slots..(row + 1) * slots].to_vec();
        let scales = arena.scales()?.into_iter();
        Ok(Some(ArenaState {
            recipe: self.recipe.state_key(),
            group: self.group_id().map(str::to_owned),
            direction,
            updates: arena.updates(),
            slots: names.to_vec(),
            scale: scales.map(|scale| if scale < 0.0 { UNSET } else { scale }).collect(),
            amax_history: (0..recipe.amax_history_len - 1).map(row).collect(),
            last_updates: arena.last_updates()?,
        }))
    }
}

impl ArenaState {
    /// The same with every slot's last update. Where none were saved, slots that have a past count as updated at `default`.
    fn with_last_updates(&self, default: u64) -> Self {
        let mut arena = self.clone();
        if arena.last_updates.is_empty() {
            let has_past = |slot: usize| {
                arena.scale[slot] != UNSET || arena.amax_history.iter().any(|row| row[slot] != 0.0)
            };
            arena.last_updates =
                (0..arena.slots.len()).map(|slot| if has_past(slot) { default } else { 0 }).collect();
        }
        arena
    }
}
