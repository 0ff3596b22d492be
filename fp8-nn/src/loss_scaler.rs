//! Loss scaling, for training in f16.

mod step;

use crate::clip::{clip_with, grad_norm};
use crate::module::{trainable, trainable_mut};
use crate::{Error, Layer, Result};
use fp8_kernels::ops::{self, LossScale, LossScaleRule, LossScaleState};
use fp8_kernels::{Device, Tensor};
use fp8_recipe::Backward;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Options of a [`LossScaler`]. The defaults are those of PyTorch's `GradScaler`.
///
/// ```
/// use fp8_nn::prelude::*;
/// let constant = LossScalerOptions { init_scale: 1024.0, dynamic: false, ..Default::default() };
/// let scaler = LossScaler::new(constant, &Device::cpu())?;
/// assert_eq!(scaler.loss_scale()?, 1024.0);
/// let error = LossScaler::new(LossScalerOptions { backoff_factor: 2.0, ..constant }, &Device::cpu()).unwrap_err();
/// assert!(error.to_string().contains("backoff_factor = 2: give a number between 0 and 1"));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerOptions {
    /// The first scale, finite and greater than 0. Default: 65536.
    pub init_scale: f32,
    /// Factor of the scale after `growth_interval` steps without overflow, greater than 1. Default: 2.
    pub growth_factor: f32,
    /// Factor of the scale after a step with overflow, between 0 and 1. Default: 0.5.
    pub backoff_factor: f32,
    /// The number of consecutive steps without overflow after which the scale grows, at least 1. Default: 2000.
    pub growth_interval: u64,
    /// Whether the scale adapts. If not, it stays `init_scale`, and steps with overflow are still skipped. Default: true.
    pub dynamic: bool,
    /// Whether the scaler does anything. If not, gradients are not multiplied, and the optimizer works as without a scaler.
    /// Default: true.
    pub enabled: bool,
}

impl Default for LossScalerOptions {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            dynamic: true,
            enabled: true,
        }
    }
}

/// Multiplies the gradient of the loss, so that small gradients do not underflow in f16, as PyTorch's `GradScaler` does.
///
/// f16 has no values below 6e-8 and none above 65504. With a loss scale s, backward computes gradients that are s times as
/// large, and the optimizer divides by s. If a gradient overflows, the optimizer skips the step, and s is multiplied by
/// `backoff_factor`. After `growth_interval` steps without overflow, s is multiplied by `growth_factor`.
///
/// The scale, its growth tracker, the overflow flag and the counts are stored on the device and change there: the host never
/// waits, and a step that is recorded by [`Device::capture`] skips and adapts in each replay. With several ranks the flag is
/// reduced in the collective that reduces the amaxes, at the commit of the backward scope, so that all ranks skip a step
/// together. [`checkpoint::save`](crate::checkpoint::save) stores the scaler of the optimizer that it saves.
///
/// The parameters are f16 (`params_dtype`) with f32 copies in the optimizer, or f32 with a `compute_dtype` of f16 in the
/// scope, as here:
///
/// ```
/// use fp8_nn::prelude::*;
/// # let (device, mut rng) = (Device::cpu(), fp8_nn::rand::rng());
/// # let options = GptOptions {
/// #     vocab_size: 16,
/// #     num_layers: 1,
/// #     layer: TransformerLayerOptions {
/// #         hidden_size: 32,
/// #         ffn_hidden_size: 128,
/// #         attention: AttentionOptions {
/// #             num_attention_heads: 2,
/// #             max_seq_length: 8,
/// #             ..Default::default()
/// #         },
/// #         ..Default::default()
/// #     },
/// #     ..Default::default()
/// # };
/// # let ids = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6, 7, 8], [1, 8], &device)?;
/// # let targets = Tensor::from_vec(vec![2i32, 3, 4, 5, 6, 7, 8, 9], [1, 8], &device)?;
/// let mut model = Gpt::new("gpt", &options, &device, &mut rng)?;
/// let mut scaling = Scaling::new(&model, &device)?;
/// let mut optimizer = AdamW::new(AdamWOptions::default())?;
/// let scaler = LossScaler::new(LossScalerOptions::default(), &device)?;
/// let autocast = AutocastOptions { compute_dtype: Some(DType::F16), ..Default::default() };
/// for _ in 0..3 {
///     let mut cx = scaling.scope(&DelayedScaling::default().into(), &autocast)?;
///     let (loss, saved) = model.loss(&mut cx, &ids, &targets)?;
///     cx.commit()?;
///     scaling.in_backward(|cx| model.loss_backward_scaled(cx, saved, &scaler))?;
///     let norm = scaler.clip_grad_norm(&mut model, 1.0)?; // of the gradients without the scale
///     scaler.step_with_norm(&mut optimizer, &mut model, 1e-3, &norm)?;
///     scaler.update()?;
///     zero_grad(&mut model)?;
/// }
/// assert_eq!((scaler.loss_scale()?, scaler.skipped_steps()?), (65536.0, 0));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// A loss of your own multiplies its gradient by [`scale`](Self::scale) before backward, and calls [`check`](Self::check)
/// behind it:
///
/// ```
/// use fp8_nn::prelude::*;
/// # let (device, mut rng) = (Device::cpu(), fp8_nn::rand::rng());
/// let options = LinearOptions { in_features: 32, out_features: 32, params_dtype: DType::F16, ..Default::default() };
/// let mut layer = Linear::new("fc", options, &device, &mut rng)?;
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let mut optimizer = AdamW::new(AdamWOptions::default())?;
/// let scaler = LossScaler::new(LossScalerOptions::default(), &device)?;
/// let x = Tensor::full(0.5, [16, 32], DType::F16, &device)?;
///
/// let (y, saved) = scaling.in_autocast(&DelayedScaling::default().into(), |cx| layer.forward(cx, &x))?;
/// let dy = Tensor::full(1.0, *y.shape(), y.dtype(), &device)?; // the gradient of a sum
/// scaling.in_backward(|cx| {
///     let scaled = scaler.scale(cx, &dy)?; // infinite: f16 ends at 65504
///     layer.backward(cx, saved, &scaled)?;
///     scaler.check(cx, &layer)
/// })?;
/// let before = layer.weight().tensor().to_f32_vec()?;
/// scaler.step(&mut optimizer, &mut layer, 1e-3)?; // skipped
/// scaler.update()?;
/// assert_eq!((scaler.loss_scale()?, scaler.skipped_steps()?, optimizer.updates()?), (32768.0, 1, 0));
/// assert_eq!(layer.weight().tensor().to_f32_vec()?, before);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// Clones are handles on the same scaler.
#[derive(Debug, Clone)]
pub struct LossScaler {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    options: LossScalerOptions,
    /// `None` if the scaler is not enabled.
    scale: Option<LossScale>,
    /// Whether the gradients were checked since the last update.
    is_checked: AtomicBool,
    /// Whether the gradients were divided by the scale since the last update.
    is_unscaled: AtomicBool,
    /// Whether an optimizer has taken a step since the last update.
    has_stepped: AtomicBool,
    /// Whether the check did not see gradients that were being summed over ranks.
    leaves_sums: AtomicBool,
}

/// Refuses a scope that leaves weight gradients for later.
pub(crate) fn expect_all_gradients(cx: &mut Backward<'_>) -> Result<()> {
    match cx.delayed_wgrads() {
        None => Ok(()),
        Some(_) => Err(Error::LossScaler {
            problem: "the scope delays weight gradients, so they cannot be checked in it",
            remedy: "multiply the gradient with `scale`, and leave the check to `step`",
        }),
    }
}

/// The state of a scaler that an optimizer's step needs.
#[derive(Debug)]
pub(crate) struct StepScale<'a> {
    pub(crate) scale: &'a LossScale,
    pub(crate) gradients_are_scaled: bool,
    pub(crate) is_checked: bool,
}

impl LossScaler {
    /// Creates a scaler on `device`.
    ///
    /// # Errors
    /// An option outside its range; a step is being recorded; the device is out of memory or failed.
    pub fn new(options: LossScalerOptions, device: &Device) -> Result<Self> {
        let LossScalerOptions { init_scale, enabled, .. } = options;
        rule(&options).check("LossScaler")?;
        if !(init_scale.is_finite() && init_scale >= f32::MIN_POSITIVE) {
            return Err(Error::Option {
                part: "LossScaler".to_owned(),
                option: "init_scale",
                value: init_scale.to_string(),
                remedy: "expected a finite number of at least 2⁻¹²⁶, such as 65536".to_owned(),
            });
        }
        let state = LossScaleState { scale: init_scale, ..Default::default() };
        let scale = enabled.then(|| LossScale::new(&state, device)).transpose()?;
        let [is_checked, is_unscaled, has_stepped, leaves_sums] = [false; 4].map(AtomicBool::new);
        let shared = Shared { options, scale, is_checked, is_unscaled, has_stepped, leaves_sums };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the options.
    pub fn options(&self) -> &LossScalerOptions {
        &self.shared.options
    }

    /// Returns `dy` multiplied by the scale, rounded once to the dtype of `dy`. Pass the result to backward in this scope.
    ///
    /// [`Gpt::loss_backward_scaled`](crate::Gpt::loss_backward_scaled) does this for its own loss, before it rounds to f16.
    ///
    /// # Errors
    /// A dtype that is not a float; another device; a step since which [`update`](Self::update) was not called.
    pub fn scale(&self, cx: &mut Backward<'_>, dy: &Tensor) -> Result<Tensor> {
        match self.for_loss(cx)? {
            Some(scale) => Ok(ops::apply_loss_scale(dy, scale)?),
            None => Ok(dy.clone()),
        }
    }

    /// Notes whether a gradient of `model` is infinite or NaN. Call it in the backward scope, after backward: the scope's
    /// commit then reduces the result over the ranks, and all of them skip a step together. A gradient that was infinite when
    /// it was quantized counts too, since its codes are not.
    ///
    /// Gradients that [`Gradients`](crate::Gradients) has taken to sum them are not looked at here: the step checks the norm of the
    /// sums instead, which is the same on all ranks.
    ///
    /// It reads all gradients once, on the device. With several microbatches, call it in the scope of each or only of the
    /// last; gradients accumulate, and so does the result until [`update`](Self::update).
    ///
    /// # Errors
    /// Another device; a step since which [`update`](Self::update) was not called; a scope that delays weight gradients, which are
    /// not there to be checked; a step that is being recorded, if this is the first call for the scope's `Scaling`.
    pub fn check(&self, cx: &mut Backward<'_>, model: &(impl Layer + ?Sized)) -> Result<()> {
        self.expect_updated()?;
        expect_all_gradients(cx)?;
        let Some(scale) = &self.shared.scale else { return Ok(()) };
        let (away, here): (Vec<_>, Vec<_>) =
            trainable(model).into_iter().partition(|parameter| parameter.gradient().is_away());
        let overflow = cx.overflow(scale.overflow())?;
        if !here.is_empty() {
            ops::check_finite(&grad_norm(here.into_iter())?, overflow)?;
        }
        // Of gradients that are being summed, the sum is checked: by the norm of the step.
        self.shared.is_checked.store(away.is_empty(), Relaxed);
        self.shared.leaves_sums.store(!away.is_empty(), Relaxed);
        Ok(())
    }

    /// Divides all gradients by the scale, in place. An optimizer of your own, or code that looks at gradients, calls it after
    /// backward and after the sum over the ranks. Later steps and [`clip_grad_norm`](Self::clip_grad_norm) know of it.
    ///
    /// [`AdamW`](crate::AdamW) needs no such call: it divides while it updates.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// # let (device, mut rng) = (Device::cpu(), fp8_nn::rand::rng());
    /// # let options = LinearOptions { in_features: 32, out_features: 32, ..Default::default() };
    /// # let mut fc = Linear::new("fc", options, &device, &mut rng)?;
    /// # let mut scaling = Scaling::new(&fc, &device)?;
    /// # let x = Tensor::full(0.5, [16, 32], DType::F32, &device)?;
    /// let scaler = LossScaler::new(LossScalerOptions::default(), &device)?;
    /// let (y, saved) = scaling.in_autocast(&DelayedScaling::default().into(), |cx| fc.forward(cx, &x))?;
    /// scaling.in_backward(|cx| {
    ///     let dy = scaler.scale(cx, &y)?;
    ///     fc.backward(cx, saved, &dy)?;
    ///     scaler.check(cx, &fc)
    /// })?;
    /// scaler.unscale(&mut fc)?;
    /// if !scaler.overflowed()? {
    ///     for parameter in parameters_mut(&mut fc) {
    ///         parameter.update(|value, grad| {
    ///             *value = ops::add(value, &ops::scale(grad, -1e-3)?)?; // SGD
    ///             Ok(())
    ///         })?;
    ///     }
    /// }
    /// scaler.update()?;
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// A second call before [`update`](Self::update); a gradient that shares its storage with another tensor. Nothing has
    /// changed then.
    pub fn unscale(&self, model: &mut (impl Layer + ?Sized)) -> Result<()> {
        let Some(scale) = &self.shared.scale else { return Ok(()) };
        if self.shared.is_unscaled.load(Relaxed) {
            return Err(Error::LossScaler {
                problem: "the gradients are already divided by the scale",
                remedy: "call `unscale` once between two calls of `update`",
            });
        }
        let mut all = trainable_mut(model);
        for parameter in &all {
            parameter.gradient().expect_here(parameter.name())?;
            let holders = parameter.main_grad().holders();
            if holders > 0 {
                let name = format!("{}.main_grad", parameter.name());
                return Err(fp8_kernels::Error::Shared { name, holders }.into());
            }
        }
        for parameter in &mut all {
            let name = parameter.name().clone();
            parameter.gradient_mut().rewrite(|grad| Ok(ops::undo_loss_scale(grad, scale, &name)?))?;
        }
        self.shared.is_unscaled.store(true, Relaxed);
        Ok(())
    }

    /// [`clip_grad_norm`](crate::clip_grad_norm) for gradients that contain the scale: `max_norm` and the norm that it returns
    /// are those of the gradients without it. The gradients keep the scale.
    ///
    /// If [`check`](Self::check) left out gradients that were being summed over ranks, this makes up for it: a norm that is not finite
    /// counts as an overflow.
    ///
    /// # Errors
    /// As [`clip_grad_norm`](crate::clip_grad_norm).
    pub fn clip_grad_norm(&self, model: &mut (impl Layer + ?Sized), max_norm: f32) -> Result<Tensor> {
        let norm = clip_with(model, max_norm, |norm| match self.for_step() {
            Some(StepScale { scale, gradients_are_scaled: true, .. }) => {
                Ok(ops::undo_loss_scale(norm, scale, "the norm")?)
            }
            _ => Ok(()),
        })?;
        if let Some(scale) = self.shared.scale.as_ref().filter(|_| self.shared.leaves_sums.load(Relaxed)) {
            ops::check_finite(&norm, scale.overflow())?;
            self.shared.leaves_sums.store(false, Relaxed);
            self.shared.is_checked.store(true, Relaxed);
        }
        Ok(norm)
    }

    /// Adapts the scale to what happened since the last update. Call it once after each step.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn update(&self) -> Result<()> {
        let Shared { options, scale, is_checked, is_unscaled, has_stepped, leaves_sums } = &*self.shared;
        let Some(scale) = scale else { return Ok(()) };
        ops::update_loss_scale(scale, options.dynamic.then(|| rule(options)).as_ref())?;
        let flags = [is_checked, is_unscaled, has_stepped, leaves_sums];
        flags.into_iter().for_each(|flag| flag.store(false, Relaxed));
        Ok(())
    }

    /// Returns whether a gradient overflowed since the last [`update`](Self::update), for an optimizer of your own, which must
    /// then skip its step. With several ranks all get the same answer after the commit of the backward scope. On a GPU this
    /// waits until all work queued so far is done.
    ///
    /// # Errors
    /// Gradients that were being summed over ranks when they were checked ([`Gradients`](crate::Gradients)), if
    /// [`clip_grad_norm`](Self::clip_grad_norm) was not called since. As [`loss_scale`](Self::loss_scale).
    pub fn overflowed(&self) -> Result<bool> {
        if self.shared.leaves_sums.load(Relaxed) {
            return Err(Error::LossScaler {
                problem: "gradients were being summed over ranks when they were checked",
                remedy: "call `LossScaler::clip_grad_norm` before, which checks the sums",
            });
        }
        match &self.shared.scale {
            Some(scale) => Ok(scale.overflow().read()? != 0.0),
            None => Ok(false),
        }
    }

    /// Returns the present scale, 1 if the scaler is not enabled. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// A step is being recorded; the device failed; none on the CPU.
    pub fn loss_scale(&self) -> Result<f32> {
        Ok(self.state()?.scale)
    }

    /// Returns how many steps were skipped because a gradient overflowed. On a GPU this waits until all work queued so far is
    /// done.
    ///
    /// # Errors
    /// As [`loss_scale`](Self::loss_scale).
    pub fn skipped_steps(&self) -> Result<u64> {
        Ok(self.state()?.skipped_steps)
    }

    /// Returns the scale, the growth tracker and the number of skipped steps, as a checkpoint stores them. On a GPU this waits
    /// until all work queued so far is done.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let scaler = LossScaler::new(LossScalerOptions::default(), &Device::cpu())?;
    /// let mut state = scaler.state()?;
    /// state.scale = 256.0;
    /// scaler.set_state(&state)?;
    /// assert_eq!(scaler.loss_scale()?, 256.0);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`loss_scale`](Self::loss_scale).
    pub fn state(&self) -> Result<LossScaleState> {
        match &self.shared.scale {
            Some(scale) => Ok(scale.state()?),
            None => Ok(LossScaleState { scale: 1.0, ..Default::default() }),
        }
    }

    /// Replaces what [`state`](Self::state) returns, in place, so that recorded steps continue from it. A scaler that is not
    /// enabled ignores it.
    ///
    /// # Errors
    /// A scale that is not finite or less than 2⁻¹²⁶; a step is being recorded; the device failed.
    pub fn set_state(&self, state: &LossScaleState) -> Result<()> {
        self.shared.scale.as_ref().map_or(Ok(()), |scale| Ok(scale.set_state(state)?))
    }

    /// Returns what a step needs; `None` if the scaler is not enabled.
    pub(crate) fn for_step(&self) -> Option<StepScale<'_>> {
        Some(StepScale {
            scale: self.shared.scale.as_ref()?,
            gradients_are_scaled: !self.shared.is_unscaled.load(Relaxed),
            is_checked: self.shared.is_checked.load(Relaxed),
        })
    }

    /// Notes that an optimizer has taken a step.
    pub(crate) fn note_step(&self) {
        self.shared.has_stepped.store(self.shared.scale.is_some(), Relaxed);
    }

    /// Returns the scale for a loss that multiplies its gradient itself; `None` if the scaler is not enabled.
    pub(crate) fn for_loss(&self, cx: &mut Backward<'_>) -> Result<Option<&LossScale>> {
        self.expect_updated()?;
        let Some(scale) = &self.shared.scale else { return Ok(None) };
        // From here on the scope's gradients are watched as they are quantized.
        cx.overflow(scale.overflow())?;
        Ok(Some(scale))
    }

    fn expect_updated(&self) -> Result<()> {
        if !self.shared.has_stepped.load(Relaxed) {
            return Ok(());
        }
        Err(Error::LossScaler {
            problem: "an optimizer has taken a step since the last update",
            remedy: "call `update` once after each step",
        })
    }
}

fn rule(options: &LossScalerOptions) -> LossScaleRule {
    let LossScalerOptions { growth_factor, backoff_factor, growth_interval, .. } = *options;
    LossScaleRule { growth_factor, backoff_factor, growth_interval }
}
