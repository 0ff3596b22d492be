//! Reference of `sample`.

use super::dispatch::vectorized;
use super::floats::Floats;
use super::parallel;
use crate::math::exp;
use crate::ops::{DropoutKey, Sampling};
use crate::{DropoutDraw, Result, Shape, Tensor};
use fp8_format::philox::philox4x32_10;

/// The result of a row without a logit greater than −∞.
const NO_TOKEN: i32 = -1;
/// The weight of the largest logit.
const LARGEST: u32 = 1 << 31;

pub(crate) fn sample(
    logits: &Tensor,
    shape: Shape,
    sampling: Option<(&Sampling, &DropoutDraw)>,
) -> Result<Tensor> {
    let data = Floats::of(logits, "sample", "logits")?;
    let [rows, vocabulary] = logits.shape().matrix();
    let sampling = match sampling {
        Some((sampling, draw)) => Some((sampling, draw.read()?)),
        None => None,
    };
    let tokens = parallel::map(0..rows, |row| {
        let mut scratch = Vec::new();
        let logits = data.read(row * vocabulary..(row + 1) * vocabulary, &mut scratch);
        let first = first_largest(logits);
        match (number(logits[first]), sampling) {
            (f32::NEG_INFINITY, _) => NO_TOKEN,
            (largest, Some((sampling, key))) => draw(logits, largest, sampling, random(key, row)),
            (_, None) => first as i32,
        }
    });
    Ok(Tensor::on_cpu(tokens, shape, logits.device()))
}

/// NaN counts as −∞.
#[inline(always)]
fn number(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

/// The place of the largest logit, the first of equal ones.
fn first_largest(logits: &[f32]) -> usize {
    let mut first = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if number(logit) > number(logits[first]) {
            first = i;
        }
    }
    first
}

fn random(key: DropoutKey, row: usize) -> u64 {
    let [low, high, ..] = philox4x32_10(key.offset.wrapping_add(row as u64), key.seed);
    u64::from(high) << 32 | u64::from(low)
}

/// ⌊a·b / 2⁶⁴⌋.
fn product_high(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

fn draw(logits: &[f32], largest: f32, sampling: &Sampling, random: u64) -> i32 {
    let mut weights = vec![0; logits.len()];
    vectorized(|| {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            let logit = number(logit);
            let exp = exp((logit - largest) * sampling.factor);
            *weight = if logit == largest { LARGEST } else { (exp * LARGEST as f32) as u32 };
        }
    });
    let least = least(logits, &weights, sampling);
    let weight = |i: usize| if number(logits[i]) >= least { weights[i].into() } else { 0u64 };
    let all: u64 = (0..logits.len()).map(weight).sum();
    let (target, mut sum) = (product_high(random, all), 0);
    let token = (0..logits.len()).find(|&i| {
        sum += weight(i);
        sum > target
    });
    token.unwrap_or_default() as i32
}

/// The smallest logit that is kept.
fn least(logits: &[f32], weights: &[u32], sampling: &Sampling) -> f32 {
    if sampling.top_k.is_none() && sampling.top_p.is_none() {
        return f32::NEG_INFINITY;
    }
    let mut sorted: Vec<(f32, u32)> =
        logits.iter().map(|&logit| number(logit)).zip(weights.iter().copied()).collect();
    let descending = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0);
    let mut least = f32::NEG_INFINITY;
    if let Some(k) = sampling.top_k {
        let (_, &mut (value, _), _) = sorted.select_nth_unstable_by(k as usize - 1, descending);
        least = value;
        sorted.retain(|&(logit, _)| logit >= least);
    }
    if let Some(p) = sampling.top_p {
        sorted.sort_unstable_by(descending);
        let all = sorted.iter().map(|&(_, weight)| u64::from(weight)).sum();
        let (needed, mut sum) = (product_high(all, p).max(1), 0);
        let last = sorted.iter().find(|&&(_, weight)| {
            sum += u64::from(weight);
            sum >= needed
        });
        least = last.map_or(least, |&(value, _)| value);
    }
    least
}
