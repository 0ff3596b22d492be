//! Learning rates that depend only on the step, so that resuming needs no state.

use crate::{Error, Result};

/// A learning rate that rises linearly to a peak, then falls along a cosine to a fraction of it.
///
/// For step s (from 0), w steps of warm-up, n steps in all and a last fraction r: `peak · (s + 1) / w` while s < w, then
/// `peak · (r + (1 − r) · (1 + cos(π · (s − w + 1) / (n − w))) / 2)`, and `peak · r` from step n on, also if the warm-up is
/// longer than n. It depends only on the step, so a checkpoint need not store it.
///
/// ```
/// use fp8_nn::CosineSchedule;
/// let schedule = CosineSchedule::new(1e-3, 10, 100, 0.1)?;
/// assert_eq!(schedule.lr(9), 1e-3); // the last step of the warm-up
/// assert!((schedule.lr(99) - 1e-4).abs() < 1e-6);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CosineSchedule {
    peak: f32,
    warmup_steps: u64,
    total_steps: u64,
    min_ratio: f32,
}

impl CosineSchedule {
    /// Creates a schedule from the peak rate, the steps of warm-up, the steps in all, and the last rate as a fraction of the
    /// peak.
    ///
    /// # Errors
    /// A peak that is not finite and greater than 0, a ratio outside 0 … 1.
    pub fn new(peak: f32, warmup_steps: u64, total_steps: u64, min_ratio: f32) -> Result<Self> {
        let error = |option, value: f32, remedy: &str| {
            let (layer, remedy) = ("schedule".to_owned(), remedy.to_owned());
            Err(Error::Option { part: layer, option, value: value.to_string(), remedy })
        };
        if !(peak.is_finite() && peak > 0.0) {
            return error("lr", peak, "expected finite and greater than 0");
        }
        if !(0.0..=1.0).contains(&min_ratio) {
            return error("min_ratio", min_ratio, "expected 0 to 1");
        }
        Ok(Self { peak, warmup_steps, total_steps, min_ratio })
    }

    /// Returns the rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f32 {
        if step >= self.total_steps {
            return (f64::from(self.peak) * f64::from(self.min_ratio)) as f32;
        }
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f32 / self.warmup_steps as f32;
        }
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = ((step - self.warmup_steps).saturating_add(1) as f64 / length as f64).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        let ratio = f64::from(self.min_ratio) + (1.0 - f64::from(self.min_ratio)) * cosine;
        (f64::from(self.peak) * ratio) as f32
    }
}
