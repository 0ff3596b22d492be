//! Learning rates that depend only on the step, so that resuming needs no state.

use crate::{Error, Result};

/// A learning rate that rises linearly to a peak, and then stays there or falls to a fraction of it.
///
/// For step s (from 0), w steps of warm-up, n steps in all and a last fraction r, the rate is `peak · (s + 1) / w` while s < w. Behind
/// the warm-up it is `peak · f`:
///
/// | schedule | f, with t = (s − w + 1) / (n − w) |
/// |---|---|
/// | [`constant`](Self::constant) | 1 |
/// | [`linear`](Self::linear) | 1 − (1 − r) · t |
/// | [`cosine`](Self::cosine) | r + (1 − r) · (1 + cos(π · t)) / 2 |
/// | [`warmup_stable_decay`](Self::warmup_stable_decay) | 1, and in the last d steps 1 − (1 − r) · (s − (n − d) + 1) / d |
///
/// From step n on it is `peak · r`, also if the warm-up is longer than n. The last step of the warm-up has the peak, and the last step
/// of all the last rate. The schedules of transformers count one step less: their first step has the rate 0.
///
/// It depends only on the step, so a checkpoint need not store it.
///
/// ```
/// use fp8_nn::Schedule;
/// let schedule = Schedule::cosine(1e-3, 10, 100, 0.1)?;
/// assert_eq!(schedule.lr(9), 1e-3); // the last step of the warm-up
/// assert!((schedule.lr(99) - 1e-4).abs() < 1e-6);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    peak: f32,
    warmup_steps: u64,
    total_steps: u64,
    min_ratio: f32,
    fall: Fall,
}

/// The way from the peak to the last rate.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fall {
    Never,
    Linear,
    Cosine,
    /// Linear, in the last so many steps.
    Last(u64),
}

impl Schedule {
    /// A rate that stays at its peak.
    ///
    /// # Errors
    /// A peak that is not finite and greater than 0.
    ///
    /// ```
    /// use fp8_nn::Schedule;
    /// let schedule = Schedule::constant(1e-3, 4)?;
    /// assert_eq!([0, 3, 1000].map(|step| schedule.lr(step)), [0.25e-3, 1e-3, 1e-3]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn constant(peak: f32, warmup_steps: u64) -> Result<Self> {
        Self::new(Fall::Never, peak, warmup_steps, u64::MAX, 1.0)
    }

    /// A rate that falls linearly. The arguments are the peak, the steps of warm-up, the steps in all, and the last rate as a fraction
    /// of the peak.
    ///
    /// # Errors
    /// A peak that is not finite and greater than 0, a ratio outside 0 … 1.
    ///
    /// ```
    /// use fp8_nn::Schedule;
    /// let schedule = Schedule::linear(1.0, 0, 4, 0.0)?;
    /// assert_eq!([0, 1, 2, 3].map(|step| schedule.lr(step)), [0.75, 0.5, 0.25, 0.0]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn linear(peak: f32, warmup_steps: u64, total_steps: u64, min_ratio: f32) -> Result<Self> {
        Self::new(Fall::Linear, peak, warmup_steps, total_steps, min_ratio)
    }

    /// A rate that falls along half a period of a cosine. The arguments are those of [`linear`](Self::linear).
    ///
    /// # Errors
    /// Those of [`linear`](Self::linear).
    pub fn cosine(peak: f32, warmup_steps: u64, total_steps: u64, min_ratio: f32) -> Result<Self> {
        Self::new(Fall::Cosine, peak, warmup_steps, total_steps, min_ratio)
    }

    /// A rate that stays at its peak and falls linearly in the last `decay_steps` steps. The other arguments are those of
    /// [`linear`](Self::linear).
    ///
    /// # Errors
    /// Those of [`linear`](Self::linear); more steps of decay than there are behind the warm-up.
    ///
    /// ```
    /// use fp8_nn::Schedule;
    /// let schedule = Schedule::warmup_stable_decay(1.0, 2, 10, 2, 0.5)?;
    /// assert_eq!([1, 5, 7, 8, 9].map(|step| schedule.lr(step)), [1.0, 1.0, 1.0, 0.75, 0.5]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn warmup_stable_decay(
        peak: f32,
        warmup_steps: u64,
        total_steps: u64,
        decay_steps: u64,
        min_ratio: f32,
    ) -> Result<Self> {
        let most = total_steps.saturating_sub(warmup_steps);
        if decay_steps > most {
            let remedy = format!("expected at most {most}, the steps behind the warm-up");
            return refused("decay_steps", decay_steps.to_string(), &remedy);
        }
        Self::new(Fall::Last(decay_steps), peak, warmup_steps, total_steps, min_ratio)
    }

    fn new(fall: Fall, peak: f32, warmup_steps: u64, total_steps: u64, min_ratio: f32) -> Result<Self> {
        if !(peak.is_finite() && peak > 0.0) {
            return refused("lr", peak.to_string(), "expected finite and greater than 0");
        }
        if !(0.0..=1.0).contains(&min_ratio) {
            return refused("min_ratio", min_ratio.to_string(), "expected 0 to 1");
        }
        Ok(Self { peak, warmup_steps, total_steps, min_ratio, fall })
    }

    /// Returns the rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f32 {
        let (peak, last) = (f64::from(self.peak), f64::from(self.min_ratio));
        if step >= self.total_steps {
            return (peak * last) as f32;
        }
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f32 / self.warmup_steps as f32;
        }
        // The share of the way from `start` to the end.
        let done = |start: u64| {
            let length = self.total_steps.saturating_sub(start).max(1);
            (step.saturating_sub(start).saturating_add(1) as f64 / length as f64).min(1.0)
        };
        let ratio = match self.fall {
            Fall::Never => 1.0,
            Fall::Linear => 1.0 - (1.0 - last) * done(self.warmup_steps),
            Fall::Cosine => {
                last + (1.0 - last) * (0.5 * (1.0 + (std::f64::consts::PI * done(self.warmup_steps)).cos()))
            }
            Fall::Last(steps) => match self.total_steps.saturating_sub(steps) {
                start if step < start => 1.0,
                start => 1.0 - (1.0 - last) * done(start),
            },
        };
        (peak * ratio) as f32
    }
}

fn refused<T>(option: &'static str, value: String, remedy: &str) -> Result<T> {
    Err(Error::Option { part: "schedule".to_owned(), option, value, remedy: remedy.to_owned() })
}
