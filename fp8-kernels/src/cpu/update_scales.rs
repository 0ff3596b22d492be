//! Reference of `update_scales`.

use crate::ops::{AmaxRule, ScaleUpdate};
use crate::{Arena, Result, UNSET};

/// What one slot becomes.
enum Change {
    Rest { non_finite: bool },
    Roll { amax: f32, scale: f32 },
}

pub(crate) fn update_scales(arena: &mut Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    // All scales first: a user's function may refuse, and then nothing has changed.
    let changes = changes(arena, update)?;
    let mut non_finite_slots = Vec::new();
    for (slot, change) in changes.into_iter().enumerate() {
        match change {
            Change::Rest { non_finite } => {
                if arena.cell_scale(slot).read() < 0.0 {
                    arena.cell_scale(slot).write(UNSET);
                }
                if non_finite {
                    non_finite_slots.push(slot);
                }
            }
            Change::Roll { amax, scale } => {
                let rows = arena.options().history_len;
                for row in 1..rows.saturating_sub(1) {
                    arena.cell(row, slot).write(arena.cell(row + 1, slot).read());
                }
                if rows > 1 {
                    arena.cell(rows - 1, slot).write(amax);
                }
                arena.cell_scale(slot).write(scale);
            }
        }
        arena.cell(0, slot).write(arena.options().rest);
    }
    arena.finish_update(&non_finite_slots);
    Ok(())
}

pub(crate) fn check_scales(arena: &Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    changes(arena, update).map(drop)
}

fn changes(arena: &Arena, update: &ScaleUpdate<'_>) -> Result<Vec<Change>> {
    let recompute = (arena.updates() + 1).is_multiple_of(update.interval.max(1));
    (0..arena.slots()).map(|slot| change(arena, slot, update, recompute)).collect()
}

fn change(arena: &Arena, slot: usize, update: &ScaleUpdate<'_>, recompute: bool) -> Result<Change> {
    let newest = arena.cell(0, slot).read();
    if newest.to_bits() == arena.options().rest.to_bits() {
        return Ok(Change::Rest { non_finite: false });
    }
    if !newest.is_finite() && !update.record_non_finite {
        return Ok(Change::Rest { non_finite: true });
    }
    let stored = arena.cell_scale(slot).read();
    let first = stored < 0.0;
    if !recompute && !first {
        return Ok(Change::Roll { amax: newest, scale: stored });
    }
    let rows = 1..arena.options().history_len;
    let amax = match update.amax {
        AmaxRule::Max => rows.map(|row| arena.cell(row, slot).read()).fold(newest, f32::max),
        AmaxRule::MostRecent => newest,
        AmaxRule::Custom(function) => {
            let mut window: Vec<f32> = rows.map(|row| arena.cell(row, slot).read()).collect();
            window.push(newest);
            function(&window)
        }
    };
    // A slot is calibrated from its first finite amax > 0; before that it stays unset.
    if first && !(amax.is_finite() && amax > 0.0) {
        return Ok(Change::Roll { amax: newest, scale: UNSET });
    }
    let old = if first { 1.0 } else { stored };
    Ok(Change::Roll { amax: newest, scale: update.rule.scale(amax, old)? })
}
