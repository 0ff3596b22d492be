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
use crate::names::by_direction::ByDirection;
use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::policy::Update;
use crate::scopes::open_scope::Awaiting;
use crate::state::pending_arena::PendingArena;
use crate::state::state_report::{LoadedSlot, NewSlot, StartsNew, StateReport};
use crate::state::state_terms::SavedRows;
use crate::{ArenaState, Direction, RecipeLabel, Result, Scaling, WeightState};
use fp8_kernels::UNSET;
use std::sync::Arc;

/// The state with which an arena will start.
#[derive(Debug)]
struct Start {
    updates: u64,
    /// `[rows][slots]`, oldest row first.
    history: Vec<f32>,
    scales: Vec<f32>,
    /// Whether a recorded amax has determined each scale.
    is_determined: Vec<bool>,
    last_updates: Vec<u64>,
    /// The weights that have not changed since they were recorded.
    weights: Vec<WeightState>,
    awaits_backward: bool,
    report: StateReport,
    /// Whether other recipes may have been updated since this state was computed from them.
    is_stale: bool,
    /// The positions of the saved arenas whose state it uses.
    sources: Vec<usize>,
}

/// An arena whose amaxes a new recipe may take.
struct Source<'a> {
    /// Every option of the recipe except the length of the history.
    recipe: String,
    label: RecipeLabel,
    /// The number of its newest rows that are past amaxes.
    rows: usize,
    last_updates: Vec<u64>,
    held: Held<'a>,
}

enum Held<'a> {
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
    fn own(domain: &Domain, saved: &PendingArena, newest: &[u64]) -> Self {
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
    fn from_sources(
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
                if Fp8Attention::strip(&source.recipe) == Fp8Attention::strip(&own_recipe) {
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
    fn at_rest(domain: &Domain, slots: usize) -> Self {
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

    fn apply(&self, arena: &mut SlotArena) -> Result<()> {
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

impl Scaling {
    /// Returns the report of the last [`load_state`](Self::load_state), extended by the recipes that were used for the first
    /// time since then and by what they took over from other recipes. Arenas that were created before anything had run are
    /// not listed.
    pub fn state_report(&self) -> StateReport {
        let has_past = |saved: &&PendingArena| saved.arena.last_updates.iter().any(|&last| last > 0);
        let unused = self.pending.iter().filter(|saved| !saved.is_source).filter(has_past);
        let unused = unused.map(PendingArena::unused).collect();
        StateReport { unused, ..self.report.clone() }
    }

    /// Creates the arenas of a domain and sets their initial state.
    pub(crate) fn start(&mut self, index: usize, records: bool) -> Result<()> {
        self.device.expect_eager("arena", "open a scope of this recipe once before")?;
        let own = |direction| self.own_state(index, direction, records, &self.pending);
        let own = ByDirection::from_fn(own);
        let plan = |direction| self.plan(index, direction, own[direction], &self.pending, true);
        let starts = ByDirection::try_from_fn(plan)?;
        let mut arenas = self.domains[index].new_arenas(&self.clocks)?;
        for (direction, arena) in arenas.each_mut() {
            starts[direction].apply(arena)?;
        }
        self.domains[index].arenas = Some(arenas);
        let weights = self.finish(index, starts);
        let mut position = 0;
        self.pending.retain(|_| {
            position += 1;
            ![own.forward, own.backward].contains(&Some(position - 1))
        });
        self.restore_weights(weights)
    }

    /// Starts those arenas of a domain again that have not been updated since they started, while the arenas that they
    /// started from have been.
    pub(crate) fn follow(&mut self, index: usize) -> Result<()> {
        if self.device.capture_number().is_some() {
            return Ok(()); // a step is recorded with the present scales
        }
        for direction in Direction::ALL {
            let activity = self.activity(index, direction);
            let domain = &mut self.domains[index];
            let Some(arenas) = domain.arenas.as_ref().filter(|_| domain.has_state()) else { return Ok(()) };
            let follows = &mut domain.follows[direction];
            if arenas[direction].updates() > 0 {
                *follows = None;
            }
            if follows.is_none_or(|then| then == activity) {
                continue;
            }
            let start = self.plan(index, direction, None, &self.pending, true)?;
            if let Some(arenas) = &mut self.domains[index].arenas {
                start.apply(&mut arenas[direction])?;
            }
            self.weights.forget_evaluations(index);
            let label = self.domains[index].label();
            self.report.forget(&label, direction);
            self.domains[index].follows[direction] = Some(activity);
            self.note(start);
        }
        Ok(())
    }

    /// Replaces the state of all domains by `saved`. Saved arenas that no domain continues are kept for other recipes.
    pub(crate) fn restart(&mut self, mut saved: Vec<PendingArena>) -> Result<()> {
        // The first pass assigns each saved arena to its own domain, the second to one with another group.
        let mut owners = vec![ByDirection::<Option<usize>>::default(); self.domains.len()];
        let mut is_free = vec![true; saved.len()];
        for is_exact in [true, false] {
            for (index, owned) in owners.iter_mut().enumerate() {
                for direction in Direction::ALL {
                    let own = &mut owned[direction];
                    if own.is_some() || self.domains[index].arenas.is_none() {
                        continue;
                    }
                    let free: Vec<usize> = (0..saved.len()).filter(|&position| is_free[position]).collect();
                    let left: Vec<&PendingArena> = free.iter().map(|&position| &saved[position]).collect();
                    let found = self.own_state_of(index, direction, !is_exact, &left);
                    *own = found.map(|found| free[found]);
                    if let Some(position) = *own {
                        is_free[position] = false;
                    }
                }
            }
        }
        let mut starts = Vec::new();
        for (index, owned) in owners.iter().enumerate() {
            if self.domains[index].arenas.is_some() {
                let plan = |direction| self.plan(index, direction, owned[direction], &saved, false);
                starts.push((index, ByDirection::try_from_fn(plan)?));
            }
        }
        // After this line only the device can fail.
        self.report = StateReport::default();
        self.weights.clear();
        self.unbound.clear();
        self.awaiting = Awaiting::default();
        for (direction, clock) in self.clocks.each_ref() {
            let mut readings = vec![0; clock.slots()];
            for saved in saved.iter().filter(|saved| saved.arena.direction == direction) {
                let last = readings.iter_mut().zip(&saved.arena.last_updates);
                last.for_each(|(reading, &last)| *reading = last.max(*reading));
            }
            clock.set(&readings)?;
        }
        let used = starts.iter().flat_map(|(_, starts)| starts.each_ref());
        for &position in used.flat_map(|(_, start)| &start.sources) {
            saved[position].is_source = true;
        }
        let mut is_free = is_free.into_iter();
        saved.retain(|_| is_free.next().unwrap_or(true));
        self.pending = saved;
        for (index, starts) in &starts {
            if let Some(arenas) = &mut self.domains[*index].arenas {
                for (direction, arena) in arenas.each_mut() {
                    starts[direction].apply(arena)?;
                }
            }
        }
        for (index, mut starts) in starts {
            starts.each_mut().into_iter().for_each(|(_, start)| start.sources.clear()); // marked as used above
            let forward = &starts[Direction::Forward];
            let loaded = |slot: usize| {
                let name = &self.names[Direction::Forward][slot];
                let weight = forward.weights.iter().find(|weight| weight.slot == *name);
                let scale = weight.map_or(forward.scales[slot], |weight| weight.scale);
                (scale > 0.0).then_some(scale)
            };
            self.weights.reload(index, loaded)?;
            let weights = self.finish(index, starts);
            self.restore_weights(weights)?;
        }
        Ok(())
    }

    /// Reports arenas that have started, and returns the records of their weights.
    fn finish(&mut self, index: usize, mut starts: ByDirection<Start>) -> Vec<(usize, WeightState)> {
        if starts[Direction::Forward].is_determined.contains(&true) {
            self.weights.forget_evaluations(index); // they were made without these scales
        }
        let weights = std::mem::take(&mut starts[Direction::Forward].weights);
        if starts[Direction::Backward].awaits_backward {
            self.awaiting.resume(index);
        }
        for (direction, start) in starts {
            let activity = self.activity(index, direction).wrapping_sub(u64::from(start.is_stale));
            self.domains[index].follows[direction] = (start.updates == 0).then_some(activity);
            self.note(start);
        }
        weights.into_iter().map(|weight| (index, weight)).collect()
    }

    fn note(&mut self, start: Start) {
        for position in start.sources {
            if let Some(saved) = self.pending.get_mut(position) {
                saved.is_source = true;
            }
        }
        self.report.append(start.report);
    }

    /// Returns how often the arenas of all other recipes have been updated.
    fn activity(&self, index: usize, direction: Direction) -> u64 {
        let others =
            self.domains.iter().enumerate().filter(|(other, domain)| *other != index && domain.has_state());
        let arenas = others.filter_map(|(_, domain)| domain.arenas.as_ref());
        arenas.fold(0, |sum, arenas| sum.wrapping_add(arenas[direction].updates()))
    }

    /// Returns whether there is loaded state of exactly this domain: of its recipe, length and group.
    pub(crate) fn has_own_state(&self, index: usize) -> bool {
        Direction::ALL
            .into_iter()
            .any(|direction| self.own_state(index, direction, false, &self.pending).is_some())
    }

    fn own_state(
        &self,
        index: usize,
        direction: Direction,
        records: bool,
        saved: &[PendingArena],
    ) -> Option<usize> {
        self.own_state_of(index, direction, records, &saved.iter().collect::<Vec<_>>())
    }

    /// Returns the position of the saved arena that a domain continues: the one of its own group. If there is none, a scope that
    /// records takes one of another group if all arenas belong to that group. An evaluation leaves those for the training that
    /// will continue them.
    /// One of another length belongs to another recipe, which may be used as well.
    fn own_state_of(
        &self,
        index: usize,
        direction: Direction,
        records: bool,
        saved: &[&PendingArena],
    ) -> Option<usize> {
        let domain = &self.domains[index];
        let rows = domain.policy.state()?.arena_options().history_len - 1;
        let (key, group) = (domain.policy.state_key(), domain.group_id());
        let fits: Vec<(usize, &ArenaState)> = (saved.iter().map(|saved| &saved.arena).enumerate())
            .filter(|(_, saved)| saved.direction == direction && saved.recipe == key)
            .filter(|(_, saved)| saved.amax_history.len() == rows)
            .collect();
        let own = fits.iter().find(|(_, saved)| saved.group.as_deref() == group);
        let of_other_group = || {
            let first = fits.first().filter(|_| records)?;
            fits.iter().all(|(_, saved)| saved.group == first.1.group).then_some(first)
        };
        own.or_else(of_other_group).map(|(position, _)| *position)
    }

    /// Returns the last update of each slot among the saved arenas and, if `live`, the existing ones.
    fn newest_updates(&self, direction: Direction, saved: &[PendingArena], live: bool) -> Result<Vec<u64>> {
        let mut newest = vec![0; self.names[direction].len()];
        let mut merge = |last_updates: &[u64]| {
            newest.iter_mut().zip(last_updates).for_each(|(newest, &last)| *newest = last.max(*newest));
        };
        for saved in saved.iter().filter(|saved| saved.arena.direction == direction) {
            merge(&saved.arena.last_updates);
        }
        for domain in self.domains.iter().filter(|domain| live && domain.has_state()) {
            if let Some(arenas) = &domain.arenas {
                merge(&arenas[direction].last_updates()?);
            }
        }
        Ok(newest)
    }

    /// Computes the initial state of an arena without changing anything. It continues the saved arena `own`, if there is one.
    /// Otherwise it uses, slot by slot, what was updated last among the saved arenas and, if `live`, the existing arenas.
    fn plan(
        &self,
        index: usize,
        direction: Direction,
        own: Option<usize>,
        saved: &[PendingArena],
        live: bool,
    ) -> Result<Start> {
        let domain = &self.domains[index];
        if let Some(own) = own.and_then(|position| saved.get(position)) {
            let newest = self.newest_updates(direction, saved, live)?;
            return Ok(self.only_used(index, direction, Start::own(domain, own, &newest)));
        }
        let names = &self.names[direction];
        let Some(state) = domain.policy.state() else { return Ok(Start::at_rest(domain, names.len())) };
        let group = domain.group_id();
        // Amaxes that were not reduced differ between ranks.
        let is_common = |of_group: Option<&str>, reduced: bool| {
            reduced || !state.reduce_amax() || group.is_none() || of_group.is_none()
        };
        let mut sources = Vec::new();
        let others = self.domains.iter().enumerate().filter(|(other, _)| live && *other != index);
        for (_, other) in others.filter(|(_, other)| other.has_state() && other.group_id() == group) {
            if let (Some(theirs), Some(arenas)) = (other.policy.state(), &other.arenas)
                && is_common(group, theirs.reduce_amax())
            {
                let arena = &arenas[direction];
                sources.push(Source {
                    recipe: other.policy.state_key(),
                    label: other.label(),
                    rows: match other.update_rule(direction) {
                        Update::Window(_) => arena.options().history_len - 1,
                        Update::OnHost(_) => 1,
                    },
                    last_updates: arena.last_updates()?,
                    held: Held::Live(arena),
                });
            }
        }
        let has_group =
            !sources.is_empty() || saved.iter().any(|saved| saved.arena.group.as_deref() == group);
        let only_group = saved.first().map(|saved| &saved.arena.group);
        let only_group = only_group.filter(|group| saved.iter().all(|saved| saved.arena.group == **group));
        let from_group = if has_group { Some(group) } else { only_group.map(|group| group.as_deref()) };
        for (position, saved) in saved.iter().enumerate() {
            let of_group = saved.arena.group.as_deref();
            if saved.arena.direction == direction
                && Some(of_group) == from_group
                && is_common(of_group, saved.terms.reduce_amax)
            {
                sources.push(Source {
                    recipe: saved.arena.recipe.clone(),
                    label: saved.arena.label(),
                    rows: match saved.terms.rows {
                        SavedRows::Amaxes { .. } => saved.arena.amax_history.len(),
                        SavedRows::Custom => 1,
                    },
                    last_updates: saved.arena.last_updates.clone(),
                    held: Held::Saved(position, &saved.arena),
                });
            }
        }
        let mut start = Start::from_sources(domain, direction, names, &sources)?;
        let is_past = |source: &Source<'_>| source.last_updates.iter().any(|&last| last > 0);
        if live && saved.is_empty() && !sources.iter().any(is_past) {
            // Nothing has run so far, so there is nothing to report.
            start.report = StateReport::default();
        }
        Ok(self.only_used(index, direction, start))
    }

    /// Removes slots that the recipe does not use from the report.
    fn only_used(&self, index: usize, direction: Direction, mut start: Start) -> Start {
        let used = &self.domains[index].used[direction];
        start.report.keep_slots(|slot| self.indices.get(slot).is_some_and(|index| used.contains(index)));
        start
    }
}
