//! The rules by which scales follow from amaxes.

use crate::{Error, Result, ScaleRule, UNSET};

/// The rule by which [`update_scales`](super::update_scales()) takes an amax from a slot's window of past amaxes.
#[derive(Clone, Copy)]
pub enum AmaxRule<'a> {
    /// The largest amax; NaN is skipped.
    Max,
    /// The newest amax.
    MostRecent,
    /// The largest of the newest `n` amaxes, 1 ≤ `n` ≤ `history_len`; NaN is skipped. 1 is `MostRecent` and `history_len` is
    /// `Max`.
    MaxOfLast(usize),
    /// An exponential average of the window, or the newest amax where that is larger, so that nothing saturates by design.
    ///
    /// From the oldest amax to the newest, the average is first the first amax `a`, then `(decay · average) +
    /// ((1 − decay) · a)`. Every operation is rounded to f32, and amaxes of 0 and NaN are skipped.
    Average {
        /// The weight of the past, greater than 0 and less than 1.
        decay: f32,
    },
    /// A function of the window, which is ordered from oldest to newest. It runs on the host, so on a GPU the update waits
    /// for the device, copies all rows of the arena to the host and back, and cannot be recorded in a graph. If it returns
    /// anything but a finite amax greater than 0, the scale stays.
    Custom(&'a (dyn Fn(&[f32]) -> f32 + Send + Sync)),
}

impl std::fmt::Debug for AmaxRule<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Max => f.write_str("Max"),
            Self::MostRecent => f.write_str("MostRecent"),
            Self::MaxOfLast(n) => write!(f, "MaxOfLast({n})"),
            Self::Average { decay } => write!(f, "Average({decay})"),
            Self::Custom(_) => f.write_str("Custom"),
        }
    }
}

/// The rules of an update; [`update_scales`](super::update_scales()) has the steps.
#[derive(Debug, Clone, Copy)]
pub struct ScaleUpdate<'a> {
    /// The rule that takes the amax from the window.
    pub amax: AmaxRule<'a>,
    /// The rule that computes the scale from the amax.
    pub rule: &'a ScaleRule,
    /// The number of updates between two that recompute scales; histories roll at each. On a GPU, an interval greater than 1
    /// cannot be recorded in a graph.
    pub interval: u64,
    /// Whether infinite and NaN amaxes enter the window.
    pub record_non_finite: bool,
}

impl ScaleUpdate<'_> {
    /// Returns the scale that follows from a window of amaxes, by steps 3 and 4 of
    /// [`update_scales`](super::update_scales()). Rolls nothing.
    ///
    /// `window` is ordered from oldest to newest and not empty. `stored` is the slot's scale so far, or
    /// [`UNSET`](crate::UNSET), which is returned if the window has no finite amax greater than 0.
    ///
    /// ```
    /// use fp8_kernels::{ScalePolicy, ScaleRule, UNSET, ops};
    /// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 1, policy: ScalePolicy::Exact };
    /// let update =
    ///     ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
    /// assert_eq!(update.scale_of(&[0.0, 7.0, 3.5], UNSET)?, 32.0);
    /// assert_eq!(update.scale_of(&[0.0, 0.0], UNSET)?, UNSET);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// An empty window; an amax rule that is out of range; a custom scale policy that returns an unusable scale.
    pub fn scale_of(&self, window: &[f32], stored: f32) -> Result<f32> {
        let Some((newest, past)) = window.split_last() else {
            let remedy = "expected at least the newest amax".to_owned();
            return Err(Error::Option {
                op: "scale_of",
                option: "window",
                value: "empty".to_owned(),
                remedy,
            });
        };
        self.check("scale_of", window.len())?;
        let amax = self.chosen(past.iter().copied(), *newest);
        self.scale(amax, stored)
    }

    /// Checks the options of the amax rule for a history of `history_len` rows.
    pub(super) fn check(&self, op: &'static str, history_len: usize) -> Result<()> {
        let refused = |option, value, remedy| Err(Error::Option { op, option, value, remedy });
        match self.amax {
            AmaxRule::MaxOfLast(n) if !(1..=history_len).contains(&n) => {
                let remedy = format!("expected 1 to {history_len}, the rows of the history");
                refused("MaxOfLast", n.to_string(), remedy)
            }
            AmaxRule::Average { decay } if !(decay > 0.0 && decay < 1.0) => {
                refused("decay", decay.to_string(), "expected a number between 0 and 1, exclusive".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Returns the amax that an update takes from a window and its newest amax.
    pub(crate) fn chosen(&self, window: impl DoubleEndedIterator<Item = f32>, newest: f32) -> f32 {
        match self.amax {
            AmaxRule::Max => window.fold(newest, f32::max),
            AmaxRule::MostRecent => newest,
            AmaxRule::MaxOfLast(n) => window.rev().take(n.saturating_sub(1)).fold(newest, f32::max),
            AmaxRule::Average { decay } => {
                let amaxes = window.chain([newest]).filter(|&amax| amax > 0.0);
                let average = amaxes.reduce(|average, amax| (decay * average) + ((1.0 - decay) * amax));
                average.map_or(newest, |average| average.max(newest))
            }
            AmaxRule::Custom(function) => {
                let mut window: Vec<f32> = window.collect();
                window.push(newest);
                function(&window)
            }
        }
    }

    /// Returns the scale for an amax. `stored` is the slot's scale so far, which is negative if no recorded amax has determined it.
    pub(crate) fn scale(&self, amax: f32, stored: f32) -> Result<f32> {
        if stored < 0.0 && !Self::is_usable(amax) {
            // A slot is calibrated from its first finite amax > 0; before that it stays unset.
            return Ok(UNSET);
        }
        self.rule.scale(amax, if stored < 0.0 { 1.0 } else { stored })
    }

    /// Returns whether a scale can be computed from an amax.
    pub(crate) fn is_usable(amax: f32) -> bool {
        amax.is_finite() && amax > 0.0
    }
}
