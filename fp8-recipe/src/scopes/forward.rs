//! The guard of a forward scope. Layers hold a guard by `&mut` and `commit` takes `self`, so layers cannot commit. The guards
//! implement `Drop`, so opening a second scope before the first is committed does not compile.

use crate::scopes::forward_outcome::ForwardOutcome;
use crate::scopes::scope_settings::{Mode, ScopeSettings, check_compute_dtype};
use crate::{
    AutocastOptions, Direction, Fp8Gemms, GemmAccumulation, Origin, Recipe, Result, Scaling, SlotName,
    Snapshot,
};
use fp8_kernels::{DType, MemoryKind, MemoryKindGuard, Slot};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

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

impl<'a> Forward<'a> {
    /// The outermost scope of a training step.
    pub(crate) fn outermost(scaling: &'a mut Scaling, settings: ScopeSettings) -> Self {
        Self { scaling, settings, mode: Mode::Record, outermost: Some(MemoryKind::Saved.enter()) }
    }

    /// A scope that has nothing to commit: nested, an evaluation, or a replay.
    pub(crate) const fn within(scaling: &'a mut Scaling, settings: ScopeSettings, mode: Mode) -> Self {
        Self { scaling, settings, mode, outermost: None }
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
        let outer = self.scaling.domains().plan(self.settings.plan).group();
        options.amax_reduction_group = options.amax_reduction_group.or_else(|| outer.cloned());
        options.compute_dtype = options.compute_dtype.or(self.settings.compute_dtype);
        options.allow_scales_per_rank |= self.settings.allows_scales_per_rank;
        let records = matches!(self.mode, Mode::Record);
        let settings = self.scaling.settings(recipe, &options, records)?;
        Ok(Forward::within(self.scaling, settings, self.mode.clone()))
    }

    /// Sets the dtype of operations in high precision until the returned guard is dropped.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn with_compute_dtype(&mut self, dtype: DType) -> Result<Forward<'_>> {
        check_compute_dtype(dtype)?;
        let settings = ScopeSettings { compute_dtype: Some(dtype), ..self.settings };
        Ok(Forward::within(self.scaling, settings, self.mode.clone()))
    }

    /// Runs in high precision until the returned guard is dropped: for layers that never run in FP8, such as a model's head.
    pub fn disabled(&mut self) -> Forward<'_> {
        let settings = ScopeSettings { enabled: false, calibrating: false, ..self.settings };
        Forward::within(self.scaling, settings, self.mode.clone())
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
        self.scaling.domains().plan(self.settings.plan).accumulation(slot.layer())
    }

    /// Returns a handle to the scales and dropout masks of this scope, for a layer that will run its forward again in backward.
    /// Take it before the layer runs: the replay draws the masks that the scope draws from here on.
    pub fn snapshot(&mut self) -> Snapshot {
        if let (Mode::Record, Some(scope)) = (&self.mode, self.scaling.scopes_mut().current_mut()) {
            scope.snapshots = true;
        }
        let draws = match (&self.mode, self.scaling.scopes().current()) {
            (Mode::Replay { draws, .. }, _) => draws.load(Relaxed),
            (Mode::Record, Some(scope)) => scope.draws,
            _ => 0,
        };
        let outcome = self.outcome().unwrap_or_default(); // of an evaluation: never filled, and so refused
        Snapshot {
            owner: self.scaling.model_slots().identity().clone(),
            settings: self.settings,
            outcome,
            draws,
        }
    }

    /// Lends a slot for one quantizing operation: `ops::quantize(x, &cx.slot(&self.slots.input)?)`.
    ///
    /// # Errors
    /// A slot that was not registered, one of another layer at the same path, or one of the backward pass.
    pub fn slot(&mut self, name: &SlotName) -> Result<Slot<'_>> {
        let index = self.scaling.model_slots().index(name, Direction::Forward)?;
        self.scaling.lend(name, index, self.settings, &self.mode)
    }

    /// Returns the origin of a `Saved`. A layer stores it there, and its backward finds the recipe and arena of this scope by
    /// it.
    pub fn origin(&self, slot: &SlotName) -> Origin {
        let (owner, layer) = (self.scaling.model_slots().identity().clone(), slot.layer().clone());
        Origin { owner, settings: self.settings, outcome: self.outcome(), layer }
    }

    fn outcome(&self) -> Option<Arc<ForwardOutcome>> {
        match &self.mode {
            Mode::Record => self.scaling.scopes().current().map(|scope| scope.outcome.clone()),
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
        self.scaling.scopes_mut().remember(result)
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

impl Drop for Forward<'_> {
    fn drop(&mut self) {
        if self.outermost.is_some() {
            self.scaling.abandon();
        }
    }
}
