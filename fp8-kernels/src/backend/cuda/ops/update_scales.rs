//! `update_scales` on a GPU: one launch for an arena; where a user's function decides, on copies in host memory.

use super::rule::RuleArgs;
use super::{Gpu, Grid, Out, kernels};
use crate::backend::cpu::update_scales::{Table, recompute};
use crate::ops::{AmaxRule, ScaleUpdate};
use crate::{Arena, Result};
use std::cell::Cell;

/// As the kernel.
const SLOTS_PER_BLOCK: u64 = 8;
const NO_AVERAGE: f32 = 0.0;

pub(crate) fn update_scales(gpu: &Gpu, arena: &mut Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    if update.interval > 1 {
        gpu.expect_eager(
            "update_scales",
            "whether scales are recomputed is decided on the host: use interval 1",
        )?;
    }
    let op = "update_scales";
    let (slots, rows) = (arena.slots() as u64, arena.options().history_len as u64);
    // How many of the newest amaxes the maximum covers. An average is at least the newest.
    let newest = match update.amax {
        AmaxRule::Max => rows,
        AmaxRule::MostRecent | AmaxRule::Average { .. } => 1,
        AmaxRule::MaxOfLast(n) => n as u64,
        AmaxRule::Custom(_) => return on_host(gpu, arena, update),
    };
    let decay = if let AmaxRule::Average { decay } = update.amax { decay } else { NO_AVERAGE };
    let Some(rule) = RuleArgs::new(update.rule) else { return on_host(gpu, arena, update) };
    let history = arena.cuda_history(op)?;
    let scales = [arena.scale_cells().cuda(op)?, arena.cast_scale_cells().cuda(op)?];
    let (clock, last_updates) = arena.update_counts();
    let kernel = gpu.load(kernels::UPDATE_SCALES)?;
    let args = kernels::UpdateScales {
        history: Out::f32(history),
        scale: Out::f32(scales[0]),
        cast_scale: Out::f32(scales[1]),
        skipped: Out::u64(arena.skipped_counts().cuda(op)?),
        clock: Out::u64(clock.cuda(op)?),
        last_updates: Out::u64(last_updates.cuda(op)?),
        slots,
        rows,
        rest: arena.options().rest,
        recompute: i32::from(recompute(arena, update)),
        counted: newest,
        decay,
        record_non_finite: i32::from(update.record_non_finite),
        kind: rule.kind,
        largest: rule.fp8_max,
        scaled_max: rule.scaled_max,
        margin: rule.margin,
        epsilon: rule.epsilon,
    };
    // A thread takes eight rows at a time; a short window needs few threads.
    let threads = rows.clamp(1, 1024).next_multiple_of(32) as u32;
    let grid = Grid::new(op, slots.div_ceil(SLOTS_PER_BLOCK), threads)?;
    // SAFETY: the arena's blocks hold rows · slots f32, twice slots f32 and three times slots u64. Arenas that share
    // a clock have its device, whose stream runs their updates one by one.
    unsafe { kernel.launch(gpu, grid, &args) }?;
    arena.finish_update();
    arena.refresh_known();
    Ok(())
}

pub(crate) fn check_scales(_: &Gpu, arena: &Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    let mut copies = copies(arena)?;
    Table::new(arena, update, copies.each_mut().map(|copy| cells(copy))).changes(update).map(drop)
}

/// Waits for the device, since the user's functions run on the host.
fn on_host(gpu: &Gpu, arena: &mut Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    let mut copies = copies(arena)?;
    let mut skipped = arena.skipped_non_finite_all()?;
    let (clock, last_updates) = arena.update_counts();
    let (mut clock_readings, mut last_readings) =
        (clock.read(0..arena.slots())?, last_updates.read(0..arena.slots())?);
    let table = Table::new(arena, update, copies.each_mut().map(|copy| cells(copy)));
    let changes = table.changes(update)?;
    table.apply(
        changes,
        |slot| {
            if let Some(count) = skipped.get_mut(slot) {
                *count += 1;
            }
        },
        |slot| {
            if let (Some(reading), Some(last)) = (clock_readings.get_mut(slot), last_readings.get_mut(slot)) {
                *reading += 1;
                *last = *reading;
            }
        },
    );
    let [history, scale, cast_scale] = copies;
    arena.set_all_rows(&history)?;
    // From here on the arena is neither as it was nor updated.
    let write_rest = || {
        arena.scale_cells().write(0, &scale)?;
        arena.cast_scale_cells().write(0, &cast_scale)?;
        arena.skipped_counts().write(&skipped)?;
        clock.write(&clock_readings)?;
        last_updates.write(&last_readings)
    };
    write_rest()
        .inspect_err(|error| gpu.poison(format!("update_scales: scales may be half updated: {error}")))?;
    arena.finish_update();
    Ok(())
}

/// Returns all rows of the history, the scales and the cast scales.
fn copies(arena: &Arena) -> Result<[Vec<f32>; 3]> {
    Ok([arena.all_rows()?, arena.scales()?, arena.cast_scales()?])
}

fn cells(values: &mut [f32]) -> &[Cell<f32>] {
    Cell::from_mut(values).as_slice_of_cells()
}
