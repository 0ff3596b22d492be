//! AdamW.

mod counts;
mod groups;
mod moments;
mod options;
mod progress;
mod rule;
mod state;
mod states;
mod update;

use crate::clip::grad_norm;
use crate::module::{trainable, trainable_mut};
use crate::parameter::Event;
use crate::{Error, Layer, LossScaler, Result, parameters};
pub(crate) use counts::Counts;
use fp8_kernels::ops::LossScaleState;
use fp8_kernels::{Replayed as _, Tensor};
pub use moments::MomentDtype;
pub use options::{AdamWOptions, ParameterGroup};
use progress::{Ended, Progress};
pub(crate) use rule::Rule;
pub(crate) use state::AdamWState;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

/// Adam with decoupled weight decay (Loshchilov and Hutter, <https://arxiv.org/abs/1711.05101>).
///
/// For step t with gradient g, learning rate `lr` and weight decay λ, in f32:
///
/// ```text
/// p ← p · (1 − lr · λ)
/// m ← β₁ · m + (1 − β₁) · g        v ← β₂ · v + (1 − β₂) · g²
/// p ← p − lr · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
/// ```
///
/// The moments m and v are f32, or bf16 or FP8 if [`AdamWOptions::moments`] says so. They are stored by parameter name; the first
/// step allocates them. [`AdamWOptions`] lists the defaults, which differ from PyTorch's. For bf16 and f16 parameters the optimizer
/// stores f32 copies and updates those, unless `main_params` is false. Of [frozen](crate::Parameter::set_trainable) parameters it
/// stores neither: a step frees what it has of parameters that were frozen since. The t of the bias correction counts the optimizer's steps, for parameters that were unfrozen late, too.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &device, &mut fp8_nn::rand::rng())?;
/// for parameter in parameters_mut(&mut fc) {
///     let shape = *parameter.shape();
///     parameter.set(Tensor::full(1.0, shape, DType::F32, &device)?)?;
///     *parameter.main_grad_mut() = Tensor::full(3.0, shape, DType::F32, &device)?;
/// }
/// let mut optimizer = AdamW::new(AdamWOptions::default())?;
/// optimizer.step(&mut fc, 0.5)?;
/// // The first step is as long as the learning rate. Weights decay by 0.5 · 0.1 before it, biases do not.
/// assert!((fc.weight().tensor().to_f32_vec()?[0] - (0.95 - 0.5)).abs() < 1e-6);
/// assert!((parameters(&fc)[1].tensor().to_f32_vec()?[0] - (1.0 - 0.5)).abs() < 1e-6);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// On a GPU all parameters are updated in one launch for each pair of a learning rate and a weight decay: two without
/// [`groups`](AdamWOptions::groups). A step that is recorded by
/// [`Device::capture`](fp8_kernels::Device::capture) takes its rate from [`set_lr`](Self::set_lr) at each replay.
///
/// # Gradients that are not finite
/// An infinite or NaN gradient would make its parameter and moments NaN permanently. A step therefore changes no parameter,
/// moment or f32 copy if the norm of all gradients is not finite. The device makes this check and counts the skipped steps
/// ([`skipped_steps`](Self::skipped_steps)), so the host does not wait and recorded steps are checked too. The norm is
/// computed without overflow: it is infinite only if a gradient is, or if the norm itself is greater than `f32::MAX`.
///
/// A skipped step still counts in [`steps`](Self::steps), because the host does not know what the device decided. It
/// therefore counts in Adam's bias correction: early in training, it makes the next updates slightly smaller. After a few
/// hundred steps it makes no difference. With a [`LossScaler`], which skips steps as a matter of course, a skipped step does not
/// count: [`updates`](Self::updates) are counted on the device.
#[derive(Debug)]
pub struct AdamW {
    progress: Arc<Progress>,
    pub(crate) state: BTreeMap<Arc<str>, AdamWState>,
    /// The parameters that may have no state although the optimizer has taken steps: they were frozen in a step, or when they were
    /// saved.
    frozen: BTreeSet<Arc<str>>,
    scaler: Option<LossScaler>,
    /// The state of a scaler that was loaded before there was one.
    loaded_scale: Option<LossScaleState>,
}

impl AdamW {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// A `beta1` or `beta2` that is negative or not less than 1; an `eps`, `weight_decay` or `lr_factor` that is negative or not
    /// finite; a group with an empty pattern; `stochastic_rounding` of parameters that have f32 copies.
    pub fn new(options: AdamWOptions) -> Result<Self> {
        Self::with_rule(Rule::AdamW, options)
    }

    /// Creates an optimizer that updates parameters by another rule with the numbers of these options.
    pub(crate) fn with_rule(rule: Rule, options: AdamWOptions) -> Result<Self> {
        let AdamWOptions { beta1, beta2, eps, weight_decay, ref groups, .. } = options;
        let error = |option, value: f32, remedy: &str| {
            let (layer, remedy) = (rule.name().to_owned(), remedy.to_owned());
            Err(Error::Option { part: layer, option, value: value.to_string(), remedy })
        };
        for (option, value) in [(rule.decay_option(), beta1), ("beta2", beta2)] {
            if !(0.0..1.0).contains(&value) {
                return error(option, value, "expected 0 or more and less than 1");
            }
        }
        let of_groups = groups.iter().flat_map(|group| {
            let decay = group.weight_decay.map(|decay| ("weight_decay", decay));
            [("lr_factor", group.lr_factor)].into_iter().chain(decay)
        });
        for (option, value) in [("eps", eps), ("weight_decay", weight_decay)].into_iter().chain(of_groups) {
            if !(value >= 0.0 && value.is_finite()) {
                return error(option, value, "expected finite and 0 or more");
            }
        }
        if groups.iter().any(|group| group.pattern.is_empty()) {
            return Err(groups::refused(rule, "\"\"", "expected a pattern such as \"*.bias\" or \"head\""));
        }
        if options.stochastic_rounding && options.main_params {
            let remedy =
                "bf16 parameters have f32 copies, which are rounded to nearest: set main_params to false";
            return Err(Error::Option {
                part: rule.name().to_owned(),
                option: "stochastic_rounding",
                value: "true".to_owned(),
                remedy: remedy.to_owned(),
            });
        }
        let progress = Arc::new(Progress::new(rule, options));
        let (state, frozen) = Default::default();
        Ok(Self { progress, state, frozen, scaler: None, loaded_scale: None })
    }

    /// Returns the number of steps taken, including those that were skipped.
    pub fn steps(&self) -> u64 {
        self.progress.steps()
    }

    /// Returns how many of the [`steps`](Self::steps) changed nothing, because their gradients had no finite norm. On a GPU
    /// this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step is being recorded; the device failed.
    pub fn skipped_steps(&self) -> Result<u64> {
        self.progress.skipped_steps()
    }

    /// Returns the number of steps that count in the bias correction: all [`steps`](Self::steps), less those that were skipped
    /// with a [`LossScaler`]. On a GPU with a scaler this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step is being recorded; the device failed.
    pub fn updates(&self) -> Result<u64> {
        Ok(self.progress.updates()?.unwrap_or_else(|| self.steps()))
    }

    /// Sets the scaler of the gradients. Steps then divide gradients by its scale and are skipped if one overflowed, and
    /// checkpoints contain its state.
    ///
    /// [`LossScaler::step`] does this in the first step. Call it before [`checkpoint::load`](crate::checkpoint::load), so that
    /// the scaler has the loaded state in the first forward pass; state that was loaded without a scaler is stored in the next
    /// one that is set.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let scaler = LossScaler::new(LossScalerOptions::default(), &Device::cpu())?;
    /// let mut optimizer = AdamW::new(AdamWOptions::default())?;
    /// optimizer.set_loss_scaler(&scaler)?;
    /// assert_eq!(optimizer.loss_scaler().map(|scaler| scaler.loss_scale()).transpose()?, Some(65536.0));
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// A step is being recorded; the device failed; none on the CPU.
    pub fn set_loss_scaler(&mut self, scaler: &LossScaler) -> Result<()> {
        if let Some(loaded) = self.loaded_scale {
            scaler.set_state(&loaded)?;
            self.loaded_scale = None;
        }
        self.scaler = Some(scaler.clone());
        Ok(())
    }

    /// Returns the scaler of the gradients, if one was set.
    pub fn loss_scaler(&self) -> Option<&LossScaler> {
        self.scaler.as_ref()
    }

    /// Returns the counts that checkpoints store.
    pub(crate) fn counts(&self) -> Result<Counts> {
        let (steps, skipped) = (self.steps(), self.skipped_steps()?);
        Ok(Counts { steps, skipped, updates: self.progress.updates()? })
    }

    /// Returns the state of the scaler, if there is one that is enabled.
    pub(crate) fn loss_scale(&self) -> Result<Option<LossScaleState>> {
        let enabled = self.scaler.as_ref().filter(|scaler| scaler.options().enabled);
        Ok(enabled.map(LossScaler::state).transpose()?.or(self.loaded_scale))
    }

    /// Replaces the state of the scaler, or keeps it for the next one that is set.
    pub(crate) fn set_loss_scale(&mut self, state: Option<LossScaleState>) -> Result<()> {
        match (&self.scaler, state) {
            (Some(scaler), Some(state)) => scaler.set_state(&state),
            (Some(_), None) => Ok(()),
            (None, state) => {
                self.loaded_scale = state;
                Ok(())
            }
        }
    }

    /// Sets the f32 copies (`main_params`) to the values of the parameters. Call it after you have set parameters yourself.
    ///
    /// Without this call, the next step continues from the copies and overwrites the values that you set. f32 parameters have
    /// no copies, and [`checkpoint::load`](crate::checkpoint::load) needs no such call. The copies are written in place, so
    /// recorded steps continue from the new values.
    ///
    /// # Errors
    /// A step is being recorded; a parameter of another shape than in the steps before; the device failed.
    pub fn reload_params(&mut self, model: &(impl Layer + ?Sized)) -> Result<()> {
        let parameters = parameters(model);
        // Everything is checked before the first f32 copy changes.
        for parameter in &parameters {
            let Some(state) = self.state.get(parameter.name()) else { continue };
            state.expect_shape_of(parameter)?;
            let remedy = "reload parameters before the step is recorded";
            parameter.device().expect_eager(self.rule().name(), remedy)?;
        }
        parameters.into_iter().try_for_each(|parameter| match self.state.get_mut(parameter.name()) {
            Some(state) => state.reload(parameter),
            None => Ok(()),
        })
    }

    /// Sets the learning rate of the next replay of a recorded [`step`](Self::step).
    ///
    /// # Errors
    /// A rate that is negative or not finite.
    pub fn set_lr(&self, lr: f32) -> Result<()> {
        self.progress.set_lr(lr)
    }

    /// Updates every parameter that is not frozen from its gradient. If the norm of all gradients is not finite, nothing changes but
    /// the counts. If all parameters are frozen, there is no step to count. Gradients are kept: [`zero_grad`](crate::zero_grad)
    /// clears them.
    ///
    /// This reads all gradients once more to compute their norm: that of the whole model, also where ranks have parts of it. After [`clip_grad_norm`](crate::clip_grad_norm), pass the
    /// norm that it returns to [`step_with_norm`](Self::step_with_norm).
    ///
    /// # Errors
    /// A rate that is negative or not finite, a parameter that shares its storage with a tensor, two parameters of one name,
    /// a parameter of another shape than in the steps before, a group whose pattern matches no parameter of the model, a gradient that is
    /// a part of a sum over ranks. Nothing has changed then. After other errors, such as a device that is out of memory, moments of frozen parameters may be freed.
    pub fn step(&mut self, model: &mut (impl Layer + ?Sized), lr: f32) -> Result<()> {
        self.step_if_finite(model, lr, None)
    }

    /// Takes a [`step`](Self::step) with a norm that was already computed: one f32 on the device of the gradients, as
    /// [`clip_grad_norm`](crate::clip_grad_norm) returns it. With several ranks it must be the norm of the summed gradients,
    /// so that either all ranks skip a step or none does.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let mut rng = fp8_nn::rand::rng();
    /// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
    /// let mut optimizer = AdamW::new(AdamWOptions::default())?;
    /// let norm = clip_grad_norm(&mut fc, 1.0)?;
    /// optimizer.step_with_norm(&mut fc, 1e-3, &norm)?;
    /// assert_eq!((optimizer.steps(), optimizer.skipped_steps()?), (1, 0));
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`step`](Self::step); a norm that is not one f32, or that is on another device.
    pub fn step_with_norm(
        &mut self,
        model: &mut (impl Layer + ?Sized),
        lr: f32,
        norm: &Tensor,
    ) -> Result<()> {
        self.step_if_finite(model, lr, Some(norm))
    }

    fn step_if_finite(
        &mut self,
        model: &mut (impl Layer + ?Sized),
        lr: f32,
        norm: Option<&Tensor>,
    ) -> Result<()> {
        self.progress.groups.expect_matches(self.rule(), &self.progress.options, model)?;
        let all = trainable(model);
        self.check(model)?;
        self.progress.check_lr(lr)?;
        let device = all.first().map(|first| first.device().clone());
        if device.as_ref().is_none_or(|device| device.capture_number().is_none()) {
            self.drop_frozen(model); // before other state is allocated
        }
        self.prepare(&all)?;
        let ended = Ended::of(model);
        let Some(device) = device else {
            self.progress.set_lr(lr)?;
            return Ok(ended.advance()?);
        };
        let scaler = self.scaler.clone();
        let scaled = scaler.as_ref().and_then(LossScaler::for_step);
        let is_checked = scaled.as_ref().is_some_and(|scaled| scaled.is_checked);
        let computed = match norm {
            None if !is_checked => Some(grad_norm(all.into_iter())?),
            _ => None,
        };
        let norm = norm.or(computed.as_ref());
        self.progress.set_lr(lr)?;
        let progress = self.progress.clone();
        progress.on_device(&device)?;
        progress.update_count(&device, scaled.is_some())?;
        progress.advance()?;
        device.on_replay(progress.clone());
        let updated = self.update(&device, trainable_mut(model), norm, scaled);
        // A recorded step that fails undoes its count itself.
        if updated.is_err() && device.capture_number().is_none() {
            progress.retreat();
        }
        updated?;
        ended.advance()?;
        device.on_replay(ended);
        trainable(model).iter().for_each(|parameter| parameter.gradient().note(Event::Stepped));
        scaler.iter().for_each(LossScaler::note_step);
        Ok(())
    }

    /// Checks everything that could make the step fail halfway, which would leave some parameters a step ahead of others.
    fn check(&self, model: &(impl Layer + ?Sized)) -> Result<()> {
        let mut names = BTreeSet::new();
        for parameter in parameters(model) {
            let name = parameter.name();
            // Also beside a frozen one, since state is found by name.
            if !names.insert(name) {
                return Err(Error::DuplicateParameter(name.clone()));
            }
            if !parameter.is_trainable() {
                continue;
            }
            parameter.expect_complete_gradient()?;
            let holders = match parameter.fp8() {
                None => parameter.tensor().holders(),
                // Shared codes are replaced, which a recorded step would not see.
                Some(codes) if codes.device().capture_number().is_some() => codes.holders(),
                Some(_) => 0,
            };
            if holders > 0 {
                return Err(fp8_kernels::Error::Shared { name: name.to_string(), holders }.into());
            }
            if let Some(state) = self.state.get(name) {
                state.expect_shape_of(parameter)?;
            }
        }
        Ok(())
    }

    pub(crate) fn rule(&self) -> Rule {
        self.progress.rule
    }

    pub(crate) fn options(&self) -> &AdamWOptions {
        &self.progress.options
    }

    /// Returns a handle that can be upgraded as long as this optimizer exists.
    pub(crate) fn life(&self) -> Weak<dyn Any + Send + Sync> {
        let progress: Arc<dyn Any + Send + Sync> = self.progress.clone();
        Arc::downgrade(&progress)
    }
}
