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

#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) fp8_max: f64,
    pub(crate) margin: i32,
    pub(crate) power_of_two: bool,
    pub(crate) most_recent: bool,
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
        let mut seen: Vec<f32> =
            if options.most_recent { Vec::new() } else { self.window.iter().copied().collect() };
        seen.push(newest);
        if let Some(oldest) = self.window.pop_front() {
            // It counted above for the last time.
            let _: f32 = oldest;
            self.window.push_back(newest);
        }
        if self.scale.is_some() && !recompute {
            return;
        }
        let mut amax = f32::NAN;
        for value in seen {
            if !value.is_nan() && (amax.is_nan() || value > amax) {
                amax = value;
            }
        }
        if amax > 0.0 && amax.is_finite() {
            self.scale = Some(scale(amax, options));
        }
    }
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
