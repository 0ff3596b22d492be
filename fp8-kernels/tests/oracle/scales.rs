//! Delayed scaling of one slot, told step by step.

use std::collections::VecDeque;

#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// Oldest to newest; its length is the history's less one.
    pub(crate) window: VecDeque<f32>,
    /// `None` until a finite amax > 0 was committed.
    pub(crate) scale: Option<f32>,
    pub(crate) non_finite: u64,
}

/// The choice of the amax that determines the scale, among those that count.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Choice {
    /// The largest of the newest `n`.
    Largest(usize),
    Average {
        decay: f32,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) fp8_max: f64,
    pub(crate) margin: i32,
    pub(crate) power_of_two: bool,
    pub(crate) choice: Choice,
    pub(crate) keep_non_finite: bool,
}

impl Slot {
    /// `amax` is `None` where the slot did not run.
    pub(crate) fn update(&mut self, amax: Option<f32>, recompute: bool, options: &Options) {
        let Some(newest) = amax else { return };
        if !newest.is_finite() && !options.keep_non_finite {
            self.non_finite += 1;
            return;
        }
        let mut seen: Vec<f32> = self.window.iter().copied().collect();
        seen.push(newest);
        if let Some(oldest) = self.window.pop_front() {
            // It counted above for the last time.
            let _: f32 = oldest;
            self.window.push_back(newest);
        }
        if self.scale.is_some() && !recompute {
            return;
        }
        let amax = match options.choice {
            Choice::Largest(n) => largest(&seen[seen.len() - n..]),
            Choice::Average { decay } => largest(&[average(&seen, decay), newest]),
        };
        if amax > 0.0 && amax.is_finite() {
            self.scale = Some(scale(amax, options));
        }
    }
}

/// NaN if there is no number.
fn largest(values: &[f32]) -> f32 {
    let mut numbers: Vec<f32> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    numbers.sort_by(f32::total_cmp);
    numbers.last().copied().unwrap_or(f32::NAN)
}

/// From the newest amax back to the oldest. Products and sums are taken in f64 and rounded to f32: a product of two f32 is
/// exact there, and a sum of two f32 has more than twice the digits of f32.
fn average(values: &[f32], decay: f32) -> f32 {
    let Some((&newest, older)) = values.split_last() else { return f32::NAN };
    let past = average(older, decay);
    if newest.is_nan() || newest == 0.0 {
        return past;
    }
    if past.is_nan() {
        return newest;
    }
    let new_share = (1.0 - f64::from(decay)) as f32;
    let product = |a: f32, b: f32| f64::from((f64::from(a) * f64::from(b)) as f32);
    (product(decay, past) + product(new_share, newest)) as f32
}

/// Rounded from f64, which is exact for a quotient of two f32.
pub(crate) fn scale(amax: f32, options: &Options) -> f32 {
    let smallest = f64::powi(2.0, -126);
    let largest = f64::from(f32::MAX);
    let amax = f64::from(amax);
    if !options.power_of_two {
        let quotient = options.fp8_max * f64::powi(2.0, -options.margin) / amax;
        return (quotient as f32 as f64).min(largest).max(smallest) as f32;
    }
    let quotient = f64::from((options.fp8_max / amax) as f32).min(f64::powi(2.0, 128));
    let mut exponent = -160;
    while f64::powi(2.0, exponent + 1) <= quotient {
        exponent += 1;
    }
    f64::powi(2.0, (exponent - options.margin).clamp(-126, 127)) as f32
}
