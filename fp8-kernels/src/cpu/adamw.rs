//! Reference of `adamw`.

use super::{Buffer, dispatch::vectorized, parallel::CHUNK};
use crate::dtype::Float;
use crate::ops::AdamWStep;
use crate::{Result, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

pub(crate) fn adamw(
    param: &mut Tensor,
    main_grad: &Tensor,
    moments: [&mut Tensor; 2],
    main_param: Option<&mut Tensor>,
    step: &AdamWStep,
    name: &str,
) -> Result<()> {
    // All buffers before the first change: one that is shared leaves the others as they were.
    let grad = main_grad.as_slice::<f32>()?;
    let [exp_avg, exp_avg_sq] = moments;
    let exp_avg = exp_avg.as_mut_slice::<f32>(&format!("{name}.exp_avg"))?;
    let exp_avg_sq = exp_avg_sq.as_mut_slice::<f32>(&format!("{name}.exp_avg_sq"))?;
    let main = main_param.map(|main| main.as_mut_slice::<f32>(&format!("{name}.main_param"))).transpose()?;
    let factors = Factors::new(step);
    let state = State { grad, exp_avg, exp_avg_sq };
    match param.buffer() {
        Buffer::BF16(_) => update::<bf16>(param.as_mut_slice(name)?, main, state, &factors),
        Buffer::F16(_) => update::<f16>(param.as_mut_slice(name)?, main, state, &factors),
        _ => update::<f32>(param.as_mut_slice(name)?, main, state, &factors),
    }
    Ok(())
}

struct State<'a> {
    grad: &'a [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
}

/// Chunk by chunk; no element reads another.
fn update<T: Float>(param: &mut [T], main: Option<&mut [f32]>, state: State<'_>, factors: &Factors) {
    let grads = state.grad.par_chunks(CHUNK);
    let moments = state.exp_avg.par_chunks_mut(CHUNK).zip(state.exp_avg_sq.par_chunks_mut(CHUNK));
    let chunks = param.par_chunks_mut(CHUNK).zip(grads).zip(moments);
    let chunk = |param: &mut [T], values: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]| {
        for ((value, &g), (m, v)) in values.iter_mut().zip(grad).zip(m.iter_mut().zip(v)) {
            *value = factors.step(*value, g, m, v);
        }
        T::round(values, param);
    };
    match main {
        Some(main) => {
            chunks.zip(main.par_chunks_mut(CHUNK)).for_each(|(((param, grad), (m, v)), main)| {
                vectorized(|| chunk(param, main, grad, m, v));
            });
        }
        None => chunks.for_each_init(Vec::new, |scratch, ((param, grad), (m, v))| {
            vectorized(|| {
                scratch.resize(param.len(), 0.0);
                T::widen(param, scratch);
                chunk(param, scratch, grad, m, v);
            });
        }),
    }
}

/// What one step multiplies by.
struct Factors {
    grad_scale: f32,
    keep: f32,
    new_first: f32,
    beta2: f32,
    new_second: f32,
    step_size: f32,
    root_correction: f32,
    eps: f32,
}

impl Factors {
    fn new(step: &AdamWStep) -> Self {
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

    #[inline(always)]
    fn step(&self, p: f32, grad: f32, m: &mut f32, v: &mut f32) -> f32 {
        let g = grad * self.grad_scale;
        *m += self.new_first * (g - *m);
        *v = self.beta2 * *v + self.new_second * (g * g);
        let root = v.sqrt() / self.root_correction + self.eps;
        p * self.keep - self.step_size * (*m / root)
    }
}
