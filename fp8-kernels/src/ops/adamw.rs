//! AdamW, in place, one parameter a call. In f32, with g = main_grad · grad_scale and t = step:
//!
//! 1. `p = p · (1 − lr·weight_decay)`
//! 2. `m = m + (1 − beta1)·(g − m)`, `v = beta2·v + (1 − beta2)·g²`
//! 3. `p = p − lr / (1 − beta1ᵗ) · m / (√v / √(1 − beta2ᵗ) + eps)`
//!
//! The factors are computed in f64 on the host and rounded to f32 once. With f32 main parameters those are updated and
//! rounded into `param`; without, `param` itself is updated in f32 and rounded once. The same bits for any number of
//! threads.

use crate::device::Backend;
use crate::{DType, Error, Result, Tensor, cpu};

/// The numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment, in `[0, 1)`.
    pub beta1: f32,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// The step's number, from 1 on.
    pub step: u64,
    /// Multiplies gradients first: undoes a loss scale, or clips a norm.
    pub grad_scale: f32,
}

impl Default for AdamWStep {
    fn default() -> Self {
        let (lr, beta1, beta2, eps) = (1e-3, 0.9, 0.999, 1e-8);
        Self { lr, beta1, beta2, eps, weight_decay: 0.01, step: 1, grad_scale: 1.0 }
    }
}

/// Updates `param` (f32, bf16 or f16) and its moments (f32), and `main_param` (f32) if there is one. Where an error is
/// returned nothing has changed. `name` is what it calls the parameter.
///
/// # Errors
/// Shapes that differ, other dtypes, shared storage, a step of 0, an option outside its range.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let mut w = Tensor::scalar(1.0, &cpu);
/// let (mut m, mut v) = (Tensor::scalar(0.0, &cpu), Tensor::scalar(0.0, &cpu));
/// let step = ops::AdamWStep { lr: 0.5, weight_decay: 0.0, ..Default::default() };
/// ops::adamw(&mut w, &Tensor::scalar(-3.0, &cpu), &mut m, &mut v, None, &step, "w")?;
/// assert!((w.item()? - 1.5).abs() < 1e-6); // the first step is as long as the learning rate
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn adamw(
    param: &mut Tensor,
    main_grad: &Tensor,
    exp_avg: &mut Tensor,
    exp_avg_sq: &mut Tensor,
    main_param: Option<&mut Tensor>,
    step: &AdamWStep,
    name: &str,
) -> Result<()> {
    let op = "adamw";
    param.expect_float(op, "param")?;
    let pairs = [
        ("main_grad", "param and main_grad", Some(main_grad)),
        ("exp_avg", "param and exp_avg", Some(&*exp_avg)),
        ("exp_avg_sq", "param and exp_avg_sq", Some(&*exp_avg_sq)),
        ("main_param", "param and main_param", main_param.as_deref()),
    ];
    for (what, pair, tensor) in pairs {
        let Some(tensor) = tensor else { continue };
        tensor.expect_dtype(op, what, DType::F32)?;
        param.device().expect_same(op, tensor.device())?;
        param.expect_same_shape(op, pair, tensor)?;
    }
    check_step(op, step)?;
    match param.device().backend() {
        Backend::Cpu => cpu::adamw::adamw(param, main_grad, [exp_avg, exp_avg_sq], main_param, step, name),
    }
}

fn check_step(op: &'static str, step: &AdamWStep) -> Result<()> {
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
