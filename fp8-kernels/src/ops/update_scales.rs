//! The update of delayed scaling: every slot of an arena in one call.

use crate::backend::{cpu, dispatch};
use crate::{Arena, Error, Result, ScalePolicy, ScaleRule};

/// The rule by which [`update_scales`](update_scales()) takes an amax from a slot's window of past amaxes.
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

/// The rules of an update; [`update_scales`](update_scales()) has the steps.
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
    /// [`update_scales`](update_scales()). Rolls nothing.
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
        let amax = cpu::update_scales::chosen(self, past.iter().copied(), *newest);
        cpu::update_scales::scale(self, amax, stored)
    }

    /// Checks the options of the amax rule for a history of `history_len` rows.
    fn check(&self, op: &'static str, history_len: usize) -> Result<()> {
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
}

/// Updates the amax history and the scale of every slot of `arena`, as delayed scaling does after each step.
///
/// With `r` the slot's staging value, that is, the amax of this step, which ranks have already reduced:
///
/// 1. If `r` is at rest ([`REST`](crate::REST)), the slot did not run: its history does not roll and its scale stays; a
///    provisional scale becomes unset again. An infinite or NaN `r` has the same effect, and is counted, unless
///    `record_non_finite` is true.
/// 2. Otherwise the history rolls: the oldest amax drops out, `r` becomes the newest, and staging is put back to rest.
/// 3. The amax is taken by `update.amax` from the window before it rolled and `r`: the maximum of all or of the newest, an
///    average, or a function.
/// 4. The scale is computed by `update.rule` if this update recomputes scales or the slot has no scale yet.
/// 5. A slot whose history has rolled gets the next reading of the arena's [`UpdateClock`](crate::UpdateClock).
///
/// All slots are updated in one launch on a GPU, and nothing waits unless a rule is a function of yours. Histories and
/// scales have the same bits on every backend.
///
/// # Errors
/// An amax rule that is out of range, or a custom scale policy that returns an unusable scale; the arena is unchanged. On a
/// GPU, an interval greater than 1 or a custom rule in a step that is being recorded in a graph.
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, Device, ScalePolicy, ScaleRule, ops};
/// let mut arena = Arena::new(1, ArenaOptions { history_len: 3, ..Default::default() }, &Device::cpu())?;
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let update =
///     ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
/// for (amax, scale) in [(3.5, 128.0), (1.75, 128.0), (1.75, 128.0), (1.75, 256.0)] {
///     arena.merge_staged(&[amax])?; // quantizing operations do this through the arena's cells
///     ops::update_scales(&mut arena, &update)?;
///     assert_eq!(arena.scales()?, [scale]);
/// }
/// assert_eq!(arena.window(0)?, [1.75, 1.75]); // oldest to newest: 3.5 has dropped out
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn update_scales(arena: &mut Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    update.check("update_scales", arena.options().history_len)?;
    dispatch!(arena.device(), update_scales::update_scales(arena, update))
}

/// Checks that [`update_scales`](update_scales()) would succeed for `arena`, without changing it.
///
/// Check several arenas before you update the first, so that all are updated or none. On a GPU, the check of a custom scale
/// policy waits for the device; no other check reads the arena.
///
/// # Errors
/// An amax rule that is out of range; a custom scale policy that returns an unusable scale.
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, CustomPolicy, Device, ScalePolicy, ScaleRule, ops};
/// use std::sync::Arc;
/// let arena = Arena::new(1, ArenaOptions::default(), &Device::cpu())?;
/// let zero = CustomPolicy { name: "zero".into(), function: Arc::new(|_amax, _old, _fp8_max| 0.0) };
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Custom(zero) };
/// let update =
///     ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
/// assert!(ops::check_scales(&arena, &update).is_ok()); // the slot is at rest, so no scale is computed
/// arena.merge_staged(&[3.5])?;
/// assert!(ops::check_scales(&arena, &update).is_err()); // a scale of 0 cannot be used
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn check_scales(arena: &Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    update.check("check_scales", arena.options().history_len)?;
    // No other rule can fail, so there is nothing to read.
    let ScaleRule::Delayed { policy: ScalePolicy::Custom(_), .. } = update.rule else { return Ok(()) };
    dispatch!(arena.device(), update_scales::check_scales(arena, update))
}
