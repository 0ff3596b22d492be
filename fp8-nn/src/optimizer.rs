//! AdamW.

use crate::clip::grad_norm;
use crate::parameter::{Taken, Version, put_into};
use crate::{Error, Layer, Parameter, Result};
use fp8_kernels::ops::{self, AdamWFactors, AdamWStep, AdamWTensor, NormCheck, SkippedSteps};
use fp8_kernels::{DType, Device, Replayed, Tensor};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// How [`AdamW`] works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled decay, of parameters with two dimensions or more: norms and biases are left alone.
    pub weight_decay: f32,
    /// Whether bf16 parameters have f32 copies that are updated in their place. f32 parameters are their own.
    pub main_params: bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, main_params: true }
    }
}

/// Adam with decoupled weight decay; its state goes by parameter name.
///
/// Three places for f32 weights: in the model (f32 parameters), here (bf16 parameters, `main_params`), nowhere (bf16
/// parameters without).
///
/// On a GPU all parameters are updated in one launch for each of the two weight decays. A step that is recorded by
/// [`Device::capture`] takes its rate from [`set_lr`](Self::set_lr) at each replay.
///
/// # Gradients that are not finite
/// An infinite or NaN gradient would make its parameter and moments NaN for good. So a step changes nothing where the norm
/// of all gradients is not finite: no parameter, moment or f32 copy. The device decides, without a wait and in recorded
/// steps, too, and counts ([`skipped_steps`](Self::skipped_steps)). The norm is computed without overflow: it is infinite
/// only where a gradient is, or where the norm itself is greater than `f32::MAX`.
///
/// The number of steps goes on, since the host does not know what the device decided, and schedules and data go by it.
/// A skipped step therefore counts in Adam's bias correction: right after the start the next updates are a little smaller
/// than without it, after a few hundred steps it makes no difference.
#[derive(Debug)]
pub struct AdamW {
    progress: Arc<Progress>,
    pub(crate) state: BTreeMap<Arc<str>, AdamWState>,
}

/// What changes from step to step, shared with recorded steps.
#[derive(Debug)]
struct Progress {
    options: AdamWOptions,
    step: AtomicU64,
    lr: Mutex<f32>,
    /// Steps that were skipped before those that the device has counted.
    skipped_before: AtomicU64,
    on_device: OnceLock<OnDevice>,
}

/// What the device reads and writes.
#[derive(Debug)]
struct OnDevice {
    /// A step's numbers: with weight decay, and without.
    factors: [Arc<AdamWFactors>; 2],
    skipped: SkippedSteps,
}

impl Progress {
    /// The numbers of the step that `step` counts, with weight decay or without.
    fn numbers(&self, decays: bool) -> AdamWStep {
        let AdamWOptions { beta1, beta2, eps, weight_decay, .. } = self.options;
        let weight_decay = if decays { weight_decay } else { 0.0 };
        let lr = *self.lr.lock().unwrap_or_else(PoisonError::into_inner);
        let step = self.step.load(Relaxed).max(1);
        AdamWStep { lr, beta1, beta2, eps, weight_decay, step, grad_scale: 1.0 }
    }

    fn on_device(&self, device: &Device) -> Result<&OnDevice> {
        if let Some(made) = self.on_device.get() {
            return Ok(made);
        }
        let factors = |decays| AdamWFactors::new(&self.numbers(decays), device);
        let made =
            OnDevice { factors: [factors(true)?, factors(false)?], skipped: SkippedSteps::new(device)? };
        Ok(self.on_device.get_or_init(|| made))
    }

    fn set_lr(&self, lr: f32) -> Result<()> {
        if lr >= 0.0 && lr.is_finite() {
            *self.lr.lock().unwrap_or_else(PoisonError::into_inner) = lr;
            return Ok(());
        }
        Err(Error::Option {
            layer: "AdamW".to_owned(),
            option: "lr",
            value: lr.to_string(),
            remedy: "expected finite and 0 or more".to_owned(),
        })
    }
}

impl Replayed for Progress {
    fn advance(&self) -> fp8_kernels::Result<()> {
        self.step.fetch_add(1, Relaxed);
        let Some(OnDevice { factors: [decayed, undecayed], .. }) = self.on_device.get() else {
            return Ok(());
        };
        let set = decayed.set(&self.numbers(true)).and_then(|()| undecayed.set(&self.numbers(false)));
        set.inspect_err(|_| self.retreat())
    }

    fn retreat(&self) {
        self.step.fetch_sub(1, Relaxed);
    }
}

/// The versions of parameters that a recorded step changes.
#[derive(Debug)]
struct Versions(Vec<Arc<Version>>);

impl Replayed for Versions {
    fn advance(&self) -> fp8_kernels::Result<()> {
        self.0.iter().for_each(|version| version.advance());
        Ok(())
    }
}

/// Reads the part of a parameter's state that has this name, such as `exp_avg`; `None` where there is none.
type ReadState<'a> = dyn FnMut(&Arc<str>, &str, &Tensor) -> Result<Option<Tensor>> + 'a;

/// One parameter's moments, and its f32 copy.
#[derive(Debug)]
pub(crate) struct AdamWState {
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    pub(crate) main_param: Option<Tensor>,
}

impl AdamW {
    /// Before the first step.
    ///
    /// # Errors
    /// A decay outside 0 … 1, an ε or weight decay that is negative or not finite.
    pub fn new(options: AdamWOptions) -> Result<Self> {
        let AdamWOptions { beta1, beta2, eps, weight_decay, .. } = options;
        let error = |option, value: f32, remedy: &str| {
            let (layer, remedy) = ("AdamW".to_owned(), remedy.to_owned());
            Err(Error::Option { layer, option, value: value.to_string(), remedy })
        };
        for (option, value) in [("beta1", beta1), ("beta2", beta2)] {
            if !(0.0..1.0).contains(&value) {
                return error(option, value, "expected 0 or more and less than 1");
            }
        }
        for (option, value) in [("eps", eps), ("weight_decay", weight_decay)] {
            if !(value >= 0.0 && value.is_finite()) {
                return error(option, value, "expected finite and 0 or more");
            }
        }
        let progress = Progress {
            options,
            step: AtomicU64::new(0),
            lr: Mutex::new(0.0),
            skipped_before: AtomicU64::new(0),
            on_device: OnceLock::new(),
        };
        Ok(Self { progress: Arc::new(progress), state: BTreeMap::new() })
    }

    /// Steps taken, those that were skipped included.
    pub fn steps(&self) -> u64 {
        self.progress.step.load(Relaxed)
    }

    /// How many of the [`steps`](Self::steps) changed nothing, because their gradients had no finite norm. On a GPU this
    /// waits until all work queued so far is done.
    ///
    /// # Errors
    /// While a step is recorded; the device failed.
    pub fn skipped_steps(&self) -> Result<u64> {
        let on_device = self.progress.on_device.get();
        let counted = on_device.map_or(Ok(0), |on_device| on_device.skipped.read())?;
        Ok(self.progress.skipped_before.load(Relaxed).saturating_add(counted))
    }

    /// Goes on from parameters that something else has set: their f32 copies (`main_params`) become their values, where they
    /// lie. Without it the next step goes on from the copies and overwrites what was set; f32 parameters have no copies.
    /// [`checkpoint::load`](crate::checkpoint::load) does this by itself.
    ///
    /// # Errors
    /// While a step is recorded; a parameter of another shape than in the steps before; the device failed.
    pub fn reload_params(&mut self, model: &(impl Layer + ?Sized)) -> Result<()> {
        // All of them fit, before the first is changed.
        model.visit(&mut |parameter| {
            let Some(state) = self.state.get(parameter.name()) else { return Ok(()) };
            state.expect_shape_of(parameter)?;
            Ok(parameter
                .tensor()
                .device()
                .expect_eager("AdamW", "reload parameters before the step is recorded")?)
        })?;
        model.visit(&mut |parameter| {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            let Some(main) = self.state.get_mut(name).and_then(|state| state.main_param.as_mut()) else {
                return Ok(());
            };
            put_into(main, ops::cast(tensor, DType::F32)?, name)
        })
    }

    /// The rate of the next replay of a recorded [`step`](Self::step).
    ///
    /// # Errors
    /// A rate that is negative or not finite.
    pub fn set_lr(&self, lr: f32) -> Result<()> {
        self.progress.set_lr(lr)
    }

    /// State for those of a model's parameters that have moments in a file, but none of their shape here.
    pub(crate) fn new_state(
        &self,
        model: &(impl Layer + ?Sized),
        moments: &BTreeSet<Arc<str>>,
    ) -> Result<BTreeMap<Arc<str>, AdamWState>> {
        let mut new = BTreeMap::new();
        model.visit(&mut |parameter| {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            let fits = |state: &AdamWState| {
                state.exp_avg.shape() == tensor.shape()
                    && state.main_param.is_some() == self.has_main_param(tensor)
            };
            if moments.contains(name) && !self.state.get(name).is_some_and(fits) {
                new.insert(name.clone(), AdamWState::new(tensor, self.progress.options.main_params)?);
            }
            Ok(())
        })?;
        Ok(new)
    }

    /// Resumes after that many steps and skipped steps, with what `read` returns for a parameter's name, the part of its
    /// state and a tensor of its shape; where it returns nothing, the parameter begins anew. State that is here keeps its
    /// place, for recorded steps; `new` is that of other parameters.
    pub(crate) fn resume(
        &mut self,
        model: &(impl Layer + ?Sized),
        [steps, skipped]: [u64; 2],
        new: BTreeMap<Arc<str>, AdamWState>,
        read: &mut ReadState<'_>,
    ) -> Result<()> {
        self.state.extend(new);
        let mut names = BTreeSet::new();
        model.visit(&mut |parameter| {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            names.insert(name.clone());
            let Some(state) = self.state.get_mut(name) else { return Ok(()) };
            if state.exp_avg.shape() != tensor.shape() {
                // Without moments in the file, or there would be new ones.
                *state = AdamWState::new(tensor, state.main_param.is_some())?;
            }
            for (part, moment) in [("exp_avg", &mut state.exp_avg), ("exp_avg_sq", &mut state.exp_avg_sq)] {
                let value = match read(name, part, tensor)? {
                    Some(value) => value,
                    None => Tensor::zeros(*tensor.shape(), DType::F32, tensor.device())?,
                };
                put_into(moment, value, name)?;
            }
            if let Some(main_param) = &mut state.main_param {
                let value = match read(name, "main_param", tensor)? {
                    Some(value) => value,
                    None => ops::cast(tensor, DType::F32)?,
                };
                put_into(main_param, value, name)?;
            }
            Ok(())
        })?;
        self.state.retain(|name, _| names.contains(name));
        self.progress.on_device.get().map_or(Ok(()), |on_device| on_device.skipped.reset())?;
        self.progress.skipped_before.store(skipped, Relaxed);
        self.progress.step.store(steps, Relaxed);
        Ok(())
    }

    /// Updates every parameter from its gradient, unless the norm of all gradients is not finite: then nothing changes but
    /// the counts (see the type's text). Gradients stay: [`zero_grad`](crate::zero_grad) clears them.
    ///
    /// This reads all gradients once more, for their norm. After [`clip_grad_norm`](crate::clip_grad_norm), give
    /// [`step_with_norm`](Self::step_with_norm) the norm that it returns.
    ///
    /// # Errors
    /// A rate that is negative or not finite, a parameter whose storage others hold too, two parameters of one name, a
    /// parameter of another shape than in the steps before. Nothing has changed then.
    pub fn step(&mut self, model: &mut (impl Layer + ?Sized), lr: f32) -> Result<()> {
        self.step_if_finite(model, lr, None)
    }

    /// [`step`](Self::step) with the norm of all gradients, one f32 on their device: what
    /// [`clip_grad_norm`](crate::clip_grad_norm) returns. Among several ranks it must be the norm of the summed gradients,
    /// so that all skip a step or none.
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
        self.check(model)?;
        let Some(device) = self.prepare(model)? else { return self.progress.set_lr(lr) };
        let computed = if norm.is_none() { Some(grad_norm(model)?) } else { None };
        let Some(norm) = norm.or(computed.as_ref()) else { return Ok(()) };
        self.progress.set_lr(lr)?;
        let progress = self.progress.clone();
        progress.on_device(&device)?;
        progress.advance()?;
        device.on_replay(progress.clone());
        let mut taken = Vec::new();
        let placeholder = Tensor::zeros([0], DType::F32, &Device::cpu())?;
        let visited = model.visit_mut(&mut |parameter| {
            taken.push(parameter.take(&placeholder));
            Ok(())
        });
        let updated = visited.and_then(|()| self.update(&device, &mut taken, norm));
        let mut tensors: BTreeMap<_, _> = taken.into_iter().map(|taken| (taken.name, taken.tensor)).collect();
        let returned = model.visit_mut(&mut |parameter| {
            if let Some(tensor) = tensors.remove(parameter.name()) {
                parameter.put(tensor);
            }
            Ok(())
        });
        // A recorded step that fails takes its count back by itself.
        if updated.is_err() && device.capture_number().is_none() {
            progress.retreat();
        }
        updated.and(returned)
    }

    /// All in one launch for each weight decay.
    fn update(&mut self, device: &Device, taken: &mut [Taken], norm: &Tensor) -> Result<()> {
        let mut states: BTreeMap<&str, &mut AdamWState> =
            self.state.iter_mut().map(|(name, state)| (&**name, state)).collect();
        let mut groups: [Vec<AdamWTensor<'_>>; 2] = Default::default();
        let versions: Vec<Arc<Version>> = taken.iter().map(|taken| taken.version.clone()).collect();
        for Taken { name, tensor, main_grad, .. } in taken {
            let Some(AdamWState { exp_avg, exp_avg_sq, main_param }) = states.remove(&**name) else {
                continue;
            };
            let decays = tensor.shape().len() >= 2;
            groups[usize::from(!decays)].push(AdamWTensor {
                name,
                param: tensor,
                main_grad,
                exp_avg,
                exp_avg_sq,
                main_param: main_param.as_mut(),
                slot: None,
            });
        }
        versions.iter().for_each(|version| version.advance());
        device.on_replay(Arc::new(Versions(versions)));
        let OnDevice { factors, skipped } = self.progress.on_device(device)?;
        let [decayed, undecayed] = &mut groups;
        // Together: what fails before the first launch has changed nothing.
        let groups = &mut [(&mut **decayed, &factors[0]), (&mut **undecayed, &factors[1])];
        ops::adamw_groups(groups, Some(NormCheck { norm, skipped }))?;
        Ok(())
    }

    /// Moments of parameters that are new here; answers with the device of all, if there is any parameter.
    fn prepare(&mut self, model: &(impl Layer + ?Sized)) -> Result<Option<Device>> {
        let (mut device, mut new) = (None, BTreeMap::new());
        model.visit(&mut |parameter| {
            let tensor = parameter.tensor();
            device.get_or_insert_with(|| tensor.device().clone());
            if !self.state.contains_key(parameter.name()) {
                let remedy = "the optimizer's first step makes its state: run it before";
                tensor.device().expect_eager("AdamW", remedy)?;
                let state = AdamWState::new(tensor, self.progress.options.main_params)?;
                new.insert(parameter.name().clone(), state);
            }
            Ok(())
        })?;
        self.state.extend(new);
        Ok(device)
    }
}

impl AdamW {
    /// All that could make a step fail: a refusal half-way would leave some parameters a step ahead of others.
    fn check(&self, model: &(impl Layer + ?Sized)) -> Result<()> {
        let mut names = BTreeSet::new();
        model.visit(&mut |parameter| {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            if !names.insert(name.clone()) {
                return Err(Error::DuplicateParameter(name.clone()));
            }
            if tensor.holders() > 0 {
                let (name, holders) = (name.to_string(), tensor.holders());
                return Err(fp8_kernels::Error::Shared { name, holders }.into());
            }
            self.state.get(name).map_or(Ok(()), |state| state.expect_shape_of(parameter))
        })
    }

    pub(crate) fn options(&self) -> &AdamWOptions {
        &self.progress.options
    }

    /// Tells whether this optimizer still exists.
    pub(crate) fn life(&self) -> Weak<dyn Any + Send + Sync> {
        let progress: Arc<dyn Any + Send + Sync> = self.progress.clone();
        Arc::downgrade(&progress)
    }

    /// Whether a parameter has an f32 copy here.
    pub(crate) fn has_main_param(&self, parameter: &Tensor) -> bool {
        self.progress.options.main_params && parameter.dtype() != DType::F32
    }
}

impl AdamWState {
    /// Its tensors, with their names in a checkpoint.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let main_param = self.main_param.as_ref().map(|copy| ("main_param", copy));
        [("exp_avg", &self.exp_avg), ("exp_avg_sq", &self.exp_avg_sq)].into_iter().chain(main_param)
    }

    fn expect_shape_of(&self, parameter: &Parameter) -> Result<()> {
        let (lhs, rhs) = (*parameter.tensor().shape(), *self.exp_avg.shape());
        if lhs == rhs {
            return Ok(());
        }
        let (what, remedy) = ("parameter and its moments", "each model has an optimizer of its own");
        Err(fp8_kernels::Error::Shapes { op: "AdamW", what, lhs, rhs, remedy }.into())
    }

    fn new(parameter: &Tensor, main_params: bool) -> Result<Self> {
        let zeros = || Tensor::zeros(*parameter.shape(), DType::F32, parameter.device());
        let wants = main_params && parameter.dtype() != DType::F32;
        let main_param = wants.then(|| ops::cast(parameter, DType::F32)).transpose()?;
        Ok(Self { exp_avg: zeros()?, exp_avg_sq: zeros()?, main_param })
    }
}
