//! The scaling state of one model: every slot registered by name, arenas by recipe and group, cached weights.

use crate::arenas::domain::Domain;
use crate::arenas::plan::Plan;
use crate::names::by_direction::ByDirection;
use crate::names::fp8_attention::Fp8Attention;
use crate::names::used_slots::UsedSlots;
use crate::recipes::assignment::Assignment;
use crate::recipes::policy::Policy;
use crate::reports::error_squares::Measured;
use crate::scopes::dropout::Randomness;
use crate::scopes::forward_outcome::Ending;
use crate::scopes::open_scope::{Awaiting, Scope};
use crate::scopes::overflow::Overflow;
use crate::scopes::scope_settings::{Mode, ScopeSettings};
use crate::state::pending_arena::PendingArena;
use crate::weights::weight_cache::WeightCache;
use crate::weights::weight_records::WeightRecords;
use crate::{
    AmaxGroup, AutocastOptions, Direction, Error, Format, Recipe, Result, SlotName, SlotRole, Slots,
    StateReport, WeightState,
};
use fp8_kernels::{Cell, Device, Scale, Slot, UNSET, UpdateClock};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fmt::Display;
use std::sync::Arc;

/// The scales and amax histories of one model. Scopes borrow it: [`autocast`](Self::autocast),
/// [`backward`](Self::backward), [`eval`](Self::eval).
///
/// A `Scaling` refuses the layers of other models, even at the same paths. Setting new parameter values (`Parameter::set`,
/// loading a checkpoint) does not make another model. A model may have several `Scaling`s with separate states. To evaluate
/// a second model, such as an average of the weights, with the scales of the first, give it a `Scaling` of its own and load
/// the first one's state:
///
/// ```
/// # use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// # use fp8_recipe::{DelayedScaling, GemmSlots, Recipe, Scaling};
/// # let (device, recipe) = (Device::cpu(), Recipe::from(DelayedScaling::default()));
/// let (trained, average) = (GemmSlots::new("fc"), GemmSlots::new("fc"));
/// let mut scaling = Scaling::new(&trained, &device)?;
/// # let x = Tensor::from_vec(vec![3.5f32], [1, 1], &device)?;
/// let mut cx = scaling.autocast(&recipe)?;
/// ops::quantize(&x, &cx.slot(&trained.input)?)?;
/// assert!(cx.slot(&average.input).is_err());
/// cx.commit()?;
/// let mut of_average = Scaling::new(&average, &device)?;
/// of_average.load_state(&scaling.state()?)?;
/// assert!(of_average.eval(&recipe)?.slot(&average.input).is_ok());
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
pub struct Scaling {
    pub(crate) device: Device,
    /// Identifies this `Scaling` inside a `Saved`.
    pub(crate) identity: Arc<()>,
    /// The slots' names, sorted by the recipes that use them and then by name.
    pub(crate) names: ByDirection<Vec<Arc<str>>>,
    pub(crate) roles: ByDirection<Vec<SlotRole>>,
    pub(crate) slots: ByDirection<Vec<SlotName>>,
    used: ByDirection<UsedSlots>,
    /// All arenas with state share these clocks, which show which arena updated a slot last.
    pub(crate) clocks: ByDirection<UpdateClock>,
    pub(crate) indices: HashMap<Arc<str>, usize>,
    group: Option<Arc<dyn AmaxGroup>>,
    pub(crate) domains: Vec<Domain>,
    pub(crate) plans: Vec<Plan>,
    pub(crate) weights: WeightCache,
    /// Loaded records whose weights are not known yet.
    pub(crate) unbound: Vec<(usize, WeightState)>,
    /// The number of forward and backward scopes so far.
    pub(crate) scopes: u64,
    pub(crate) scope: Option<Scope>,
    pub(crate) awaiting: Awaiting,
    pub(crate) randomness: Randomness,
    /// Loaded state that no recipe has continued yet.
    pub(crate) pending: Vec<PendingArena>,
    /// Reports from which state the present arenas started.
    pub(crate) report: StateReport,
    /// Scale cells of slots without an arena: unset, so that a tensor uses its own scale, or 1 under Transformer Engine's
    /// first-step rule.
    unset: Cell,
    one: Cell,
    /// Made by the first scope that is asked whether gradients overflowed.
    pub(crate) overflow: Option<Overflow>,
    counting: bool,
    /// The number of times that the counters have been reset.
    pub(crate) counter_resets: u64,
    pub(crate) measuring_sqnr: bool,
    /// The signal-to-quantization-noise ratios, in decibels, of the last committed scope that measured the slot.
    pub(crate) sqnr: BTreeMap<Measured, f64>,
}

/// Writes one line: the number of slots, the recipes that have been used, and the device.
impl fmt::Debug for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipes: Vec<String> = self.domains.iter().map(|domain| domain.label().to_string()).collect();
        let slots: usize = Direction::ALL.iter().map(|&direction| self.slot_names(direction).len()).sum();
        write!(f, "Scaling({slots} slots, [{}], {})", recipes.join("; "), self.device)
    }
}

impl Scaling {
    /// Registers every slot of `model`, sorted by name.
    ///
    /// # Errors
    /// A slot's name that occurs twice; a device that is out of memory or failed.
    pub fn new(model: &(impl Slots + ?Sized), device: &Device) -> Result<Self> {
        let mut slots = ByDirection::<Vec<SlotName>>::default();
        model.slots(&mut |slot| slots[slot.direction()].push(slot.clone()));
        let mut indices = HashMap::new();
        for (_, slots) in slots.each_mut() {
            slots.sort_by(|a, b| (a.used_by(), a.name()).cmp(&(b.used_by(), b.name())));
            for (index, slot) in slots.iter().enumerate() {
                if indices.insert(slot.name().clone(), index).is_some() {
                    return Err(Error::DuplicateSlot(slot.name().clone()));
                }
            }
        }
        Ok(Self {
            device: device.clone(),
            identity: Arc::new(()),
            names: slots.each_ref().map(|slots| slots.iter().map(|slot| slot.name().clone()).collect()),
            roles: slots.each_ref().map(|slots| slots.iter().map(SlotName::role).collect()),
            clocks: ByDirection::try_from_fn(|direction| UpdateClock::new(slots[direction].len(), device))?,
            used: slots.each_ref().map(|slots| UsedSlots::new(slots)),
            slots,
            indices,
            group: None,
            domains: Vec::new(),
            plans: Vec::new(),
            weights: WeightCache::default(),
            unbound: Vec::new(),
            scopes: 0,
            scope: None,
            awaiting: Awaiting::default(),
            randomness: Randomness::default(),
            pending: Vec::new(),
            report: StateReport::default(),
            unset: Cell::new(UNSET, device)?,
            one: Cell::new(1.0, device)?,
            overflow: None,
            counting: false,
            counter_resets: 0,
            measuring_sqnr: false,
            sqnr: BTreeMap::new(),
        })
    }

    /// Sets the group of all scopes whose options name none. With it, training code is the same for one rank and many.
    pub fn set_group(&mut self, group: Arc<dyn AmaxGroup>) {
        self.group = Some(group);
    }

    /// Sets whether scopes count saturated and underflowed values per slot, and, under recipes without state, keep amaxes
    /// and scales for [`slot_reports`](Self::slot_reports). Counting examines each value once more. Default: off.
    pub fn set_counting(&mut self, counting: bool) {
        self.counting = counting;
    }

    /// Returns the names of a pass's slots, sorted. Slots that only some recipes use are not among them: those of an attention
    /// that leaves to the recipe whether it runs in FP8.
    pub fn slot_names(&self, direction: Direction) -> &[Arc<str>] {
        &self.names[direction][self.used[direction].of(Fp8Attention::Off)]
    }

    /// Returns the slot of this name.
    pub(crate) fn slot_at(&self, name: &str) -> Option<&SlotName> {
        let index = *self.indices.get(name)?;
        let slots = self.slots.each_ref().into_iter();
        slots.filter_map(|(_, slots)| slots.get(index)).find(|slot| &**slot.name() == name)
    }

    /// Returns the number of cached FP8 copies of weights, which microbatches and evaluations with the same weights reuse.
    ///
    /// Only the newest version of a weight is cached: one copy for each recipe that the last committed forward scope used it
    /// with, and at least for the two recipes that were used last. Evaluations keep at most two more. A copy that is not cached
    /// is made again with the same codes.
    pub fn cached_weights(&self) -> usize {
        self.weights.len()
    }

    /// Creates the arenas of a recipe now, as its first scope with these options would.
    ///
    /// Call it before [`load_state`](Self::load_state), so that the report covers each slot under this recipe, and before
    /// [`Device::capture`], during which arenas cannot be created. Options that are neither enabled nor calibrating create
    /// none.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
    /// use fp8_recipe::{AutocastOptions, DelayedScaling, GemmSlots, Scaling};
    /// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
    /// let mut trained = Scaling::new(&fc, &device)?;
    /// let mut cx = trained.autocast(&DelayedScaling::default().into())?;
    /// ops::quantize(&Tensor::from_vec(vec![3.5f32], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
    /// cx.commit()?;
    ///
    /// let mut resumed = Scaling::new(&fc, &device)?;
    /// let recipe = DelayedScaling { margin: 1, ..Default::default() }.into();
    /// resumed.prepare(&recipe, &AutocastOptions::default())?;
    /// let report = resumed.load_state(&trained.state()?)?;
    /// assert_eq!((report.taken_over.len(), report.recomputed.len(), report.new.len()), (0, 1, 2));
    /// assert!(report.to_string().contains("1 slot recomputed (margin=0 → margin=1)"), "{report}");
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern that matches no slot; a user's scale policy that returns no
    /// usable scale for the amaxes of earlier recipes; a step is being recorded; the device failed.
    pub fn prepare(&mut self, recipe: &Recipe, options: &AutocastOptions) -> Result<()> {
        self.settle()?;
        self.plan_for(recipe, options, options.enabled || options.calibrating).map(drop)
    }

    /// Returns the index of the plan of a recipe and group. The first scope that records creates the arenas of its domains; if
    /// loaded state waits for them, the first scope of any kind does.
    pub(crate) fn plan_for(
        &mut self,
        recipe: &Recipe,
        options: &AutocastOptions,
        records: bool,
    ) -> Result<usize> {
        recipe.validate()?;
        let group = options.amax_reduction_group.clone().or_else(|| self.group.clone());
        let key = within(recipe.key(), group.as_ref());
        let index = match self.plans.iter().position(|plan| plan.key == key) {
            Some(index) => index,
            None => {
                let assignment = Assignment::new(&recipe.choice(), &self.slots)?;
                let (domains, used) = (&mut self.domains, &self.used);
                let domain = |policy: &Arc<dyn Policy>| find_or_add(domains, policy, group.as_ref(), used);
                self.plans.push(Plan::new(key, assignment, domain));
                self.plans.len() - 1
            }
        };
        self.plans[index].set_group(group.clone());
        for position in 0..self.plans[index].domains.len() {
            let domain = self.plans[index].domains[position];
            self.domains[domain].set_group(group.clone());
            self.use_domain(domain, records)?;
        }
        Ok(index)
    }

    /// Creates the arenas of a domain if the scope needs them.
    fn use_domain(&mut self, index: usize, records: bool) -> Result<()> {
        let domain = &self.domains[index];
        if let Some(name) = domain.host_code().filter(|_| records) {
            let remedy = "its scales are computed on the host: run the step without a graph";
            self.device.expect_eager(&format!("recipe {name:?}"), remedy)?;
        }
        if domain.arenas.is_none() {
            let wanted = records && (domain.policy.state().is_some() || self.counting);
            if wanted || self.has_own_state(index) {
                self.start(index, records)?;
            }
        }
        if records { self.follow(index) } else { Ok(()) }
    }

    /// Returns the index of a slot, which must belong to the pass of `scope`.
    pub(crate) fn index(&self, slot: &SlotName, scope: Direction) -> Result<usize> {
        let index = self.indices.get(slot.name()).ok_or_else(|| Error::UnknownSlot(slot.name().clone()))?;
        if slot.direction() == scope {
            let ours = self.slots[scope].get(*index).and_then(SlotName::owner);
            return match (ours, slot.owner()) {
                (Some(ours), Some(theirs)) if !Arc::ptr_eq(ours, theirs) => {
                    Err(Error::OtherLayer(slot.name().clone()))
                }
                _ => Ok(*index),
            };
        }
        Err(Error::Direction { slot: slot.name().clone(), slot_direction: slot.direction(), scope })
    }

    /// Returns a slot with the scale and amax cells that settings and mode call for.
    pub(crate) fn slot<'a>(
        &'a self,
        name: &SlotName,
        index: usize,
        settings: ScopeSettings,
        mode: &'a Mode,
    ) -> Result<Slot<'a>> {
        let direction = name.direction();
        let Some(of_slot) = self.plans[settings.plan].domain(direction, index) else {
            return Ok(Slot::off(Format::Hybrid.encoding(direction)));
        };
        let domain = &self.domains[of_slot];
        if !domain.quantizes(name, index) {
            return Ok(Slot::off(domain.encodings[direction]));
        }
        let (encoding, first) = (domain.encodings[direction], domain.rule(name.role()));
        let arena = domain.arenas.as_ref().map(|arenas| &arenas[direction]);
        let keep = matches!(mode, Mode::Record) && settings.records();
        let scale = match (domain.policy.state(), mode) {
            _ if !settings.enabled => Scale::Off,
            (None, _) => domain.policy.scale(name.role(), first),
            (Some(_), Mode::Replay { outcome, .. }) => {
                let scales = outcome.scales().and_then(|all| all.get(of_slot));
                let index = index.checked_sub(domain.used[direction].start);
                let cell = scales.zip(index).and_then(|(scales, index)| scales.get(index));
                let cell = cell.ok_or(Error::NoSnapshot)?;
                Scale::Cell { cell, first, keep }
            }
            (Some(state), _) => {
                let calibrates = state.arena_options().first_scale == UNSET;
                let untouched = if calibrates { &self.unset } else { &self.one };
                let cell = arena.and_then(|arena| arena.scale(index)).unwrap_or(untouched);
                Scale::Cell { cell, first, keep }
            }
        };
        let recorded = arena.filter(|_| keep);
        let watched = keep && direction == Direction::Backward && self.watches_overflow();
        let unrecorded = self.overflow.as_ref().filter(|_| watched).map(Overflow::amax);
        Ok(Slot {
            encoding,
            scale,
            amax: recorded.and_then(|arena| arena.staging(index)).or(unrecorded),
            counters: recorded.filter(|_| self.counting).and_then(|arena| arena.counters(index)),
            columnwise: name.role().columnwise() && !matches!(mode, Mode::Evaluate),
        })
    }

    /// Runs all reductions, then all updates. After an error, `roll_back` undoes the scope.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let updated = self.update();
        self.remember(updated)
    }

    /// Remembers an error in the open scope. If the scope is then dropped without commit, the other ranks get this error.
    pub(crate) fn remember<T, E: Display>(&mut self, result: Result<T, E>) -> Result<T, E> {
        if let (Err(error), Some(scope)) = (&result, &mut self.scope) {
            scope.cause = Some(error.to_string());
        }
        result
    }

    fn update(&mut self) -> Result<()> {
        let Some(scope) = &mut self.scope else { return Ok(()) };
        let direction = scope.direction;
        scope.touched.sort_by(|&a, &b| self.domains[a].key.cmp(&self.domains[b].key)); // equal on all ranks
        scope.plans.sort_by(|&a, &b| self.plans[a].key.cmp(&self.plans[b].key));
        for &index in &scope.plans {
            let slots = self.slots.each_ref().into_iter();
            let slots = slots.flat_map(|(direction, slots)| {
                slots.iter().enumerate().map(move |(index, slot)| (direction, index, slot))
            });
            self.plans[index].agree(&self.domains, slots)?;
        }
        let overflow = self.overflow.as_ref().filter(|_| !scope.overflow.is_empty());
        if let Some(overflow) = overflow {
            let arenas = scope.touched.iter().filter_map(|&index| self.domains[index].arenas.as_ref());
            overflow.check_amaxes(arenas.map(|arenas| arenas[direction].own()))?;
        }
        let mut reduced: Vec<String> = Vec::new();
        for &index in &scope.touched {
            let (domain, names) = (&mut self.domains[index], &self.names[direction]);
            let group = domain.reducing_group().map(|group| group.id().to_owned());
            match (overflow, group.filter(|id| !reduced.contains(id))) {
                (Some(overflow), Some(id)) => {
                    overflow.reduce_with(domain, direction, names)?;
                    reduced.push(id);
                }
                _ => domain.reduce(direction, names)?,
            }
        }
        if let Some(overflow) = overflow {
            let domains = scope.touched.iter().filter_map(|&index| self.domains[index].group());
            let groups = domains.chain(&self.group).filter(|group| group.world_size() > 1);
            for group in
                distinct(groups).into_iter().filter(|group| !reduced.iter().any(|id| id == group.id()))
            {
                overflow.reduce(&**group)?;
            }
        }
        for &index in &scope.touched {
            self.domains[index].check(direction, &self.names[direction], &self.roles[direction])?;
        }
        let scales = scope.snapshots.then(|| {
            let capture = self.device.capture_number();
            let in_use = |index| self.weights.scales_in_use(index, capture);
            let scales = |(index, domain)| forward_scales(domain, in_use(index));
            self.domains.iter().enumerate().map(scales).collect()
        });
        let scales: Option<Vec<_>> = scales.transpose()?;
        let records = WeightRecords::before_update(&self.domains, &scope.cached)?;
        for &index in &scope.touched {
            self.domains[index].update(direction)?;
        }
        match records.after_update(&self.domains, &scope.cached) {
            Ok(records) => records.into_iter().for_each(|(added, record)| self.weights.record(added, record)),
            // The scales have been updated. Weights without a record are quantized and recorded again.
            Err(_) => self.weights.undo(std::mem::take(&mut scope.cached)),
        }
        if let Some(overflow) = &self.overflow {
            overflow.finish(&scope.overflow)?;
        }
        let Some(Scope { direction, touched, outcome, weight_uses, squares, lone, .. }) = self.scope.take()
        else {
            return Ok(());
        };
        self.keep_sqnr(squares);
        match direction {
            Direction::Forward => {
                if self.awaiting.forward_committed(&touched, lone) {
                    self.pending.iter_mut().for_each(|saved| saved.arena.awaits_backward = false);
                }
                outcome.end(Ending::Committed { touched, scales });
                self.weights.trim(weight_uses);
            }
            Direction::Backward => {
                self.awaiting.backward_committed();
                // Recipes that have not been used since their state was loaded have arenas, too, in which no slot has run.
                let awaiting = self.pending.iter_mut().filter(|saved| saved.arena.awaits_backward);
                awaiting.for_each(|saved| saved.arena.updates += 1);
            }
        }
        Ok(())
    }

    /// Returns whether the open scope collects if gradients overflow.
    fn watches_overflow(&self) -> bool {
        self.scope.as_ref().is_some_and(|scope| !scope.overflow.is_empty())
    }

    /// Returns the cell of the open scope's flag, whose reduced value the commit max-combines into `result`.
    pub(crate) fn overflow_flag(&mut self, result: &Cell) -> Result<&Cell> {
        if !self.device.is_same(result.device()) {
            let (op, lhs, rhs) = ("overflow", self.device.to_string(), result.device().to_string());
            return Err(fp8_kernels::Error::Devices { op, lhs, rhs }.into());
        }
        let overflow = match &mut self.overflow {
            Some(overflow) => overflow,
            none => none.insert(Overflow::new(&self.device)?),
        };
        if let Some(scope) = &mut self.scope {
            scope.overflow.push(result.clone());
        }
        Ok(overflow.flag())
    }

    /// Undoes what the open scope has changed: staging cells, provisional scales and cached weights.
    pub(crate) fn roll_back(&mut self, ending: Ending) -> Option<Scope> {
        let mut scope = self.scope.take()?;
        scope.outcome.end(ending);
        for domain in &mut self.domains {
            // A dropped guard cannot return an error. The next scope tries again and returns it.
            let _ = domain.roll_back(scope.direction);
        }
        if let Some(overflow) = self.overflow.as_mut().filter(|_| !scope.overflow.is_empty()) {
            let _ = overflow.roll_back();
        }
        self.weights.undo(std::mem::take(&mut scope.cached));
        Some(scope)
    }

    /// Closes the open scope on all ranks together. The groups remain usable.
    pub(crate) fn discard(&mut self) -> Result<()> {
        if let Some(scope) = &self.scope {
            let key = format!("discard {}", scope.direction);
            let groups = distinct(self.domains.iter().filter_map(Domain::reducing_group));
            let agreed = groups.iter().try_for_each(|group| group.agree_on_names(&key, &[]));
            self.remember(agreed)?;
        }
        self.roll_back(Ending::Discarded);
        self.restore()
    }

    /// Repeats an earlier roll-back that failed with the device.
    fn restore(&mut self) -> Result<()> {
        self.overflow.as_mut().map_or(Ok(()), Overflow::restore)?;
        self.domains.iter_mut().try_for_each(Domain::restore)
    }

    /// Ends an open scope and undoes what is left of earlier ones. Every scope begins with it.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.abandon(); // the scope of a guard that was forgotten by `mem::forget`
        self.restore()
    }

    /// Tells the other ranks that a guard was dropped (by `?` or a panic), so that they do not wait for this rank. Does
    /// nothing after a commit, and for a forward scope that records nothing, for which no rank waits.
    pub(crate) fn abandon(&mut self) {
        let Some(scope) = self.roll_back(Ending::Left) else { return };
        if scope.direction == Direction::Forward && scope.touched.is_empty() {
            return;
        }
        let reason = scope.reason();
        tracing::warn!(direction = %scope.direction, reason, "a scope was dropped without commit; scales are unchanged");
        let groups = self.domains.iter().filter_map(Domain::group).filter(|group| group.world_size() > 1);
        distinct(groups).iter().for_each(|group| group.poison(&reason));
    }
}

/// Returns the key of a recipe within a group.
fn within(key: String, group: Option<&Arc<dyn AmaxGroup>>) -> String {
    match group {
        Some(group) => format!("{key} group={}", group.id()),
        None => key,
    }
}

/// Returns the index of the domain of a policy and group.
fn find_or_add(
    domains: &mut Vec<Domain>,
    policy: &Arc<dyn Policy>,
    group: Option<&Arc<dyn AmaxGroup>>,
    used: &ByDirection<UsedSlots>,
) -> usize {
    let key = within(policy.key(), group);
    domains.iter().position(|domain| domain.key == key).unwrap_or_else(|| {
        let used = used.each_ref().map(|used| used.of(policy.fp8_attention()));
        domains.push(Domain::new(key, policy, used));
        domains.len() - 1
    })
}

/// Returns copies of the scales that a forward scope has quantized with: those of its slots, and of weights that were recorded
/// before, by slot.
fn forward_scales<'a>(
    domain: &Domain,
    recorded: impl Iterator<Item = (usize, &'a Cell)>,
) -> Result<Vec<Cell>> {
    let Some(arenas) = &domain.arenas else { return Ok(Vec::new()) };
    let mut scales = arenas.forward.own().copy_scales()?;
    for (slot, cell) in recorded {
        if let Some(scale) = arenas.forward.index(slot).and_then(|index| scales.get_mut(index)) {
            *scale = cell.clone();
        }
    }
    Ok(scales)
}

/// Returns each group once, sorted by id, so that the order is the same on all ranks.
fn distinct<'a>(groups: impl Iterator<Item = &'a Arc<dyn AmaxGroup>>) -> Vec<&'a Arc<dyn AmaxGroup>> {
    let mut groups: Vec<_> = groups.collect();
    groups.sort_by(|a, b| a.id().cmp(b.id()));
    groups.dedup_by(|a, b| a.id() == b.id());
    groups
}
