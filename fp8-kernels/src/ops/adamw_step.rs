//! The numbers of one AdamW step: what a caller sets, and the factors that kernels read.

use crate::{Error, Result};

/// The numbers of one step of [`adamw`](super::adamw()). The defaults are those of PyTorch's `AdamW`.
///
/// The update of a parameter `p` with moments `m` and `v`, in f32, where `g = main_grad · grad_scale` and `t = step`:
///
/// 1. `p = p · (1 − lr·weight_decay)`
/// 2. `m = m + (1 − beta1)·(g − m)` and `v = beta2·v + (1 − beta2)·g²`
/// 3. `p = p − lr / (1 − beta1ᵗ) · m / (√v / √(1 − beta2ᵗ) + eps)`
///
/// The factors that do not depend on the tensors, such as `1 − lr·weight_decay`, are computed in f64 on the host and
/// rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate, at least 0. Default: 1e-3.
    pub lr: f32,
    /// Decay of the first moment, in `[0, 1)`. Default: 0.9.
    pub beta1: f32,
    /// Decay of the second moment, in `[0, 1)`. Default: 0.999.
    pub beta2: f32,
    /// Added to the root of the second moment; at least 0. Default: 1e-8.
    pub eps: f32,
    /// Decoupled weight decay, at least 0. Default: 0.01.
    pub weight_decay: f32,
    /// The number of the step, counted from 1, for the bias corrections. Default: 1.
    pub step: u64,
    /// Factor applied to gradients before anything else, to undo a loss scale or to clip a norm. Default: 1.
    pub grad_scale: f32,
}

impl Default for AdamWStep {
    fn default() -> Self {
        let (lr, beta1, beta2, eps) = (1e-3, 0.9, 0.999, 1e-8);
        Self { lr, beta1, beta2, eps, weight_decay: 0.01, step: 1, grad_scale: 1.0 }
    }
}

/// The factors of one step, in the order in which kernels read them.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Factors {
    pub(crate) grad_scale: f32,
    pub(crate) keep: f32,
    pub(crate) new_first: f32,
    pub(crate) beta2: f32,
    pub(crate) new_second: f32,
    pub(crate) step_size: f32,
    pub(crate) root_correction: f32,
    pub(crate) eps: f32,
}

/// The numbers that the host uploads for a step: its factors, and the numbers from which the device computes the factors of
/// a step that it counts itself.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct StepFactors {
    pub(crate) factors: Factors,
    pub(crate) lr: f32,
    pub(crate) beta1: f32,
    pub(crate) weight_decay: f32,
    /// So that the number has its alignment.
    pub(crate) unused: f32,
    /// The number of the step, for random numbers.
    pub(crate) number: u64,
}

impl StepFactors {
    pub(crate) fn new(step: &AdamWStep) -> Self {
        let AdamWStep { lr, beta1, weight_decay, step: number, .. } = *step;
        Self { factors: Factors::new(step), lr, beta1, weight_decay, unused: 0.0, number }
    }
}

impl Factors {
    pub(crate) fn new(step: &AdamWStep) -> Self {
        let [lr, beta1, beta2] = [step.lr, step.beta1, step.beta2].map(f64::from);
        let power = |beta: f64| beta.powf(step.step as f64);
        Self {
            grad_scale: step.grad_scale,
            keep: (1.0 - lr * f64::from(step.weight_decay)) as f32,
            new_first: (1.0 - beta1) as f32,
            beta2: step.beta2,
            new_second: (1.0 - beta2) as f32,
            step_size: (lr / (1.0 - power(beta1))) as f32,
            root_correction: (1.0 - power(beta2)).sqrt() as f32,
            eps: step.eps,
        }
    }
}

pub(super) fn check_step(op: &'static str, step: &AdamWStep) -> Result<()> {
    let error = |option, value: String, remedy: &str| {
        Err(Error::Option { op, option, value, remedy: remedy.to_owned() })
    };
    for (option, value) in [("beta1", step.beta1), ("beta2", step.beta2)] {
        if !(0.0..1.0).contains(&value) {
            return error(option, value.to_string(), "a decay is at least 0 and less than 1");
        }
    }
    for (option, value) in [("lr", step.lr), ("eps", step.eps), ("weight_decay", step.weight_decay)] {
        if !(value.is_finite() && value >= 0.0) {
            return error(option, value.to_string(), "give a finite number of at least 0");
        }
    }
    if !step.grad_scale.is_finite() {
        return error("grad_scale", step.grad_scale.to_string(), "give a finite number, or skip the step");
    }
    if step.step == 0 {
        return error(
            "step",
            step.step.to_string(),
            "steps are numbered from 1: the bias corrections need it",
        );
    }
    Ok(())
}
