//! A recipe under a group, with its forward and backward arena.

use crate::arenas::group::Agreed;
use crate::arenas::host_update::HostPlan;
use crate::arenas::slot_arena::SlotArena;
use crate::names::by_direction::ByDirection;
use crate::names::by_role::ByRole;
use crate::recipes::policy::{Policy, State, Update};
use crate::{
    AmaxGroup, ArenaState, Direction, RecipeLabel, Result, ScaleSource, SlotName, SlotRole, StateDigest,
};
use fp8_kernels::ops::{self, AmaxRule, ScaleUpdate};
use fp8_kernels::{Arena, ArenaOptions, Encoding, REST, Scale, ScaleRule, UNSET, UpdateClock};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Domain {
    /// Recipe and group, which identify it.
    pub(crate) key: String,
    pub(crate) policy: Arc<dyn Policy>,
    rules: ByRole<ScaleRule>,
    /// The rule that gives scale 1 for every amax.
    one: ScaleRule,
    pub(crate) encodings: ByDirection<Encoding>,
    /// `None` until the first scope that records. Without state they are only used for the report.
    pub(crate) arenas: Option<ByDirection<SlotArena>>,
    /// The model's slots that the recipe uses and its arenas have.
    pub(crate) used: ByDirection<Range<usize>>,
    /// For an arena that started from other recipes' amaxes and was not updated since: how often those recipes had been
    /// updated by then. When they are updated further, the arena starts again from them.
    pub(crate) follows: ByDirection<Option<u64>>,
    group: Option<Arc<dyn AmaxGroup>>,
    agreed: ByDirection<Agreed>,
    /// The updates that the running commit has planned for arenas whose scales are computed by a user's code.
    planned: ByDirection<Option<HostPlan>>,
    /// Arenas of a scope that was left, which could not be rolled back yet.
    unrestored: ByDirection<bool>,
}

impl Domain {
    pub(crate) fn new(key: String, policy: &Arc<dyn Policy>, used: ByDirection<Range<usize>>) -> Self {
        Self {
            key,
            used,
            rules: ByRole::from_fn(|role| policy.rule(role)),
            one: ScaleRule::Current { fp8_max: 1.0, epsilon: f32::INFINITY, power_2_scales: false },
            encodings: ByDirection::from_fn(|direction| policy.format().encoding(direction)),
            policy: policy.clone(),
            arenas: None,
            follows: ByDirection::default(),
            group: None,
            agreed: ByDirection::default(),
            planned: ByDirection::default(),
            unrestored: ByDirection::default(),
        }
    }

    /// Returns the options that its arenas are created with.
    pub(crate) fn arena_options(&self) -> ArenaOptions {
        let for_reports = ArenaOptions { history_len: 2, rest: REST, first_scale: UNSET };
        self.policy.state().map_or(for_reports, State::arena_options)
    }

    /// Creates arenas for the slots of `clocks`. Without state they are only used for the report, and the clocks do not count
    /// their updates.
    pub(crate) fn new_arenas(&self, clocks: &ByDirection<UpdateClock>) -> Result<ByDirection<SlotArena>> {
        let (options, has_state) = (self.arena_options(), self.policy.state().is_some());
        ByDirection::try_from_fn(|direction| {
            SlotArena::new(&clocks[direction], self.used[direction].clone(), options, has_state)
        })
    }

    /// Returns whether a slot of the model, with its index, is quantized under the recipe.
    pub(crate) fn quantizes(&self, slot: &SlotName, index: usize) -> bool {
        self.used[slot.direction()].contains(&index) && !self.leaves_high(slot)
    }

    /// Returns whether a slot stays in high precision because attention reads its tensor, which has more than one scale.
    pub(crate) fn leaves_high(&self, slot: &SlotName) -> bool {
        slot.is_of_attention() && !self.policy.has_one_scale(slot.role())
    }

    /// Returns what a commit does with one of its arenas.
    pub(crate) fn update_rule(&self, direction: Direction) -> Update<'_> {
        update_rule(&*self.policy, self.arena_rule(direction))
    }

    /// Returns the rule of a slot.
    pub(crate) const fn rule(&self, role: SlotRole) -> &ScaleRule {
        self.rules.get(role)
    }

    /// Returns the rule for a recorded weight whose slot has no scale: as for its first copy, that of the slot, or 1.
    pub(crate) fn rule_again(&self, role: SlotRole) -> &ScaleRule {
        if self.arena_options().first_scale > 0.0 { &self.one } else { self.rule(role) }
    }

    /// Returns whether a weight that is quantized now is settled: the commit of the scope cannot give it other codes. The host
    /// may not know yet that it is.
    pub(crate) fn settles_at_once(&self, slot: usize) -> bool {
        let (Some(state), Some(arenas)) = (self.policy.state(), &self.arenas) else { return true };
        let is_final = state.first_scale_is_final() && self.reducing_group().is_none();
        is_final || arenas.forward.is_determined(slot)
    }

    /// Returns whether a slot of the forward pass has a scale, as far as the host knows.
    pub(crate) fn is_determined(&self, slot: usize) -> bool {
        self.arenas.as_ref().is_some_and(|arenas| arenas.forward.is_determined(slot))
    }

    /// Returns how often one of its arenas was updated.
    pub(crate) fn updates(&self, direction: Direction) -> u64 {
        self.arenas.as_ref().map_or(0, |arenas| arenas[direction].updates())
    }

    /// Returns the rule by which an arena is updated.
    const fn arena_rule(&self, direction: Direction) -> &ScaleRule {
        self.rule(direction.any_role())
    }

    /// Returns the scale that a report shows for a slot with this amax. `stored` is the slot's scale cell.
    pub(crate) fn reported_scale(&self, role: SlotRole, amax: f32, stored: f32) -> Result<f32> {
        // Without state, the arena was updated by the rule of another role of this pass.
        let is_own = self.policy.state().is_some() || stored < 0.0;
        if is_own { Ok(stored.abs()) } else { Ok(self.rule(role).scale(amax, stored)?) }
    }

    /// Returns the name of a recipe whose scales a user's code computes on the host.
    pub(crate) fn host_code(&self) -> Option<&str> {
        match self.update_rule(Direction::Forward) {
            Update::OnHost(code) => Some(code.name()),
            Update::Window(_) => None,
        }
    }

    /// Returns what reports and collectives call it.
    pub(crate) fn label(&self) -> RecipeLabel {
        RecipeLabel::new(&self.policy.key(), self.group_id())
    }

    /// Returns whether every scale of slots of this role is a power of two.
    pub(crate) fn has_powers_of_two(&self, role: SlotRole) -> bool {
        let rule = self.rule(role);
        match self.policy.scale(role, rule) {
            Scale::Blocks(blocks) => blocks.has_powers_of_two(),
            Scale::Nvfp4(_) => false,
            _ => matches!(self.update_rule(role.direction()), Update::Window(_)) && rule.has_powers_of_two(),
        }
    }

    /// Returns where the scales of slots of this role come from.
    pub(crate) fn scale_source(&self, role: SlotRole) -> ScaleSource {
        match self.policy.scale(role, self.rule(role)) {
            _ if self.policy.state().is_some() => ScaleSource::Past,
            Scale::Blocks(_) | Scale::Nvfp4(_) => ScaleSource::RowsOrBlocks,
            _ => ScaleSource::Tensor,
        }
    }

    pub(crate) fn group(&self) -> Option<&Arc<dyn AmaxGroup>> {
        self.group.as_ref()
    }

    pub(crate) fn group_id(&self) -> Option<&str> {
        self.group.as_ref().map(|group| group.id())
    }

    /// Returns whether it has arenas with state that outlasts a scope. Those of other recipes are only used for the report.
    pub(crate) fn has_state(&self) -> bool {
        self.arenas.is_some() && self.policy.state().is_some()
    }

    /// Sets the group, which may be a new one with the same id. The ranks of a new group compare names and state.
    pub(crate) fn set_group(&mut self, group: Option<Arc<dyn AmaxGroup>>) {
        let same = match (&self.group, &group) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if !same {
            self.agreed = ByDirection::default();
            self.group = group;
        }
    }

    /// Makes the next reductions compare the arenas' state, which has been replaced.
    pub(crate) fn forget_agreement(&mut self) {
        self.agreed.each_mut().into_iter().for_each(|(_, agreed)| agreed.forget_state());
    }

    /// Returns the group that a commit reduces over, if the recipe asks for it and the group has other ranks.
    pub(crate) fn reducing_group(&self) -> Option<&Arc<dyn AmaxGroup>> {
        let reduces = self.arenas.is_some() && self.policy.state()?.reduce_amax();
        self.group.as_ref().filter(|group| reduces && group.world_size() > 1)
    }

    /// Returns whether the recipe reduces amaxes but has no other ranks to reduce them with.
    pub(crate) fn is_lone(&self) -> bool {
        let reduces = self.policy.state().is_some_and(|state| state.reduce_amax());
        reduces && self.group().is_none_or(|group| group.world_size() <= 1)
    }

    /// Replaces row 0 by its maximum over the ranks.
    pub(crate) fn reduce(&mut self, direction: Direction, names: &[Arc<str>]) -> Result<()> {
        let (Some(group), Some(arenas)) = (self.reducing_group(), &self.arenas) else { return Ok(()) };
        let key = format!("{direction} {}", self.label());
        let mut agreed = self.agreed[direction];
        let digests = || self.digests(direction, names);
        let own = &names[self.used[direction].clone()];
        agreed.reduce(&**group, &key, arenas[direction].own(), own, digests)?;
        self.agreed[direction] = agreed;
        Ok(())
    }

    /// Returns the error that a user's function would cause in the update. Changes no arena.
    pub(crate) fn check(
        &mut self,
        direction: Direction,
        names: &[Arc<str>],
        roles: &[SlotRole],
    ) -> Result<()> {
        let Some(arenas) = &self.arenas else { return Ok(()) };
        let (arena, used) = (arenas[direction].own(), self.used[direction].clone());
        let (names, roles) = (&names[used.clone()], &roles[used]);
        match self.update_rule(direction) {
            Update::Window(update) => ops::check_scales(arena, &update)?,
            Update::OnHost(code) => {
                let plan = HostPlan::new(code, arena, self.encodings[direction].max(), names, roles)?;
                self.planned[direction] = Some(plan);
            }
        }
        Ok(())
    }

    /// Undoes what an open scope wrote. If the device fails, [`restore`](Self::restore) tries again later.
    pub(crate) fn roll_back(&mut self, direction: Direction) -> Result<()> {
        self.planned[direction] = None;
        let Some(arenas) = &self.arenas else { return Ok(()) };
        self.unrestored[direction] = true;
        arenas[direction].own().roll_back()?;
        self.unrestored[direction] = false;
        Ok(())
    }

    /// Repeats a [`roll_back`](Self::roll_back) that failed.
    pub(crate) fn restore(&mut self) -> Result<()> {
        let left = Direction::ALL.into_iter().filter(|&direction| self.unrestored[direction]);
        left.collect::<Vec<_>>().into_iter().try_for_each(|direction| self.roll_back(direction))
    }

    /// Changes the scales and rows of one of its arenas, after [`check`](Self::check).
    pub(crate) fn update(&mut self, direction: Direction) -> Result<()> {
        let rule = self.rules.get(direction.any_role());
        let Some(arenas) = &mut self.arenas else { return Ok(()) };
        let arena = arenas[direction].own_mut();
        match (update_rule(&*self.policy, rule), self.planned[direction].take()) {
            (Update::Window(update), _) => ops::update_scales(arena, &update)?,
            (Update::OnHost(_), Some(plan)) => plan.apply(arena, rule)?,
            (Update::OnHost(_), None) => {}
        }
        Ok(())
    }

    /// Returns the state of one of its arenas: `None` under a recipe without state, or before its first scope.
    pub(crate) fn arena_state(&self, direction: Direction, names: &[Arc<str>]) -> Result<Option<ArenaState>> {
        let (Some(_), Some(arenas)) = (self.policy.state(), &self.arenas) else { return Ok(None) };
        let arena = arenas[direction].own();
        let (history, slots) = (arena.history()?, arena.slots());
        let row = |row: usize| history[row * slots..(row + 1) * slots].to_vec();
        let scales = arena.scales()?.into_iter();
        let mut sorted = names[self.used[direction].clone()].to_vec();
        let state = ArenaState {
            recipe: self.policy.state_key(),
            group: self.group_id().map(str::to_owned),
            direction,
            updates: arena.updates(),
            slots: sorted.clone(),
            scale: scales.map(|scale| if scale < 0.0 { UNSET } else { scale }).collect(),
            amax_history: (0..arena.options().history_len - 1).map(row).collect(),
            last_updates: arena.last_updates()?,
            undetermined: undetermined(arena, &sorted)?,
            weights: Vec::new(),
            awaits_backward: false,
        };
        sorted.sort();
        Ok(Some(state.with_slots(&sorted)))
    }

    /// Returns what the ranks of its group compare before they reduce an arena for the first time.
    pub(crate) fn digests(&self, direction: Direction, names: &[Arc<str>]) -> Result<Vec<StateDigest>> {
        Ok(self.arena_state(direction, names)?.map(|arena| arena.digests("")).unwrap_or_default())
    }
}

/// Returns the slots that have scale 1 by the first-step rule, sorted. Where first scales are −1, the scale says so itself.
fn undetermined(arena: &Arena, names: &[Arc<str>]) -> Result<Vec<Arc<str>>> {
    if arena.options().first_scale < 0.0 {
        return Ok(Vec::new());
    }
    let cast_scales = arena.cast_scales()?;
    let undetermined = names.iter().zip(cast_scales).filter(|(_, scale)| *scale < 0.0);
    let mut undetermined: Vec<_> = undetermined.map(|(name, _)| name.clone()).collect();
    undetermined.sort();
    Ok(undetermined)
}

fn update_rule<'a>(policy: &'a dyn Policy, rule: &'a ScaleRule) -> Update<'a> {
    let for_reports = ScaleUpdate { amax: AmaxRule::MostRecent, rule, interval: 1, record_non_finite: false };
    policy.state().map_or(Update::Window(for_reports), |state| state.update(rule))
}
