//! Reference of `adamw` and `adamw_many`.

use super::{Buffer, dispatch::vectorized, parallel, parallel::CHUNK, quantize};
use crate::element::Float;
use crate::ops::{AdamWGroup, AdamWStep, AdamWTensor, Factors, NormCheck};
use crate::{Fp8Tensor, Result};
use half::{bf16, f16};

pub(crate) fn adamw(mut tensor: AdamWTensor<'_>, step: &AdamWStep) -> Result<()> {
    one(&mut tensor, &Factors::new(step))
}

/// All at a time, then their codes.
pub(crate) fn adamw_many(
    tensors: &mut [AdamWTensor<'_>],
    step: &AdamWStep,
) -> Result<Vec<Option<Fp8Tensor>>> {
    many(tensors, &Factors::new(step))
}

fn many(tensors: &mut [AdamWTensor<'_>], factors: &Factors) -> Result<Vec<Option<Fp8Tensor>>> {
    parallel::try_for_each(tensors.iter_mut(), |tensor| one(tensor, factors))?;
    quantize_all(tensors)
}

pub(crate) fn adamw_groups(
    groups: &mut [AdamWGroup<'_, '_>],
    check: Option<NormCheck<'_>>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    if let Some(NormCheck { norm, skipped }) = check
        && !norm.item()?.is_finite()
    {
        skipped.add_one()?;
        return skip(groups);
    }
    update_groups(groups, Factors::new)
}

/// Updates each group with the factors that `factors` returns for its numbers.
pub(super) fn update_groups(
    groups: &mut [AdamWGroup<'_, '_>],
    factors: impl Fn(&AdamWStep) -> Factors,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    groups.iter_mut().map(|(tensors, numbers)| many(tensors, &factors(&numbers.step()))).collect()
}

/// Leaves all parameters as they are.
pub(super) fn skip(groups: &[AdamWGroup<'_, '_>]) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    groups.iter().map(|(tensors, _)| quantize_all(tensors)).collect()
}

/// The codes of those that have a slot.
fn quantize_all(tensors: &[AdamWTensor<'_>]) -> Result<Vec<Option<Fp8Tensor>>> {
    let quantized = |tensor: &AdamWTensor<'_>| -> Result<Option<Fp8Tensor>> {
        let Some(slot) = tensor.slot else { return Ok(None) };
        Ok(quantize::quantize(tensor.param, &slot)?.as_fp8().cloned())
    };
    tensors.iter().map(quantized).collect()
}

fn one(tensor: &mut AdamWTensor<'_>, factors: &Factors) -> Result<()> {
    // All buffers before the first change: one that is shared leaves the others as they were.
    let name = tensor.name;
    let state = State {
        grad: tensor.main_grad.cpu_slice("adamw")?,
        exp_avg: tensor.exp_avg.as_mut_slice(&format!("{name}.exp_avg"))?,
        exp_avg_sq: tensor.exp_avg_sq.as_mut_slice(&format!("{name}.exp_avg_sq"))?,
    };
    let main = tensor.main_param.as_deref_mut();
    let main = main.map(|main| main.as_mut_slice::<f32>(&format!("{name}.main_param"))).transpose()?;
    match tensor.param.cpu_buffer("adamw")? {
        Buffer::BF16(_) => update::<bf16>(tensor.param.as_mut_slice(name)?, main, state, factors),
        Buffer::F16(_) => update::<f16>(tensor.param.as_mut_slice(name)?, main, state, factors),
        _ => update::<f32>(tensor.param.as_mut_slice(name)?, main, state, factors),
    }
    Ok(())
}

struct State<'a> {
    grad: &'a [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
}

/// Values in f32 while they are updated: so many stay in the first cache.
const PIECE: usize = 1024;

/// Chunk by chunk; no element reads another.
fn update<T: Float>(param: &mut [T], main: Option<&mut [f32]>, state: State<'_>, factors: &Factors) {
    let moments = state.exp_avg.chunks_mut(CHUNK).zip(state.exp_avg_sq.chunks_mut(CHUNK));
    let chunks = param.chunks_mut(CHUNK).zip(state.grad.chunks(CHUNK)).zip(moments);
    let chunk = |param: &mut [T], values: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]| {
        for ((value, &g), (m, v)) in values.iter_mut().zip(grad).zip(m.iter_mut().zip(v)) {
            *value = factors.step(*value, g, m, v);
        }
        T::round(values, param);
    };
    match main {
        Some(main) => {
            parallel::for_each(chunks.zip(main.chunks_mut(CHUNK)), |(((param, grad), (m, v)), main)| {
                vectorized(|| chunk(param, main, grad, m, v));
            });
        }
        None => parallel::for_each(chunks, |((param, grad), (m, v))| {
            vectorized(|| {
                let mut values = [0.0; PIECE];
                let moments = m.chunks_mut(PIECE).zip(v.chunks_mut(PIECE));
                for ((param, grad), (m, v)) in param.chunks_mut(PIECE).zip(grad.chunks(PIECE)).zip(moments) {
                    let values = &mut values[..param.len()];
                    T::widen(param, values);
                    chunk(param, values, grad, m, v);
                }
            });
        }),
    }
}

impl Factors {
    /// The new parameter; the moments become the new ones.
    #[inline(always)]
    pub(super) fn step(&self, p: f32, grad: f32, m: &mut f32, v: &mut f32) -> f32 {
        let g = grad * self.grad_scale;
        *m += self.new_first * (g - *m);
        *v = self.beta2 * *v + self.new_second * (g * g);
        let root = v.sqrt() / self.root_correction + self.eps;
        p * self.keep - self.step_size * (*m / root)
    }
}
