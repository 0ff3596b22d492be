//! The update of an arena whose scales a user's code computes, on the host.

use crate::recipes::policy::{HostUpdate, SlotUpdate};
use crate::{Result, SlotRole};
use fp8_kernels::ops::{self, AmaxRule, ScaleUpdate};
use fp8_kernels::{Arena, ScaleRule, UNSET};
use std::sync::Arc;

/// The new contents of an arena. They are computed before a commit changes its first arena, so an error changes none.
#[derive(Debug)]
pub(crate) struct HostPlan {
    scales: Vec<f32>,
    /// [`Arena::cast_scales`].
    cast_scales: Vec<f32>,
    /// `[rows][slots]`: the numbers of the recipe, then the newest amax.
    rows: Vec<f32>,
}

impl HostPlan {
    /// Reads the arena once and calls the user's code for each slot that has run.
    pub(crate) fn new(
        update: &dyn HostUpdate,
        arena: &Arena,
        fp8_max: f32,
        names: &[Arc<str>],
        roles: &[SlotRole],
    ) -> Result<Self> {
        let remedy = "its scales are computed on the host: run the step without a graph";
        arena.device().expect_eager(&format!("recipe {:?}", update.name()), remedy)?;
        let (staged, mut scales, mut rows) = (arena.staged()?, arena.scales()?, arena.history()?);
        let (slots, mut cast_scales) = (arena.slots(), arena.cast_scales()?);
        let mut column = Vec::new();
        for (slot, (((name, role), amax), scale)) in
            names.iter().zip(roles).zip(staged).zip(&mut scales).enumerate()
        {
            let is_set = *scale > 0.0;
            let is_determined = cast_scales[slot] > 0.0;
            if is_determined {
                cast_scales[slot] = *scale;
            }
            if !is_set {
                *scale = UNSET; // this rank's own first scale
            }
            // The rest value is negative.
            if !(amax.is_finite() && amax >= 0.0) {
                continue;
            }
            column.clear();
            column.extend(rows.iter().skip(slot).step_by(slots));
            let Some((newest, state)) = column.split_last_mut() else { continue };
            *newest = amax;
            if amax > 0.0 {
                let old = is_set.then_some(*scale);
                let of = SlotUpdate { name, role: *role, amax, fp8_max, scale: old };
                *scale = update.update(&of, state)?;
                if !is_determined {
                    cast_scales[slot] = *scale;
                }
            }
            let cells = rows.iter_mut().skip(slot).step_by(slots);
            cells.zip(&column).for_each(|(cell, value)| *cell = *value);
        }
        Ok(Self { scales, cast_scales, rows })
    }

    /// Changes the arena. `rule` is any rule that cannot fail.
    pub(crate) fn apply(&self, arena: &mut Arena, rule: &ScaleRule) -> Result<()> {
        // This counts the update and puts the staging row back to rest. The scales and rows that it writes are replaced.
        let roll = ScaleUpdate { amax: AmaxRule::MostRecent, rule, interval: 1, record_non_finite: false };
        ops::update_scales(arena, &roll)?;
        arena.set_history(&self.rows)?;
        arena.set_scales(&self.scales)?;
        Ok(arena.set_cast_scales(&self.cast_scales)?)
    }
}
