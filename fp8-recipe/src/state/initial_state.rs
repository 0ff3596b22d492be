//! The initial state of the arenas of a recipe.
//!
//! 1. If state of the same recipe was loaded, with a history of the same length, its history, scales, number of updates and
//!    weights are restored. The group may differ if all saved arenas belong to one group.
//! 2. Otherwise each slot starts from the history that was updated last among all recipes of the same group, used or loaded.
//!    Amaxes do not depend on margin, policy or format, so the recipe selects those that it would have recorded. It computes
//!    the scale from the newest `amax_history_len` of them by its own rules, and keeps the newest `amax_history_len` − 1 as its
//!    window. If the two recipes differ only in the length of the history or in whether attention runs in FP8, the scale stays
//!    unchanged.
//! 3. Otherwise the slot calibrates, or starts with scale 1 under Transformer Engine's first-step rule. This also applies to
//!    slots that last ran under a history of length 1, which keeps no amaxes.
//!
//! A recipe of the user's own has numbers that only it understands, so it continues only its own state. Other recipes can take
//! one amax from it, the newest.
//!
//! "Updated last" is exact. The arenas of a `Scaling` share an [`UpdateClock`](fp8_kernels::UpdateClock), which counts the
//! updates of each slot on the device, including replays of recorded steps. An update that leaves a slot unchanged (because
//! it did not run, or its amax was left out) does not count. Of two arenas that one commit updated, the one whose key is
//! later in the order counts as updated later. That order is the same on all ranks, and all inputs are reduced amaxes, so all
//! ranks start alike. A recipe that reduces amaxes takes none from a recipe that does not (`reduce_amax`), because these
//! differ between ranks.
//!
//! A recipe is new until its first update; a scope that was dropped without commit does not count. If other recipes are
//! updated before that first update, each scope of the new recipe starts its arenas again. This holds for each of its two
//! arenas, and also after its state was saved and loaded.

use crate::arenas::domain::Domain;
use crate::arenas::slot_arena::SlotArena;
use crate::recipes::policy::Update;
use crate::recipes::recipe_key::without_attention;
use crate::state::pending_arena::PendingArena;
use crate::state::state_report::{LoadedSlot, NewSlot, StartsNew, StateReport};
use crate::{ArenaState, Direction, RecipeLabel, Result, WeightState};
use fp8_kernels::UNSET;
use std::sync::Arc;

/// The state with which an arena will start.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) updates: u64,
    /// `[rows][slots]`, oldest row first.
    pub(crate) history: Vec<f32>,
    pub(crate) scales: Vec<f32>,
    /// Whether a recorded amax has determined each scale.
    pub(crate) is_determined: Vec<bool>,
    pub(crate) last_updates: Vec<u64>,
    /// The weights that have not changed since they were recorded.
    pub(crate) weights: Vec<WeightState>,
    pub(crate) awaits_backward: bool,
    pub(crate) report: StateReport,
    /// Whether other recipes may have been updated since this state was computed from them.
    pub(crate) is_stale: bool,
    /// The positions of the saved arenas whose state it uses.
    pub(crate) sources: Vec<usize>,
}

/// An arena whose amaxes a new recipe may take.
pub(crate) struct Source<'a> {
    /// Every option of the recipe except the length of the history.
    pub(crate) recipe: String,
    pub(crate) label: RecipeLabel,
    /// The number of its newest rows that are past amaxes.
    pub(crate) rows: usize,
    pub(crate) last_updates: Vec<u64>,
    pub(crate) held: Held<'a>,
}

pub(crate) enum Held<'a> {
    Live(&'a SlotArena),
    Saved(usize, &'a ArenaState),
}

impl Held<'_> {
    /// Reads the history, the scales and which of these a recorded amax has determined.
    fn read(&self) -> Result<(Vec<f32>, Vec<f32>, Vec<bool>)> {
        Ok(match self {
            Self::Live(arena) => {
                let is_determined = arena.cast_scales()?.into_iter().map(|scale| scale > 0.0);
                (arena.history()?, arena.scales()?, is_determined.collect())
            }
            Self::Saved(_, arena) => {
                let is_determined = (0..arena.slots.len()).map(|slot| arena.is_determined(slot));
                (arena.amax_history.concat(), arena.scale.clone(), is_determined.collect())
            }
        })
    }
}

impl Start {
    /// Continues a saved arena of the same recipe. `newest` are the slots' last updates under all recipes.
    pub(crate) fn own(domain: &Domain, saved: &PendingArena, newest: &[u64]) -> Self {
        let ArenaState { direction, updates, slots, scale, amax_history, last_updates, .. } = &saved.arena;
        let (recipe, from) = (domain.label(), saved.arena.label());
        let loaded = |slot: &Arc<str>| LoadedSlot {
            slot: slot.clone(),
            direction: *direction,
            recipe: recipe.clone(),
            from: from.clone(),
        };
        Self {
            updates: *updates,
            history: amax_history.concat(),
            scales: scale.clone(),
            is_determined: (0..slots.len()).map(|slot| saved.arena.is_determined(slot)).collect(),
            last_updates: last_updates.clone(),
            weights: saved.arena.weights.clone(),
            awaits_backward: saved.arena.awaits_backward,
            report: StateReport { taken_over: slots.iter().map(loaded).collect(), ..StateReport::default() },
            is_stale: newest.iter().zip(last_updates).any(|(newest, own)| newest > own),
            sources: Vec::new(),
        }
    }

    /// Starts each slot from the source that was updated last.
    pub(crate) fn from_sources(
        domain: &Domain,
        direction: Direction,
        names: &[Arc<str>],
        sources: &[Source<'_>],
    ) -> Result<Self> {
        let Some(state) = domain.policy.state() else { return Ok(Self::at_rest(domain, names.len())) };
        let (len, slots) = (state.arena_options().history_len, names.len());
        let label = domain.label();
        let Update::Window(rule) = domain.update_rule(direction) else {
            let mut start = Self::at_rest(domain, slots);
            let has_run = |slot: usize| sources.iter().any(|source| source.last_updates[slot] > 0);
            let reason = |slot| if has_run(slot) { StartsNew::OwnState } else { StartsNew::NeverRan };
            let new = |slot| new_slot(names, slot, direction, &label, reason(slot));
            start.report.new.extend((0..slots).map(new));
            return Ok(start);
        };
        let own_recipe = domain.policy.state_key();
        // If two are equally new, one was started from the other. The longer one has more amaxes.
        let newest = |slot: usize| {
            let ran = sources.iter().enumerate().filter(|(_, source)| source.last_updates[slot] > 0);
            ran.max_by_key(|(_, source)| (source.last_updates[slot], source.rows))
                .map(|(position, _)| position)
        };
        let chosen: Vec<Option<usize>> = (0..slots).map(newest).collect();
        let mut start = Self::at_rest(domain, slots);
        let mut columns = vec![Vec::new(); slots];
        for (position, source) in sources.iter().enumerate() {
            if !chosen.contains(&Some(position)) {
                continue;
            }
            let (history, scales, is_determined) = source.held.read()?;
            let history = &history[history.len().saturating_sub(source.rows * slots)..];
            if let Held::Saved(position, _) = source.held {
                start.sources.push(position);
            }
            for slot in (0..slots).filter(|&slot| chosen[slot] == Some(position)) {
                let window = (0..source.rows).map(|row| history[row * slots + slot]);
                let loaded = || LoadedSlot {
                    slot: names[slot].clone(),
                    direction,
                    recipe: label.clone(),
                    from: source.label.clone(),
                };
                if without_attention(&source.recipe) == without_attention(&own_recipe) {
                    start.last_updates[slot] = source.last_updates[slot];
                    start.scales[slot] = if scales[slot] < 0.0 { UNSET } else { scales[slot] };
                    start.is_determined[slot] = is_determined[slot];
                    columns[slot] = window.collect();
                    start.report.taken_over.push(loaded());
                    continue;
                }
                if source.rows == 0 {
                    start.report.new.push(new_slot(names, slot, direction, &label, StartsNew::NoWindow));
                    continue;
                }
                start.last_updates[slot] = source.last_updates[slot];
                columns[slot] = window.filter(|&amax| state.records(amax)).collect();
                let scale = rule.scale_of(&newest_of(&columns[slot], len), UNSET)?;
                if scale != UNSET {
                    start.scales[slot] = scale;
                    start.is_determined[slot] = true;
                    start.report.recomputed.push(loaded());
                    continue;
                }
                start.report.new.push(new_slot(names, slot, direction, &label, StartsNew::NoAmax));
            }
        }
        for slot in (0..slots).filter(|&slot| chosen[slot].is_none()) {
            start.report.new.push(new_slot(names, slot, direction, &label, StartsNew::NeverRan));
        }
        for (slot, column) in columns.iter().enumerate() {
            for (row, amax) in newest_of(column, len - 1).into_iter().enumerate() {
                start.history[row * slots + slot] = amax;
            }
        }
        Ok(start)
    }

    /// Starts with an empty history.
    pub(crate) fn at_rest(domain: &Domain, slots: usize) -> Self {
        let options = domain.arena_options();
        Self {
            updates: 0,
            history: vec![0.0; (options.history_len - 1) * slots],
            scales: vec![options.first_scale; slots],
            is_determined: vec![false; slots],
            last_updates: vec![0; slots],
            weights: Vec::new(),
            awaits_backward: false,
            report: StateReport::default(),
            is_stale: false,
            sources: Vec::new(),
        }
    }

    pub(crate) fn apply(&self, arena: &mut SlotArena) -> Result<()> {
        arena.set_updates(self.updates);
        arena.set_history(&self.history)?;
        arena.set_scales(&self.scales)?;
        let determined = |(&scale, &is_determined)| if is_determined { scale } else { UNSET };
        let cast_scales: Vec<f32> = self.scales.iter().zip(&self.is_determined).map(determined).collect();
        arena.set_cast_scales(&cast_scales)?;
        // An arena for reports has a clock of its own, which is not saved.
        arena.set_last_updates(&self.last_updates)
    }
}

fn new_slot(
    names: &[Arc<str>],
    slot: usize,
    direction: Direction,
    recipe: &RecipeLabel,
    reason: StartsNew,
) -> NewSlot {
    NewSlot { slot: names[slot].clone(), direction, recipe: recipe.clone(), reason }
}

/// Returns the newest `len` of `amaxes`, which are ordered from oldest to newest, with zeros in front if there are fewer.
fn newest_of(amaxes: &[f32], len: usize) -> Vec<f32> {
    let newest = &amaxes[amaxes.len().saturating_sub(len)..];
    let mut window = vec![0.0; len - newest.len()];
    window.extend_from_slice(newest);
    window
}
