//! Starts the arenas of recipes: each with a state that `Start` has computed from what was loaded and from other recipes.

use crate::names::by_direction::ByDirection;
use crate::recipes::policy::Update;
use crate::state::initial_state::{Held, Source, Start};
use crate::state::pending_arena::PendingArena;
use crate::state::state_terms::SavedRows;
use crate::{ArenaState, Direction, Result, Scaling, StateReport, WeightState};

impl Scaling {
    /// Returns the report of the last [`load_state`](Self::load_state), extended by the recipes that were used for the first
    /// time since then and by what they took over from other recipes. Arenas that were created before anything had run are
    /// not listed.
    pub fn state_report(&self) -> StateReport {
        self.inherited.report()
    }

    /// Creates the arenas of a domain and sets their initial state.
    pub(super) fn start(&mut self, index: usize, records: bool) -> Result<()> {
        self.device.expect_eager("arena", "open a scope of this recipe once before")?;
        let own = |direction| self.own_state(index, direction, records, self.inherited.pending());
        let own = ByDirection::from_fn(own);
        let plan = |direction| self.plan(index, direction, own[direction], self.inherited.pending(), true);
        let starts = ByDirection::try_from_fn(plan)?;
        let mut arenas = self.domains[index].new_arenas(&self.clocks)?;
        for (direction, arena) in arenas.each_mut() {
            starts[direction].apply(arena)?;
        }
        self.domains[index].arenas = Some(arenas);
        let weights = self.finish(index, starts);
        self.inherited.remove([own.forward, own.backward]);
        Ok(self.weights.restore_all(weights, |slot| self.slots.position(slot), &self.device)?)
    }

    /// Starts those arenas of a domain again that have not been updated since they started, while the arenas that they
    /// started from have been.
    pub(super) fn follow(&mut self, index: usize) -> Result<()> {
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
            let start = self.plan(index, direction, None, self.inherited.pending(), true)?;
            if let Some(arenas) = &mut self.domains[index].arenas {
                start.apply(&mut arenas[direction])?;
            }
            self.weights.forget_evaluations(index);
            let label = self.domains[index].label();
            self.inherited.forget(&label, direction);
            self.domains[index].follows[direction] = Some(activity);
            self.inherited.note(&start.sources, start.report);
        }
        Ok(())
    }

    /// Replaces the state of all domains by `saved`. Saved arenas that no domain continues are kept for other recipes.
    pub(super) fn restart(&mut self, mut saved: Vec<PendingArena>) -> Result<()> {
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
        self.weights.clear();
        self.scopes.forget_awaiting();
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
        self.inherited.replace(saved);
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
                let name = &self.slots.names(Direction::Forward)[slot];
                let weight = forward.weights.iter().find(|weight| weight.slot == *name);
                let scale = weight.map_or(forward.scales[slot], |weight| weight.scale);
                (scale > 0.0).then_some(scale)
            };
            self.weights.reload(index, loaded)?;
            let weights = self.finish(index, starts);
            self.weights.restore_all(weights, |slot| self.slots.position(slot), &self.device)?;
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
            self.scopes.awaiting_mut().resume(index);
        }
        for (direction, start) in starts {
            let activity = self.activity(index, direction).wrapping_sub(u64::from(start.is_stale));
            self.domains[index].follows[direction] = (start.updates == 0).then_some(activity);
            self.inherited.note(&start.sources, start.report);
        }
        weights.into_iter().map(|weight| (index, weight)).collect()
    }

    /// Returns how often the arenas of all other recipes have been updated.
    fn activity(&self, index: usize, direction: Direction) -> u64 {
        let others =
            self.domains.iter().enumerate().filter(|(other, domain)| *other != index && domain.has_state());
        let arenas = others.filter_map(|(_, domain)| domain.arenas.as_ref());
        arenas.fold(0, |sum, arenas| sum.wrapping_add(arenas[direction].updates()))
    }

    /// Returns whether there is loaded state of exactly this domain: of its recipe, length and group.
    pub(super) fn has_own_state(&self, index: usize) -> bool {
        Direction::ALL
            .into_iter()
            .any(|direction| self.own_state(index, direction, false, self.inherited.pending()).is_some())
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
        let mut newest = vec![0; self.slots.names(direction).len()];
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
        let names = self.slots.names(direction);
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
        start.report.keep_slots(|slot| self.slots.position(slot).is_some_and(|index| used.contains(&index)));
        start
    }
}
