//! AdamW, and clipping by the gradients' norm.

use crate::parameter::{Taken, Version, put_into};
use crate::{Error, Layer, Result};
use fp8_kernels::ops::{self, AdamWFactors, AdamWStep, AdamWTensor};
use fp8_kernels::{DType, Device, Replayed, Tensor};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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
    /// Where the device reads a step's numbers: with weight decay, and without.
    factors: OnceLock<[Arc<AdamWFactors>; 2]>,
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

    fn factors(&self, device: &Device) -> Result<&[Arc<AdamWFactors>; 2]> {
        if let Some(factors) = self.factors.get() {
            return Ok(factors);
        }
        let new = |decays| AdamWFactors::new(&self.numbers(decays), device);
        let made = [new(true)?, new(false)?];
        Ok(self.factors.get_or_init(|| made))
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
        let Some([decayed, undecayed]) = self.factors.get() else { return Ok(()) };
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
        let (step, lr, factors) = (AtomicU64::new(0), Mutex::new(0.0), OnceLock::new());
        Ok(Self { progress: Arc::new(Progress { options, step, lr, factors }), state: BTreeMap::new() })
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.progress.step.load(Relaxed)
    }

    /// Goes on from parameters that something else has set: their f32 copies (`main_params`) become their values, where they
    /// lie. Without it the next step goes on from the copies and overwrites what was set; f32 parameters have no copies.
    /// [`checkpoint::load`](crate::checkpoint::load) does this by itself.
    ///
    /// # Errors
    /// While a step is recorded; a parameter of another shape than in the steps before; the device failed.
    pub fn reload_params(&mut self, model: &(impl Layer + ?Sized)) -> Result<()> {
        model.visit(&mut |parameter| {
            let (name, tensor) = (parameter.name(), parameter.tensor());
            let Some(main) = self.state.get_mut(name).and_then(|state| state.main_param.as_mut()) else {
                return Ok(());
            };
            tensor.device().expect_eager("AdamW", "reload parameters before the step is recorded")?;
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

    /// Resumes after that many steps. State that is here stays where it lies, for recorded steps: a parameter that has none
    /// in `state` begins anew.
    pub(crate) fn resume(
        &mut self,
        model: &(impl Layer + ?Sized),
        steps: u64,
        mut state: BTreeMap<Arc<str>, AdamWState>,
    ) -> Result<()> {
        self.progress.step.store(steps, Relaxed);
        let main_params = self.progress.options.main_params;
        let mut old = std::mem::take(&mut self.state);
        model.visit(&mut |parameter| {
            let name = parameter.name();
            let new = match (state.remove(name), old.remove(name)) {
                (Some(new), Some(mut old)) => {
                    old.set(new, name)?;
                    old
                }
                (None, Some(mut old)) => {
                    old.set(AdamWState::new(parameter.tensor(), main_params)?, name)?;
                    old
                }
                (Some(new), None) => new,
                (None, None) => return Ok(()),
            };
            self.state.insert(name.clone(), new);
            Ok(())
        })
    }

    /// Updates every parameter from its gradient. Gradients stay: [`zero_grad`](crate::zero_grad) clears them.
    ///
    /// # Errors
    /// A rate that is negative or not finite, a parameter whose storage others hold too, two parameters of one name, a
    /// parameter of another shape than in the steps before. Nothing has changed then.
    pub fn step(&mut self, model: &mut (impl Layer + ?Sized), lr: f32) -> Result<()> {
        self.check(model)?;
        let Some(device) = self.prepare(model)? else { return self.progress.set_lr(lr) };
        self.progress.set_lr(lr)?;
        let progress = self.progress.clone();
        progress.factors(&device)?;
        progress.advance()?;
        device.on_replay(progress.clone());
        let mut taken = Vec::new();
        let placeholder = Tensor::zeros([0], DType::F32, &Device::cpu())?;
        let visited = model.visit_mut(&mut |parameter| {
            taken.push(parameter.take(&placeholder));
            Ok(())
        });
        let updated = visited.and_then(|()| self.update(&device, &mut taken));
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
    fn update(&mut self, device: &Device, taken: &mut [Taken]) -> Result<()> {
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
        let factors = self.progress.factors(device)?;
        let [decayed, undecayed] = &mut groups;
        // Together: what fails before the first launch has changed nothing.
        ops::adamw_groups(&mut [(decayed, &factors[0]), (undecayed, &factors[1])], None)?;
        Ok(())
    }

    /// Moments of parameters that are new here; answers with the device of all, if there is any parameter.
    fn prepare(&mut self, model: &(impl Layer + ?Sized)) -> Result<Option<Device>> {
        let Self { progress, state } = self;
        let mut device = None;
        model.visit(&mut |parameter| {
            let tensor = parameter.tensor();
            device.get_or_insert_with(|| tensor.device().clone());
            if let Entry::Vacant(entry) = state.entry(parameter.name().clone()) {
                let remedy = "the optimizer's first step makes its state: run it before";
                tensor.device().expect_eager("AdamW", remedy)?;
                entry.insert(AdamWState::new(tensor, progress.options.main_params)?);
            }
            Ok(())
        })?;
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
            match self.state.get(name) {
                Some(state) if state.exp_avg.shape() != tensor.shape() => {
                    let (lhs, rhs) = (*tensor.shape(), *state.exp_avg.shape());
                    let (what, remedy) =
                        ("parameter and its moments", "each model has an optimizer of its own");
                    Err(fp8_kernels::Error::Shapes { op: "AdamW", what, lhs, rhs, remedy }.into())
                }
                _ => Ok(()),
            }
        })
    }

    /// Whether a parameter has an f32 copy here.
    pub(crate) fn has_main_param(&self, parameter: &Tensor) -> bool {
        self.progress.options.main_params && parameter.dtype() != DType::F32
    }
}

impl AdamWState {
    /// In place, where shapes agree.
    fn set(&mut self, new: Self, name: &str) -> Result<()> {
        let is_alike = self.exp_avg.shape() == new.exp_avg.shape();
        match (&mut self.main_param, new.main_param) {
            (Some(old), Some(new)) if is_alike => put_into(old, new, name)?,
            (old, new) => *old = new,
        }
        if !is_alike {
            (self.exp_avg, self.exp_avg_sq) = (new.exp_avg, new.exp_avg_sq);
            return Ok(());
        }
        put_into(&mut self.exp_avg, new.exp_avg, name)?;
        put_into(&mut self.exp_avg_sq, new.exp_avg_sq, name)
    }

    fn new(parameter: &Tensor, main_params: bool) -> Result<Self> {
        let zeros = || Tensor::zeros(*parameter.shape(), DType::F32, parameter.device());
        let wants = main_params && parameter.dtype() != DType::F32;
        let main_param = wants.then(|| ops::cast(parameter, DType::F32)).transpose()?;
        Ok(Self { exp_avg: zeros()?, exp_avg_sq: zeros()?, main_param })
    }
}

/// Scales all gradients so that their common L2 norm is at most `max_norm`; returns the norm before, one f32, which stays
/// on the device until it is read: the host waits for nothing. A norm that is not finite scales nothing: who reads it may
/// skip the step.
///
/// # Errors
/// A `max_norm` that is not greater than 0; gradients whose storage others hold too.
pub fn clip_grad_norm(model: &mut (impl Layer + ?Sized), max_norm: f32) -> Result<Tensor> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::Option {
            layer: "clip_grad_norm".to_owned(),
            option: "max_norm",
            value: max_norm.to_string(),
            remedy: "expected greater than 0".to_owned(),
        });
    }
    let mut grads = Vec::new();
    model.visit(&mut |parameter| {
        grads.push(parameter.main_grad().clone());
        Ok(())
    })?;
    let norm = ops::grad_norm(&grads.iter().collect::<Vec<_>>())?;
    drop(grads); // gradients are scaled in place, which needs them unshared
    model.visit_mut(&mut |parameter| {
        let name = parameter.name().clone();
        Ok(ops::clip_in_place(parameter.main_grad_mut(), &norm, max_norm, &name)?)
    })?;
    Ok(norm)
}
