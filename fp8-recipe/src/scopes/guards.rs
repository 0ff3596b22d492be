//! The guards that lend slots. Layers hold a guard by `&mut` and `commit` takes `self`, so layers cannot commit. The guards
//! implement `Drop`, so opening a second scope before the first is committed does not compile.

use crate::scopes::forward_outcome::{Ending, ForwardOutcome};
use crate::scopes::open_scope::Scope;
use crate::scopes::scope_settings::{Mode, ScopeSettings};
use crate::{
    AutocastOptions, DelayedWgrad, Direction, Error, Fp8Gemms, GemmAccumulation, Origin, Recipe, Result,
    Scaling, SlotName, Snapshot,
};
use fp8_kernels::{Cell, DType, MemoryKind, MemoryKindGuard, Slot};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A forward scope, or one nested in it. It lends slots and cached weights to layers, and updates the scales when it is
/// committed.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
/// let x8 = ops::quantize(&Tensor::from_vec(vec![3.5f32], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// assert!(x8.is_fp8());
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
///
/// A layer borrows the scope and cannot commit it:
///
/// ```compile_fail,E0507
/// # use fp8_recipe::{Forward, Result};
/// fn layer(cx: &mut Forward<'_>) -> Result<()> {
///     cx.commit()
/// }
/// ```
///
/// A second scope cannot be opened before the first is committed:
///
/// ```compile_fail,E0499
/// # use fp8_recipe::{Recipe, Result, Scaling};
/// fn step(scaling: &mut Scaling, recipe: &Recipe) -> Result<()> {
///     let _forward = scaling.autocast(recipe)?;
///     scaling.backward()?.commit()
/// }
/// ```
///
/// ```
/// # use fp8_recipe::{Recipe, Result, Scaling};
/// fn step(scaling: &mut Scaling, recipe: &Recipe) -> Result<()> {
///     let forward = scaling.autocast(recipe)?;
///     forward.commit()?;
///     scaling.backward()?.commit()
/// }
/// ```
#[derive(Debug)]
#[must_use = "a scope updates nothing unless it is committed"]
pub struct Forward<'a> {
    pub(crate) scaling: &'a mut Scaling,
    pub(crate) settings: ScopeSettings,
    pub(crate) mode: Mode,
    /// For the outermost scope of a training step: what its layers allocate is for backward.
    outermost: Option<MemoryKindGuard>,
}

/// A backward scope. It lends the slots of gradients, and updates their scales when it is committed.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let cx = scaling.autocast(&DelayedScaling::default().into())?;
/// let origin = cx.origin(&fc.input);
/// cx.commit()?;
///
/// let mut cx = scaling.backward()?;
/// let dy = Tensor::from_vec(vec![0.5f32], [1, 1], &device)?;
/// let dy8 = ops::quantize(&dy, &cx.slot(&origin, &fc.grad_output)?)?; // E5M2
/// cx.commit()?;
/// assert!(dy8.is_fp8());
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "a scope updates nothing unless it is committed"]
pub struct Backward<'a> {
    pub(crate) scaling: &'a mut Scaling,
    /// Weight gradients that are left for later; `None` if they are not delayed.
    pub(crate) wgrads: Option<Vec<DelayedWgrad>>,
}

impl Scaling {
    /// Opens a forward scope under `recipe`, with the default options.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn autocast(&mut self, recipe: &Recipe) -> Result<Forward<'_>> {
        self.scope(recipe, &AutocastOptions::default())
    }

    /// Opens a forward scope under `recipe`.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn scope(&mut self, recipe: &Recipe, options: &AutocastOptions) -> Result<Forward<'_>> {
        self.open(Direction::Forward)?;
        match self.settings(recipe, options, true) {
            Ok(settings) => Ok(Forward {
                scaling: self,
                settings,
                mode: Mode::Record,
                outermost: Some(MemoryKind::Saved.enter()),
            }),
            Err(error) => {
                self.roll_back(Ending::Left);
                Err(error)
            }
        }
    }

    /// Opens a forward scope for evaluation. It records no amax, so there is nothing to commit, and backward refuses its
    /// `Saved`s.
    ///
    /// It quantizes with the recipe's scales. Under a delayed-scaling recipe that has not been trained with here, and in
    /// slots that are not calibrated, each tensor takes its own scale (1 under a recipe with `calibrate_first_step: false`, such
    /// as Transformer Engine's: see [`Recipe::starts_at_one`]).
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn eval(&mut self, recipe: &Recipe) -> Result<Forward<'_>> {
        self.eval_with_options(recipe, &AutocastOptions::default())
    }

    /// Opens a scope for evaluation with options: see [`eval`](Self::eval).
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn eval_with_options(&mut self, recipe: &Recipe, options: &AutocastOptions) -> Result<Forward<'_>> {
        self.settle()?;
        let settings = self.settings(recipe, options, false)?;
        Ok(Forward { scaling: self, settings, mode: Mode::Evaluate, outermost: None })
    }

    /// Opens a backward scope. It takes no recipe, because each `Saved` knows the recipe of its forward.
    ///
    /// Its commit updates the backward arenas of all recipes under which forward scopes were committed since the last
    /// backward scope was, whether or not a layer runs backward in it. A rank whose layers had nothing to do (an expert
    /// without tokens) therefore takes part in the reductions of the other ranks.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn backward(&mut self) -> Result<Backward<'_>> {
        self.open(Direction::Backward)?;
        Ok(Backward { scaling: self, wgrads: None })
    }

    fn open(&mut self, direction: Direction) -> Result<()> {
        self.settle()?;
        let touched = match direction {
            Direction::Forward => Vec::new(),
            Direction::Backward => self.awaiting.domains().to_vec(),
        };
        let lone = self.awaiting.lone().filter(|_| direction == Direction::Backward).cloned();
        self.scopes += 1;
        let scope = Scope::new(direction, touched, self.weights.uses(), self.scopes);
        self.scope = Some(Scope { lone, ..scope });
        Ok(())
    }

    fn settings(
        &mut self,
        recipe: &Recipe,
        options: &AutocastOptions,
        records: bool,
    ) -> Result<ScopeSettings> {
        let AutocastOptions { enabled, calibrating, compute_dtype, allow_scales_per_rank, .. } = *options;
        if let Some(dtype) = compute_dtype.filter(|dtype| !dtype.is_float()) {
            return Err(Error::Recipe {
                recipe: "autocast",
                option: "compute_dtype",
                value: dtype.to_string(),
                remedy: "expected f32, bf16 or f16",
            });
        }
        let plan = self.plan_for(recipe, options, records && (enabled || calibrating))?;
        let settings = ScopeSettings {
            plan,
            enabled,
            calibrating,
            compute_dtype,
            allows_scales_per_rank: allow_scales_per_rank,
        };
        if records && settings.records() {
            if let Some(scope) = &mut self.scope {
                scope.touch_plan(plan, &self.plans[plan].domains);
            }
            self.note_lone(settings);
        }
        Ok(settings)
    }

    fn touch(&mut self, domains: &[usize]) {
        if let Some(scope) = &mut self.scope {
            scope.touch(domains);
        }
    }
}

impl Forward<'_> {
    /// Uses another recipe until the returned guard is dropped. The group and the compute dtype stay. The guard is often a
    /// temporary: `self.head.forward(&mut cx.nested(&recipe)?, &x)?`. Every rank must open it, even one with no tokens.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn nested(&mut self, recipe: &Recipe) -> Result<Forward<'_>> {
        self.nested_scope(recipe, &AutocastOptions::default())
    }

    /// Nests a scope with options: see [`nested`](Self::nested). A group or dtype that is `None` is taken from the outer
    /// scope.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn nested_scope(&mut self, recipe: &Recipe, options: &AutocastOptions) -> Result<Forward<'_>> {
        let mut options = options.clone();
        let outer = self.scaling.plans[self.settings.plan].group();
        options.amax_reduction_group = options.amax_reduction_group.or_else(|| outer.cloned());
        options.compute_dtype = options.compute_dtype.or(self.settings.compute_dtype);
        options.allow_scales_per_rank |= self.settings.allows_scales_per_rank;
        let records = matches!(self.mode, Mode::Record);
        let settings = self.scaling.settings(recipe, &options, records)?;
        Ok(Forward { scaling: self.scaling, settings, mode: self.mode.clone(), outermost: None })
    }

    /// Sets the dtype of operations in high precision until the returned guard is dropped.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn with_compute_dtype(&mut self, dtype: DType) -> Result<Forward<'_>> {
        if !dtype.is_float() {
            return Err(Error::Recipe {
                recipe: "autocast",
                option: "compute_dtype",
                value: dtype.to_string(),
                remedy: "expected f32, bf16 or f16",
            });
        }
        let settings = ScopeSettings { compute_dtype: Some(dtype), ..self.settings };
        Ok(Forward { scaling: self.scaling, settings, mode: self.mode.clone(), outermost: None })
    }

    /// Runs in high precision until the returned guard is dropped: for layers that never run in FP8, such as a model's head.
    pub fn disabled(&mut self) -> Forward<'_> {
        let settings = ScopeSettings { enabled: false, calibrating: false, ..self.settings };
        Forward { scaling: self.scaling, settings, mode: self.mode.clone(), outermost: None }
    }

    /// Returns the dtype that layers cast inputs and parameters to in high precision, if the scope sets one.
    pub fn compute_dtype(&self) -> Option<DType> {
        self.settings.compute_dtype
    }

    /// Returns which GEMMs of a layer run in FP8 in this scope. `slot` is any slot of the layer.
    pub fn fp8_gemms(&self, slot: &SlotName) -> Fp8Gemms {
        self.scaling.fp8_gemms(self.settings, slot.layer())
    }

    /// Returns how the FP8 GEMMs of a layer accumulate in this scope. `slot` is any slot of the layer.
    pub fn accumulation(&self, slot: &SlotName) -> GemmAccumulation {
        self.scaling.plans[self.settings.plan].accumulation(slot.layer())
    }

    /// Returns a handle to the scales and dropout masks of this scope, for a layer that will run its forward again in backward.
    /// Take it before the layer runs: the replay draws the masks that the scope draws from here on.
    pub fn snapshot(&mut self) -> Snapshot {
        if let (Mode::Record, Some(scope)) = (&self.mode, &mut self.scaling.scope) {
            scope.snapshots = true;
        }
        let draws = match (&self.mode, &self.scaling.scope) {
            (Mode::Replay { draws, .. }, _) => draws.load(Relaxed),
            (Mode::Record, Some(scope)) => scope.draws,
            _ => 0,
        };
        let outcome = self.outcome().unwrap_or_default(); // of an evaluation: never filled, and so refused
        Snapshot { owner: self.scaling.identity.clone(), settings: self.settings, outcome, draws }
    }

    /// Lends a slot for one quantizing operation: `ops::quantize(x, &cx.slot(&self.slots.input)?)`.
    ///
    /// # Errors
    /// A slot that was not registered, one of another layer at the same path, or one of the backward pass.
    pub fn slot(&mut self, name: &SlotName) -> Result<Slot<'_>> {
        let index = self.scaling.index(name, Direction::Forward)?;
        self.scaling.slot(name, index, self.settings, &self.mode)
    }

    /// Returns the origin of a `Saved`. A layer stores it there, and its backward finds the recipe and arena of this scope by
    /// it.
    pub fn origin(&self, slot: &SlotName) -> Origin {
        let (owner, layer) = (self.scaling.identity.clone(), slot.layer().clone());
        Origin { owner, settings: self.settings, outcome: self.outcome(), layer }
    }

    fn outcome(&self) -> Option<Arc<ForwardOutcome>> {
        match &self.mode {
            Mode::Record => self.scaling.scope.as_ref().map(|scope| scope.outcome.clone()),
            Mode::Replay { outcome, .. } => Some(outcome.clone()),
            Mode::Evaluate => None,
        }
    }

    /// Runs a part of the forward pass and returns its result. With several ranks, an error is remembered. If the scope is
    /// then dropped without commit, the errors of the other ranks contain it. All layers of fp8-nn do this, so a layer of
    /// your own needs it only for errors that it detects itself.
    ///
    /// ```
    /// # use fp8_recipe::{Forward, Result};
    /// fn forward(cx: &mut Forward<'_>, tokens: &[u32]) -> Result<(), String> {
    ///     cx.attempt(|_| match tokens {
    ///         [] => Err("expected at least one token".to_owned()),
    ///         _ => Ok(()),
    ///     })
    /// }
    /// ```
    ///
    /// # Errors
    /// What `f` returns.
    pub fn attempt<T, E: Display>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let result = f(self);
        self.scaling.remember(result)
    }

    /// Reduces the amaxes and updates the scales of every recipe that the scope used. Nested scopes, replays and evaluations
    /// have nothing to commit.
    ///
    /// # Errors
    /// A group whose ranks disagree or failed; a user's function that returned no usable scale. Nothing has changed then.
    pub fn commit(self) -> Result<()> {
        if self.outermost.is_some() { self.scaling.commit() } else { Ok(()) }
    }

    /// Closes the scope without an update, on all ranks together, as for a skipped step. Dropping the guard instead makes the
    /// group unusable.
    ///
    /// # Errors
    /// A rank that left, failed or makes another call.
    pub fn discard(self) -> Result<()> {
        if self.outermost.is_some() { self.scaling.discard() } else { Ok(()) }
    }
}

impl Backward<'_> {
    /// Delays the weight gradients of this scope: layers compute the gradients of their inputs, biases and norms, and leave the
    /// products `dyᵀ · x` for later. A pipeline sends the gradient of the input to the previous stage first, and computes the
    /// weight gradients while it waits.
    ///
    /// [`take_wgrads`](Self::take_wgrads) returns them, in the order in which backward reached the layers. fp8-nn's `backward_dw`
    /// computes them, with the bits that the scope would have given them.
    pub fn delay_wgrad(&mut self) {
        self.wgrads.get_or_insert_default();
    }

    /// Returns the weight gradients that were delayed so far. A [`commit`](Self::commit) without it is refused if there are any.
    pub fn take_wgrads(&mut self) -> Vec<DelayedWgrad> {
        self.wgrads.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns where a layer leaves its weight gradient; `None` if it is to compute it at once.
    pub fn delayed_wgrads(&mut self) -> Option<&mut Vec<DelayedWgrad>> {
        self.wgrads.as_mut()
    }

    /// Lends the slot `name` under the recipe and group of `origin`.
    ///
    /// # Errors
    /// An origin of another layer, another `Scaling`, an evaluation, or a forward scope that was not committed; a slot that
    /// was not registered, or one of the forward pass.
    pub fn slot(&mut self, origin: &Origin, name: &SlotName) -> Result<Slot<'_>> {
        let refused = |found: String| Err(Error::Origin { layer: name.layer().to_string(), found });
        let touched = match origin.touched(&self.scaling.identity) {
            Ok(touched) => touched,
            Err(found) => return refused(found.to_owned()),
        };
        if origin.layer != *name.layer() {
            return refused(format!("layer `{}`", origin.layer));
        }
        let index = self.scaling.index(name, Direction::Backward)?;
        self.scaling.touch(touched);
        self.scaling.note_lone(origin.settings);
        if origin.settings.records() {
            let domains = &self.scaling.plans[origin.settings.plan].domains;
            if let Some(scope) = &mut self.scaling.scope {
                scope.touch(domains);
            }
        }
        self.scaling.slot(name, index, origin.settings, &Mode::Record)
    }

    /// Returns which GEMMs of `origin`'s layer run in FP8 under its recipe: none for an origin that [`slot`](Self::slot)
    /// refuses.
    pub fn fp8_gemms(&self, origin: &Origin) -> Fp8Gemms {
        match origin.touched(&self.scaling.identity) {
            Ok(_) => self.scaling.fp8_gemms(origin.settings, &origin.layer),
            Err(_) => Fp8Gemms::NONE,
        }
    }

    /// Returns how the FP8 GEMMs of `origin`'s layer accumulate under its recipe: as by default for an origin that
    /// [`slot`](Self::slot) refuses.
    pub fn accumulation(&self, origin: &Origin) -> GemmAccumulation {
        match origin.touched(&self.scaling.identity) {
            Ok(_) => self.scaling.plans[origin.settings.plan].accumulation(&origin.layer),
            Err(_) => GemmAccumulation::default(),
        }
    }

    /// Lends a `Forward` with the first run's recipe and scales, which records nothing.
    ///
    /// # Errors
    /// A snapshot of another `Scaling`, or of a scope that was never committed.
    pub fn replay(&mut self, snapshot: &Snapshot) -> Result<Forward<'_>> {
        if !Arc::ptr_eq(&snapshot.owner, &self.scaling.identity) {
            let found = "another Scaling".to_owned();
            return Err(Error::Origin { layer: "replay".to_owned(), found });
        }
        snapshot.outcome.scales().ok_or(Error::NoSnapshot)?;
        let draws = Arc::new(AtomicU64::new(snapshot.draws));
        let mode = Mode::Replay { outcome: snapshot.outcome.clone(), draws };
        Ok(Forward { scaling: self.scaling, settings: snapshot.settings, mode, outermost: None })
    }

    /// Lends the cell in which this scope collects whether gradients overflowed: kernels write 1 into it. The commit replaces
    /// it by its maximum over the ranks, in the same collective as the amaxes, and max-combines that into `result`.
    ///
    /// The commit also sets it if the amax of a gradient that was quantized after this call is infinite: quantizing saturates, so
    /// gradients computed from its codes are finite.
    ///
    /// All ranks of a group must ask for it in the same scopes. Ranks are those of the groups of the scope's recipes and of
    /// [`Scaling::set_group`]. A scope without amaxes to reduce reduces the cell alone.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Cell, Device, Tensor, ops};
    /// use fp8_recipe::{GemmSlots, Scaling};
    ///
    /// let device = Device::cpu();
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &device)?;
    /// let (result, norm) = (Cell::new(0.0, &device)?, Tensor::scalar(f32::INFINITY, &device)?);
    /// let mut cx = scaling.backward()?;
    /// ops::check_finite(&norm, cx.overflow(&result)?)?;
    /// assert_eq!(result.read()?, 0.0);
    /// cx.commit()?;
    /// assert_eq!(result.read()?, 1.0);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// A `result` on another device; a step is being recorded before the first scope that asked for the cell; the device is
    /// out of memory or failed.
    pub fn overflow(&mut self, result: &Cell) -> Result<&Cell> {
        self.scaling.overflow_flag(result)
    }

    /// Runs a part of the backward pass and returns its result: see [`Forward::attempt`].
    ///
    /// # Errors
    /// What `f` returns.
    pub fn attempt<T, E: Display>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let result = f(self);
        self.scaling.remember(result)
    }

    /// Reduces the amaxes and updates the scales of every recipe whose forward was committed since the last backward scope.
    ///
    /// # Errors
    /// As [`Forward::commit`]; weight gradients that were delayed and not taken.
    pub fn commit(self) -> Result<()> {
        let delayed = self.wgrads.as_ref().map_or(0, Vec::len);
        if delayed > 0 {
            return self.scaling.remember(Err(Error::DelayedWgrads { delayed }));
        }
        self.scaling.commit()
    }

    /// Closes the scope without an update, on all ranks together.
    ///
    /// # Errors
    /// As [`Forward::discard`].
    pub fn discard(self) -> Result<()> {
        self.scaling.discard()
    }
}

impl Scaling {
    fn fp8_gemms(&self, settings: ScopeSettings, layer: &str) -> Fp8Gemms {
        if settings.enabled { self.plans[settings.plan].gemms(layer) } else { Fp8Gemms::NONE }
    }
}

impl Drop for Forward<'_> {
    fn drop(&mut self) {
        if self.outermost.is_some() {
            self.scaling.abandon();
        }
    }
}

impl Drop for Backward<'_> {
    fn drop(&mut self) {
        self.scaling.abandon();
    }
}
