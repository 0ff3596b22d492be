//! The update of delayed scaling: every slot of an arena in one call.
//!
//! With `r` a slot's staging value, reduced over ranks:
//! 1. r at rest: the slot did not run; nothing rolls, the scale stays. A provisional scale is unset again. A non-finite r
//!    counts the same, plus a counter, unless `record_non_finite`.
//! 2. Else the window rolls: the oldest drops out, r becomes the newest, staging goes back to rest.
//! 3. amax = the maximum of the old window and r (NaN skipped), or r, or a user's function of the window.
//! 4. scale = the rule's for amax, if `recompute` or the slot had none yet.
//! 5. A slot whose window has rolled gets the next reading of the arena's clock.
//!
//! Either all slots are updated or, where a user's function returns no usable scale, none.

use crate::backend::dispatch;
use crate::{Arena, Error, Result, ScalePolicy, ScaleRule};

/// Which amax a window gives.
#[derive(Clone, Copy)]
pub enum AmaxRule<'a> {
    /// The largest.
    Max,
    /// The newest.
    MostRecent,
    /// A user's function of the window, oldest to newest.
    Custom(&'a (dyn Fn(&[f32]) -> f32 + Send + Sync)),
}

impl std::fmt::Debug for AmaxRule<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Max => "Max",
            Self::MostRecent => "MostRecent",
            Self::Custom(_) => "Custom",
        })
    }
}

/// What an update does.
#[derive(Debug, Clone, Copy)]
pub struct ScaleUpdate<'a> {
    /// From window to amax.
    pub amax: AmaxRule<'a>,
    /// From amax to scale.
    pub rule: &'a ScaleRule,
    /// Every how many updates scales are recomputed; histories roll at each.
    pub interval: u64,
    /// Whether infinite and NaN amaxes enter the window.
    pub record_non_finite: bool,
}

impl ScaleUpdate<'_> {
    /// The scale that follows from a slot's past amaxes, by steps 3 and 4 of the module's text: nothing is rolled.
    ///
    /// `window` holds them from oldest to newest and is not empty; `stored` is the slot's scale so far, or
    /// [`UNSET`](crate::UNSET), which stays where the window has no finite amax > 0.
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
    /// An empty window; a user's scale policy that returns no usable scale.
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
        crate::backend::cpu::update_scales::scale(self, past.iter().copied(), *newest, stored)
    }
}

/// Updates `arena`. See the module's text.
///
/// # Errors
/// A user's scale policy that returns no usable scale; the arena is as before.
pub fn update_scales(arena: &mut Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    dispatch!(arena.device(), update_scales::update_scales(arena, update))
}

/// Whether [`update_scales`] would succeed; changes nothing. Lets several arenas change together or not at all.
///
/// # Errors
/// A user's scale policy that returns no usable scale.
pub fn check_scales(arena: &Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    // Every other rule always has a scale: nothing to read.
    let ScaleRule::Delayed { policy: ScalePolicy::Custom(_), .. } = update.rule else { return Ok(()) };
    dispatch!(arena.device(), update_scales::check_scales(arena, update))
}
