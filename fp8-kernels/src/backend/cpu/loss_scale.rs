//! Reference of the operations of a loss scale.
//!
//! The factors of a step that the device counts are computed as in loss_scale.cu, operation by operation.

use super::{adamw, elementwise};
use crate::ops::{AdamWGroup, AdamWStep, Factors, LossScale, LossScaleRule, ScaledStep};
use crate::{Arena, Cell, Fp8Tensor, Result, Tensor, cells};

pub(crate) fn apply_loss_scale(x: &Tensor, scale: &LossScale) -> Result<Tensor> {
    elementwise::scale(x, scale.cell().read()?)
}

pub(crate) fn undo_loss_scale(x: &mut Tensor, scale: &LossScale, name: &str) -> Result<()> {
    elementwise::scale_in_place(x, 1.0 / scale.cell().read()?, name)
}

pub(crate) fn check_finite(norm: &Tensor, overflow: &Cell) -> Result<()> {
    if norm.item()?.is_finite() { Ok(()) } else { overflow.write(1.0) }
}

pub(crate) fn check_amaxes(arena: &Arena, overflow: &Cell) -> Result<()> {
    let row = arena.cpu_history("check_amaxes")?.iter().take(arena.slots()).map(cells::value);
    if row.into_iter().all(f32::is_finite) { Ok(()) } else { overflow.write(1.0) }
}

pub(crate) fn update_loss_scale(loss_scale: &LossScale, rule: Option<&LossScaleRule>) -> Result<()> {
    let mut state = loss_scale.state()?;
    if loss_scale.overflow().read()? != 0.0 {
        // Counts that are full begin anew, as on a GPU.
        state.skipped_steps = state.skipped_steps.wrapping_add(1);
        if let Some(rule) = rule {
            state.scale = (state.scale * rule.backoff_factor).max(f32::MIN_POSITIVE);
            state.growth_tracker = 0;
        }
    } else if let Some(rule) = rule {
        state.growth_tracker = state.growth_tracker.wrapping_add(1);
        if state.growth_tracker >= rule.growth_interval {
            state.growth_tracker = 0;
            let grown = state.scale * rule.growth_factor;
            if grown.is_finite() {
                state.scale = grown;
            }
        }
    }
    loss_scale.set_state(&state)
}

pub(crate) fn adamw_groups_scaled(
    groups: &mut [AdamWGroup<'_, '_>],
    step: &ScaledStep<'_>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    match decide(step)? {
        Some(decided) => adamw::update_groups(groups, |numbers| decided.factors(numbers)),
        None => adamw::skip(groups),
    }
}

/// A step that is taken: its number in the bias corrections, and the factor of its gradients.
pub(super) struct Decided {
    number: u64,
    inverse: f32,
}

impl Decided {
    pub(super) fn factors(&self, step: &AdamWStep) -> Factors {
        factors(step, self.number, self.inverse)
    }
}

/// Counts a step; `None` if it is skipped.
pub(super) fn decide(step: &ScaledStep<'_>) -> Result<Option<Decided>> {
    let overflow = step.loss_scale.map_or(Ok(0.0), |scale| scale.overflow().read())? != 0.0;
    let norm = step.norm.map_or(Ok(0.0), Tensor::item)?;
    let skips = overflow || !norm.is_finite();
    let number = step.updates.read()?.saturating_add(1);
    if !skips || step.loss_scale.is_none() {
        step.updates.set(number)?;
    }
    if skips {
        step.loss_scale.map_or(Ok(()), |scale| scale.overflow().write(1.0))?;
        step.skipped.add_one()?;
        return Ok(None);
    }
    let inverse = match step.loss_scale.filter(|_| step.gradients_are_scaled) {
        Some(scale) => 1.0 / scale.cell().read()?,
        None => 1.0,
    };
    Ok(Some(Decided { number, inverse }))
}

/// The factors of step `number`, whatever number `step` has, for gradients that are multiplied by `inverse`.
fn factors(step: &AdamWStep, number: u64, inverse: f32) -> Factors {
    let (first, second) = (complement(power(step.beta1, number)), complement(power(step.beta2, number)));
    Factors {
        grad_scale: step.grad_scale * inverse,
        step_size: quotient(step.lr, first),
        root_correction: root(second),
        ..Factors::new(step)
    }
}

/// A number as the sum of two f32, the second of which is at most half an ulp of the first.
type Pair = (f32, f32);

/// `βⁿ` by squaring.
fn power(beta: f32, mut n: u64) -> Pair {
    let (mut result, mut base) = ((1.0, 0.0), (beta, 0.0));
    while n > 0 {
        if n & 1 == 1 {
            result = product(result, base);
        }
        base = product(base, base);
        n >>= 1;
    }
    result
}

fn product(a: Pair, b: Pair) -> Pair {
    let hi = a.0 * b.0;
    let lo = a.0.mul_add(b.0, -hi) + (a.0 * b.1 + a.1 * b.0);
    pair(hi, lo)
}

/// `1 − p` for p from 0 to less than 1.
fn complement(p: Pair) -> Pair {
    let hi = 1.0 - p.0;
    pair(hi, ((1.0 - hi) - p.0) - p.1)
}

/// The sum of two f32 of which the first is the larger.
fn pair(hi: f32, lo: f32) -> Pair {
    let sum = hi + lo;
    (sum, lo - (sum - hi))
}

/// `a / b`, rounded once but for the rarest ties.
fn quotient(a: f32, b: Pair) -> f32 {
    let first = a / b.0;
    let rest = (-first).mul_add(b.0, a) - first * b.1;
    let better = first + rest / b.0;
    if better.is_finite() { better } else { first }
}

/// `√a`, likewise.
fn root(a: Pair) -> f32 {
    let first = a.0.sqrt();
    let rest = (-first).mul_add(first, a.0) + a.1;
    first + rest / (first + first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The distance in representable values.
    fn ulps(a: f32, b: f32) -> u32 {
        a.to_bits().abs_diff(b.to_bits())
    }

    #[test]
    fn factors_equal_those_of_the_host_within_one_ulp() {
        let betas =
            [0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999_999, 1.0 - f32::EPSILON / 2.0, 1e-30];
        let steps = (1..300).chain([1000, 4095, 65_537, 1_000_003, 16_777_217, 1 << 40, u64::MAX]);
        let mut differ = 0;
        for step in steps {
            for (i, beta1) in betas.into_iter().enumerate() {
                let beta2 = betas[betas.len() - 1 - i];
                let lr = 1e-3 * (1.0 + i as f32 / 7.0);
                let step = AdamWStep { lr, beta1, beta2, step, grad_scale: 0.5, ..Default::default() };
                let (want, got) = (Factors::new(&step), factors(&step, step.step, 0.25));
                for (want, got) in
                    [(want.step_size, got.step_size), (want.root_correction, got.root_correction)]
                {
                    differ += u32::from(want != got);
                    assert!(ulps(want, got) <= 1, "{step:?}: {want:e} and {got:e}");
                }
                assert_eq!((got.grad_scale, got.keep), (0.125, want.keep));
            }
        }
        assert!(differ < 20, "{differ} factors are not rounded as the host's");
    }

    #[test]
    fn extreme_rates_stay_what_the_host_makes_of_them() {
        for lr in [0.0, f32::from_bits(1), f32::MIN_POSITIVE, 1e38, f32::MAX] {
            for number in [1, 2, 1000] {
                let step = AdamWStep { lr, step: number, ..Default::default() };
                let (want, got) = (Factors::new(&step).step_size, factors(&step, number, 1.0).step_size);
                assert!(ulps(want, got) <= 1, "{lr:e}, step {number}: {want:e} and {got:e}");
            }
        }
    }
}
