//! The update of delayed scaling: every slot of an arena in one call.

use crate::backend::dispatch;
use crate::{Arena, Result, ScalePolicy, ScaleRule};

mod rule;

pub use rule::{AmaxRule, ScaleUpdate};

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
