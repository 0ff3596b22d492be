//! AdamW with bias-corrected moments, as its paper writes it, in f64.

use fp8_kernels::ops::AdamWStep;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct State {
    pub(crate) p: f64,
    pub(crate) m: f64,
    pub(crate) v: f64,
}

pub(crate) fn adamw(state: State, grad: f64, step: &AdamWStep) -> State {
    let [lr, beta1, beta2, eps] = [step.lr, step.beta1, step.beta2, step.eps].map(f64::from);
    let g = grad * f64::from(step.grad_scale);
    let m = beta1 * state.m + (1.0 - beta1) * g;
    let v = beta2 * state.v + (1.0 - beta2) * g * g;
    let corrected = |moment: f64, beta: f64| moment / (1.0 - beta.powi(step.step as i32));
    let decayed = state.p - lr * f64::from(step.weight_decay) * state.p;
    State { p: decayed - lr * corrected(m, beta1) / (corrected(v, beta2).sqrt() + eps), m, v }
}
