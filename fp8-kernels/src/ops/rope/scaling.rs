//! Frequencies of rotary position embedding for sequences that are longer than those of the first training.

use crate::{Error, Result};
use std::f64::consts::TAU;

/// The scaling of RoPE's frequencies for longer sequences. It is computed in f64, as in Hugging Face's `rope_scaling`.
///
/// With the frequency `f = base^(−2j/d)` of pair j, which turns `f · n / 2π` times in n positions:
///
/// | scaling | frequency |
/// |---|---|
/// | `None` | `f` |
/// | `Linear` | `f / factor` |
/// | `Llama3` | `f` if it turns more than `high_freq_factor` times in the original length, `f / factor` if fewer than `low_freq_factor` times, between them a mean that is linear in the number of turns |
/// | `Yarn` | `f` for pairs that turn more than `beta_fast` times in the original length, `f / factor` for those that turn fewer than `beta_slow` times, between them a mean that is linear in j |
///
/// ```
/// use fp8_kernels::{Device, ops::{RopeScaling, RopeTable}};
/// let table = |scaling| RopeTable::with_scaling(8, 2, 10000.0, scaling, &Device::cpu());
/// let (plain, linear) = (table(RopeScaling::None)?, table(RopeScaling::Linear { factor: 4.0 })?);
/// // Position 4 has the angle that position 1 had.
/// assert_eq!(linear.cos().to_vec::<f32>()?[4], plain.cos().to_vec::<f32>()?[1]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RopeScaling {
    /// Frequencies as they are. Default.
    #[default]
    None,
    /// Position interpolation (Chen et al., <https://arxiv.org/abs/2306.15595>).
    Linear {
        /// The factor by which sequences become longer.
        factor: f64,
    },
    /// That of Llama 3.1.
    Llama3 {
        /// The factor by which sequences become longer.
        factor: f64,
        /// Turns in the original length below which a frequency is divided by `factor`.
        low_freq_factor: f64,
        /// Turns in the original length above which a frequency stays as it is.
        high_freq_factor: f64,
        /// The original length.
        original_max_position: usize,
    },
    /// YaRN (Peng et al., <https://arxiv.org/abs/2309.00071>).
    Yarn {
        /// The factor by which sequences become longer.
        factor: f64,
        /// Turns in the original length above which a frequency stays as it is; usually 32.
        beta_fast: f64,
        /// Turns in the original length below which a frequency is divided by `factor`; usually 1.
        beta_slow: f64,
        /// The original length.
        original_max_position: usize,
        /// The factor of cosines and sines, so that scores are multiplied by its square; usually `0.1 · ln(factor) + 1`.
        attention_factor: f64,
        /// Whether the ends of the ramp between the two are rounded to whole pairs, outwards; usually true.
        truncate: bool,
    },
}

impl RopeScaling {
    pub(super) fn check(self, op: &'static str, base: f64) -> Result<()> {
        let positive = |option, value: f64| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            let remedy = "expected a finite number greater than 0".to_owned();
            Err(Error::Option { op, option, value: value.to_string(), remedy })
        };
        let above = |option, value: f64, below: &str, least: f64| {
            if value > least {
                return Ok(());
            }
            let remedy = format!("expected greater than {below}, which is {least}");
            Err(Error::Option { op, option, value: value.to_string(), remedy })
        };
        match self {
            Self::None => Ok(()),
            Self::Linear { factor } => positive("factor", factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                positive("factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("high_freq_factor", high_freq_factor)?;
                positive("original_max_position", original_max_position as f64)?;
                above("high_freq_factor", high_freq_factor, "low_freq_factor", low_freq_factor)
            }
            Self::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, .. } => {
                positive("factor", factor)?;
                positive("beta_fast", beta_fast)?;
                positive("beta_slow", beta_slow)?;
                positive("original_max_position", original_max_position as f64)?;
                positive("attention_factor", attention_factor)?;
                above("beta_fast", beta_fast, "beta_slow", beta_slow)?;
                above("base", base, "that of equal frequencies", 1.0)
            }
        }
    }

    /// Returns the factor of cosines and sines.
    pub(super) const fn attention_factor(self) -> f64 {
        if let Self::Yarn { attention_factor, .. } = self { attention_factor } else { 1.0 }
    }

    /// Returns a function that scales the frequency of pair j.
    pub(super) fn of_frequencies(self, head_dim: usize, base: f64) -> impl Fn(usize, f64) -> f64 {
        // The pair that turns so many times in the original length.
        let pair = move |turns: f64, length: usize| {
            head_dim as f64 * (length as f64 / (turns * TAU)).ln() / (2.0 * base.ln())
        };
        let ramp = match self {
            Self::Yarn { beta_fast, beta_slow, original_max_position, truncate, .. } => {
                let (fast, slow) =
                    (pair(beta_fast, original_max_position), pair(beta_slow, original_max_position));
                let (fast, slow) = if truncate { (fast.floor(), slow.ceil()) } else { (fast, slow) };
                let (fast, slow) = (fast.max(0.0), slow.min(head_dim as f64 - 1.0));
                // A ramp of no length would divide by 0.
                Some((fast, if slow == fast { slow + 0.001 } else { slow }))
            }
            _ => None,
        };
        move |j, frequency| match (self, ramp) {
            (Self::None, _) => frequency,
            (Self::Linear { factor }, _) => frequency / factor,
            (Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position }, _) => {
                let turns = frequency * original_max_position as f64 / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                mean(frequency, frequency / factor, kept.clamp(0.0, 1.0))
            }
            (Self::Yarn { factor, .. }, ramp) => {
                let (fast, slow) = ramp.unwrap_or_default();
                let divided = ((j as f64 - fast) / (slow - fast)).clamp(0.0, 1.0);
                mean(frequency, frequency / factor, 1.0 - divided)
            }
        }
    }
}

fn mean(a: f64, b: f64, share_of_a: f64) -> f64 {
    share_of_a * a + (1.0 - share_of_a) * b
}
