//! AdamW, and clipping by the gradients' norm.

use crate::{Error, Layer, Result};
use fp8_kernels::ops::{self, AdamWStep};
use fp8_kernels::{DType, Tensor};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    pub(crate) step: u64,
    pub(crate) state: BTreeMap<Arc<str>, AdamWState>,
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
        Ok(Self { options, step: 0, state: BTreeMap::new() })
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Updates every parameter from its gradient. Gradients stay: [`zero_grad`](crate::zero_grad) clears them.
    ///
    /// # Errors
    /// A rate that is negative or not finite, a parameter whose storage others hold too, two parameters of one name, a
    /// parameter of another shape than in the steps before. Nothing has changed then.
    pub fn step(&mut self, model: &mut (impl Layer + ?Sized), lr: f32) -> Result<()> {
        if !(lr >= 0.0 && lr.is_finite()) {
            return Err(Error::Option {
                layer: "AdamW".to_owned(),
                option: "lr",
                value: lr.to_string(),
                remedy: "expected finite and 0 or more".to_owned(),
            });
        }
        self.check(model)?;
        self.step += 1;
        let Self { options, step, state } = self;
        model.visit_mut(&mut |parameter| {
            let name = parameter.name().clone();
            let state = match state.entry(name.clone()) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    entry.insert(AdamWState::new(parameter.tensor(), options.main_params)?)
                }
            };
            let weight_decay = if parameter.tensor().shape().len() < 2 { 0.0 } else { options.weight_decay };
            let AdamWOptions { beta1, beta2, eps, .. } = *options;
            let now = AdamWStep { lr, beta1, beta2, eps, weight_decay, step: *step, grad_scale: 1.0 };
            parameter.update(|tensor, grad| {
                let AdamWState { exp_avg, exp_avg_sq, main_param } = state;
                Ok(ops::adamw(tensor, grad, exp_avg, exp_avg_sq, main_param.as_mut(), &now, &name)?)
            })
        })
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
        self.options.main_params && parameter.dtype() != DType::F32
    }
}

impl AdamWState {
    fn new(parameter: &Tensor, main_params: bool) -> Result<Self> {
        let zeros = || Tensor::zeros(*parameter.shape(), DType::F32, parameter.device());
        let wants = main_params && parameter.dtype() != DType::F32;
        let main_param = wants.then(|| ops::cast(parameter, DType::F32)).transpose()?;
        Ok(Self { exp_avg: zeros()?, exp_avg_sq: zeros()?, main_param })
    }
}

/// Scales all gradients so that their common L2 norm is at most `max_norm`; returns the norm before. A norm that is not
/// finite scales nothing: the caller sees it and may skip the step.
///
/// # Errors
/// A `max_norm` that is not greater than 0.
pub fn clip_grad_norm(model: &mut (impl Layer + ?Sized), max_norm: f32) -> Result<f32> {
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
    let norm = ops::grad_norm(&grads.iter().collect::<Vec<_>>())?.item()?;
    drop(grads); // gradients are scaled in place, which needs them unshared
    if norm.is_finite() && norm > max_norm {
        let factor = max_norm / norm;
        model.visit_mut(&mut |parameter| {
            let name = parameter.name().clone();
            Ok(ops::scale_in_place(parameter.main_grad_mut(), factor, &name)?)
        })?;
    }
    Ok(norm)
}
