//! The scaling state of one model: every slot registered by name, arenas by recipe and group, cached weights.
//!
//! Each part of a [`Scaling`] has a type of its own. The files of this folder are the operations that need several parts.

mod commit;
mod measuring;
mod opening;
mod save_load;
mod starting;

use crate::arenas::domains::Domains;
use crate::arenas::untouched_scales::UntouchedScales;
use crate::names::by_direction::ByDirection;
use crate::names::model_slots::ModelSlots;
use crate::reports::measurements::{Counting, SqnrRatios};
use crate::scopes::dropout::Randomness;
use crate::scopes::open_scope::Scope;
use crate::scopes::overflow::Overflow;
use crate::scopes::scope_settings::{Mode, ScopeSettings};
use crate::scopes::scopes_so_far::Scopes;
use crate::state::inherited::Inherited;
use crate::weights::weight_cache::WeightCache;
use crate::{
    AmaxGroup, AutocastOptions, Direction, Error, Format, Fp8Gemms, Recipe, Result, SlotName, Slots,
};
use fp8_kernels::{Device, DropoutDraw, Nvfp4Rule, Scale, Slot, StochasticRounding, UpdateClock};
use std::fmt;
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
    device: Device,
    slots: ModelSlots,
    /// All arenas with state share these clocks, which show which arena updated a slot last.
    clocks: ByDirection<UpdateClock>,
    domains: Domains,
    weights: WeightCache,
    scopes: Scopes,
    inherited: Inherited,
    randomness: Randomness,
    untouched: UntouchedScales,
    /// Made by the first scope that is asked whether gradients overflowed.
    overflow: Option<Overflow>,
    counting: Counting,
    sqnr: SqnrRatios,
}

/// Writes one line: the number of slots, the recipes that have been used, and the device.
impl fmt::Debug for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipes: Vec<String> = self.domains.iter().map(|domain| domain.label().to_string()).collect();
        let slots: usize = Direction::ALL.iter().map(|&direction| self.slot_names(direction).len()).sum();
        write!(f, "Scaling({slots} slots, [{}], {})", recipes.join("; "), self.device)
    }
}

/// The elements of a mask of dropout, four to a counter, that have as many counters as a replica has for the blocks of a tensor: 2³².
const ELEMENTS_OF_A_REPLICA: u64 = 4 << 32;

impl Scaling {
    /// Registers every slot of `model`, sorted by name.
    ///
    /// # Errors
    /// A slot's name that occurs twice; a device that is out of memory or failed.
    pub fn new(model: &(impl Slots + ?Sized), device: &Device) -> Result<Self> {
        let slots = ModelSlots::new(model)?;
        Ok(Self {
            device: device.clone(),
            clocks: ByDirection::try_from_fn(|direction| {
                UpdateClock::new(slots.names(direction).len(), device)
            })?,
            slots,
            domains: Domains::default(),
            weights: WeightCache::default(),
            scopes: Scopes::default(),
            inherited: Inherited::default(),
            randomness: Randomness::default(),
            untouched: UntouchedScales::new(device)?,
            overflow: None,
            counting: Counting::default(),
            sqnr: SqnrRatios::default(),
        })
    }

    /// Sets the group of all scopes whose options name none. With it, training code is the same for one rank and many.
    pub fn set_group(&mut self, group: Arc<dyn AmaxGroup>) {
        self.domains.set_default_group(group);
    }

    /// Sets whether scopes count saturated and underflowed values per slot, and, under recipes without state, keep amaxes
    /// and scales for [`slot_reports`](Self::slot_reports). Counting examines each value once more. Default: off.
    pub fn set_counting(&mut self, counting: bool) {
        self.counting.set(counting);
    }

    /// Returns the names of a pass's slots, sorted. Slots that only some recipes use are not among them: those of an attention
    /// that leaves to the recipe whether it runs in FP8.
    pub fn slot_names(&self, direction: Direction) -> &[Arc<str>] {
        self.slots.always_used(direction)
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
    fn plan_for(&mut self, recipe: &Recipe, options: &AutocastOptions, records: bool) -> Result<usize> {
        recipe.validate()?;
        let group = options.amax_reduction_group.as_ref();
        let index = self.domains.find_or_add_plan(recipe, group, &self.slots)?;
        for position in 0..self.domains.plan(index).domains.len() {
            self.use_domain(self.domains.plan(index).domains[position], records)?;
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
            let wanted = records && (domain.policy.state().is_some() || self.counting.is_on());
            if wanted || self.has_own_state(index) {
                self.start(index, records)?;
            }
        }
        if records { self.follow(index) } else { Ok(()) }
    }

    /// Returns which GEMMs of the layer at this path run in FP8.
    pub(crate) fn fp8_gemms(&self, settings: ScopeSettings, layer: &str) -> Fp8Gemms {
        if settings.enabled { self.domains.plan(settings.plan).gemms(layer) } else { Fp8Gemms::NONE }
    }

    /// Returns whether the backward pass reads the transpose of a slot's codes.
    fn is_read_transposed(&self, name: &SlotName, settings: ScopeSettings) -> bool {
        // Attention has products of its own, which `override_linear_precision` does not change.
        let gemms =
            if name.is_of_attention() { Fp8Gemms::ALL } else { self.fp8_gemms(settings, name.layer()) };
        gemms.read_transpose(name.role())
    }

    /// Returns a slot with the scale and amax cells that settings and mode call for.
    pub(crate) fn lend<'a>(
        &'a self,
        name: &SlotName,
        index: usize,
        settings: ScopeSettings,
        mode: &'a Mode,
    ) -> Result<Slot<'a>> {
        let direction = name.direction();
        let Some(of_slot) = self.domains.plan(settings.plan).domain(direction, index) else {
            return Ok(Slot::off(Format::Hybrid.encoding(direction)));
        };
        let domain = &self.domains[of_slot];
        if !domain.quantizes(name, index) {
            return Ok(Slot::off(domain.encodings[direction]));
        }
        let (encoding, first) = (domain.encodings[direction], domain.rule(name.role()));
        let arena = domain.arenas.as_ref().map(|arenas| &arenas[direction]);
        let records = matches!(mode, Mode::Record) && settings.records();
        let scale = match (domain.policy.state(), mode) {
            _ if !settings.enabled => Scale::Off,
            (None, _) => match domain.policy.scale(name.role(), first) {
                // What was drawn is for this slot: others, as those of a replay, are rounded to nearest.
                Scale::Nvfp4(rule) if domain.policy.rounds_stochastically(name.role()) => {
                    Scale::Nvfp4(Nvfp4Rule { random: self.rounding(), ..rule })
                }
                scale => scale,
            },
            (Some(_), Mode::Replay { outcome, .. }) => {
                let scales = outcome.scales().and_then(|all| all.get(of_slot));
                let index = index.checked_sub(domain.used[direction].start);
                let cell = scales.zip(index).and_then(|(scales, index)| scales.get(index));
                let cell = cell.ok_or(Error::NoSnapshot)?;
                Scale::Cell { cell, first, keep: records }
            }
            (Some(state), _) => {
                let cell = arena.and_then(|arena| arena.scale(index)).unwrap_or(self.untouched.of(state));
                Scale::Cell { cell, first, keep: records }
            }
        };
        let recorded = arena.filter(|_| records);
        let watched = records
            && direction == Direction::Backward
            && self.scopes.current().is_some_and(Scope::watches_overflow);
        let unrecorded = self.overflow.as_ref().filter(|_| watched).map(Overflow::amax);
        Ok(Slot {
            encoding,
            scale,
            amax: recorded.and_then(|arena| arena.staging(index)).or(unrecorded),
            counters: recorded.filter(|_| self.counting.is_on()).and_then(|arena| arena.counters(index)),
            columnwise: !matches!(mode, Mode::Evaluate) && self.is_read_transposed(name, settings),
        })
    }

    /// Draws the random numbers with which a slot's tensor is rounded, if its recipe rounds it stochastically. [`lend`](Self::lend) then
    /// lends them.
    pub(crate) fn draw_rounding(
        &mut self,
        name: &SlotName,
        index: usize,
        settings: ScopeSettings,
    ) -> Result<()> {
        let domain = self.domains.plan(settings.plan).domain(name.direction(), index);
        let rounds = |of_slot| self.domains[of_slot].policy.rounds_stochastically(name.role());
        let draws = settings.enabled && domain.is_some_and(rounds);
        // Each copy of the tensor takes a mask of its own, of which each replica has a part.
        let draw = if draws { self.draw_masks(2)? } else { None };
        let replica =
            self.scopes.current().and_then(|scope| scope.replica).unwrap_or(self.randomness.replica);
        let part = (replica as u64).wrapping_mul(ELEMENTS_OF_A_REPLICA);
        let draw = draw.map(|draw| draw.at(part)).transpose()?;
        if let Some(scope) = self.scopes.current_mut() {
            scope.rounding = draw;
        }
        Ok(())
    }

    /// Returns the random numbers that the slot about to be lent rounds with.
    fn rounding(&self) -> Option<StochasticRounding<'_>> {
        self.scopes.current()?.rounding.as_ref().map(StochasticRounding::new)
    }

    /// Returns the model's slots.
    pub(crate) const fn model_slots(&self) -> &ModelSlots {
        &self.slots
    }

    pub(crate) const fn domains(&self) -> &Domains {
        &self.domains
    }

    pub(crate) const fn scopes(&self) -> &Scopes {
        &self.scopes
    }

    pub(crate) const fn scopes_mut(&mut self) -> &mut Scopes {
        &mut self.scopes
    }

    pub(crate) const fn weights_mut(&mut self) -> &mut WeightCache {
        &mut self.weights
    }

    pub(crate) const fn randomness(&self) -> &Randomness {
        &self.randomness
    }

    pub(crate) const fn randomness_mut(&mut self) -> &mut Randomness {
        &mut self.randomness
    }

    /// Returns the next dropout mask of the open scope.
    pub(crate) fn draw_dropout(&mut self) -> Result<Option<DropoutDraw>> {
        self.draw_masks(1)
    }

    /// Returns the first of the next `count` masks of the open scope.
    fn draw_masks(&mut self, count: u64) -> Result<Option<DropoutDraw>> {
        let Some(scope) = self.scopes.current_mut() else { return Ok(None) };
        if scope.outcome.draw().is_none() {
            scope.outcome.set_draw(self.randomness.draw(&self.device)?);
        }
        let number = scope.draws;
        scope.draws += count;
        Ok(scope.outcome.draw().map(|draw| draw.mask(number)))
    }

    pub(crate) const fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) const fn counting(&self) -> &Counting {
        &self.counting
    }

    pub(crate) const fn counting_mut(&mut self) -> &mut Counting {
        &mut self.counting
    }

    pub(crate) const fn sqnr(&self) -> &SqnrRatios {
        &self.sqnr
    }
}
