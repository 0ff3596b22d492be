//! The guard of a backward scope.

use crate::scopes::scope_settings::Mode;
use crate::{
    DelayedWgrad, Direction, Error, Forward, Fp8Gemms, GemmAccumulation, GradientSink, Origin, Result,
    Scaling, SlotName, Snapshot,
};
use fp8_kernels::{Cell, Slot};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

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
    pub(crate) sink: Option<Box<dyn GradientSink>>,
}

impl<'a> Backward<'a> {
    pub(crate) const fn new(scaling: &'a mut Scaling) -> Self {
        Self { scaling, wgrads: None, sink: None }
    }
}

impl Backward<'_> {
    /// Delays the weight gradients of this scope: layers compute the gradients of their inputs, biases and norms, and leave the
    /// products `dyᵀ · x` for later. A pipeline sends the gradient of the input to the previous stage first, and computes the
    /// weight gradients while it waits.
    ///
    /// Until then they keep `dy` and `x`: with sequence parallelism the gathered ones, of the tokens of all ranks.
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

    /// Gives this scope a sink for gradients, instead of the one that it has.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{DType, Device, Tensor};
    /// use fp8_recipe::{GemmSlots, GradientSink, Result, Scaling};
    /// use std::sync::{Arc, Mutex};
    ///
    /// /// Notes the names of gradients.
    /// #[derive(Debug, Clone, Default)]
    /// struct Names(Arc<Mutex<Vec<Arc<str>>>>);
    ///
    /// impl GradientSink for Names {
    ///     fn group(&self) -> &str {
    ///         "dp"
    ///     }
    ///     fn take(&mut self, name: &Arc<str>, _gradient: Tensor) -> Result<()> {
    ///         self.0.lock().unwrap().push(name.clone());
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let device = Device::cpu();
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &device)?;
    /// let names = Names::default();
    /// let mut cx = scaling.backward()?;
    /// cx.set_gradient_sink(Box::new(names.clone()));
    /// if let Some(sink) = cx.gradient_sink() {
    ///     sink.take(&"fc.weight".into(), Tensor::zeros([2, 2], DType::F32, &device)?)?; // a layer that is done
    /// }
    /// cx.commit()?;
    /// assert_eq!(*names.0.lock().unwrap(), ["fc.weight".into()]);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn set_gradient_sink(&mut self, sink: Box<dyn GradientSink>) {
        self.sink = Some(sink);
    }

    /// Returns the sink of this scope, if it has one.
    pub fn gradient_sink(&mut self) -> Option<&mut (dyn GradientSink + 'static)> {
        self.sink.as_deref_mut()
    }

    /// Takes the sink out of this scope. A model does so while it runs its parts, which then hand over nothing themselves: only the
    /// model knows when it has finished with a part.
    pub fn take_gradient_sink(&mut self) -> Option<Box<dyn GradientSink>> {
        self.sink.take()
    }

    /// Lends the slot `name` under the recipe and group of `origin`.
    ///
    /// # Errors
    /// An origin of another layer, another `Scaling`, an evaluation, or a forward scope that was not committed; a slot that
    /// was not registered, or one of the forward pass.
    pub fn slot(&mut self, origin: &Origin, name: &SlotName) -> Result<Slot<'_>> {
        let refused = |found: String| Err(Error::Origin { layer: name.layer().to_string(), found });
        let touched = match origin.touched(self.scaling.model_slots().identity()) {
            Ok(touched) => touched,
            Err(found) => return refused(found.to_owned()),
        };
        if origin.layer != *name.layer() {
            return refused(format!("layer `{}`", origin.layer));
        }
        let index = self.scaling.model_slots().index(name, Direction::Backward)?;
        self.scaling.touch_for_backward(origin.settings, touched);
        self.scaling.draw_rounding(name, index, origin.settings)?;
        self.scaling.lend(name, index, origin.settings, &Mode::Record)
    }

    /// Returns which GEMMs of `origin`'s layer run in FP8 under its recipe: none for an origin that [`slot`](Self::slot)
    /// refuses.
    pub fn fp8_gemms(&self, origin: &Origin) -> Fp8Gemms {
        match origin.touched(self.scaling.model_slots().identity()) {
            Ok(_) => self.scaling.fp8_gemms(origin.settings, &origin.layer),
            Err(_) => Fp8Gemms::NONE,
        }
    }

    /// Returns how the FP8 GEMMs of `origin`'s layer accumulate under its recipe: as by default for an origin that
    /// [`slot`](Self::slot) refuses.
    pub fn accumulation(&self, origin: &Origin) -> GemmAccumulation {
        match origin.touched(self.scaling.model_slots().identity()) {
            Ok(_) => self.scaling.domains().plan(origin.settings.plan).accumulation(&origin.layer),
            Err(_) => GemmAccumulation::default(),
        }
    }

    /// Lends a `Forward` with the first run's recipe and scales, which records nothing.
    ///
    /// # Errors
    /// A snapshot of another `Scaling`, or of a scope that was never committed.
    pub fn replay(&mut self, snapshot: &Snapshot) -> Result<Forward<'_>> {
        if !Arc::ptr_eq(&snapshot.owner, self.scaling.model_slots().identity()) {
            let found = "another Scaling".to_owned();
            return Err(Error::Origin { layer: "replay".to_owned(), found });
        }
        snapshot.outcome.scales().ok_or(Error::NoSnapshot)?;
        let draws = Arc::new(AtomicU64::new(snapshot.draws));
        let mode = Mode::Replay { outcome: snapshot.outcome.clone(), draws };
        Ok(Forward::within(self.scaling, snapshot.settings, mode))
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
        self.scaling.scopes_mut().remember(result)
    }

    /// Reduces the amaxes and updates the scales of every recipe whose forward was committed since the last backward scope.
    ///
    /// # Errors
    /// As [`Forward::commit`]; weight gradients that were delayed and not taken.
    pub fn commit(self) -> Result<()> {
        let delayed = self.wgrads.as_ref().map_or(0, Vec::len);
        if delayed > 0 {
            return self.scaling.scopes_mut().remember(Err(Error::DelayedWgrads { delayed }));
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

impl Drop for Backward<'_> {
    fn drop(&mut self) {
        self.scaling.abandon();
    }
}
