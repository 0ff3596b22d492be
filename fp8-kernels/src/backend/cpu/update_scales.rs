//! Reference of `update_scales`.

use crate::ops::ScaleUpdate;
use crate::{Arena, Result, UNSET, cells};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// The change that an update makes to one slot.
pub(crate) enum Change {
    Rest { non_finite: bool },
    Roll { amax: f32, scale: f32, cast_scale: f32 },
}

/// Numbers of an arena in host memory: its own, or copies of a device's. Positions lie within them.
pub(crate) trait Values {
    fn at(&self, index: usize) -> f32;
    fn put(&self, index: usize, value: f32);
}

impl Values for [AtomicI32] {
    fn at(&self, index: usize) -> f32 {
        cells::value(&self[index])
    }

    fn put(&self, index: usize, value: f32) {
        cells::store(&self[index], value);
    }
}

impl Values for [std::cell::Cell<f32>] {
    fn at(&self, index: usize) -> f32 {
        self[index].get()
    }

    fn put(&self, index: usize, value: f32) {
        self[index].set(value);
    }
}

/// An arena's numbers.
pub(crate) struct Table<'a, V: ?Sized> {
    /// `[rows][slots]`.
    history: &'a V,
    scale: &'a V,
    /// [`Arena::cast_scales`].
    cast_scale: &'a V,
    rows: usize,
    slots: usize,
    rest: f32,
    /// Whether this update recomputes scales that slots already have.
    recompute: bool,
}

impl<'a, V: Values + ?Sized> Table<'a, V> {
    /// Creates the table of `arena`, whose numbers are stored in `history`, `scale` and `cast_scale`.
    pub(crate) fn new(
        arena: &Arena,
        update: &ScaleUpdate<'_>,
        [history, scale, cast_scale]: [&'a V; 3],
    ) -> Self {
        let (rows, rest) = (arena.options().history_len, arena.options().rest);
        let (slots, recompute) = (arena.slots(), recompute(arena, update));
        Self { history, scale, cast_scale, rows, slots, rest, recompute }
    }

    /// Returns the changes of all slots without making them.
    pub(crate) fn changes(&self, update: &ScaleUpdate<'_>) -> Result<Vec<Change>> {
        (0..self.slots).map(|slot| self.change(slot, update)).collect()
    }

    /// Makes `changes` true; `skipped` is called for each slot whose amax was not finite and is left out, `rolled` for each
    /// slot whose window rolls.
    pub(crate) fn apply(
        &self,
        changes: Vec<Change>,
        mut skipped: impl FnMut(usize),
        mut rolled: impl FnMut(usize),
    ) {
        for (slot, change) in changes.into_iter().enumerate() {
            match change {
                Change::Rest { non_finite } => {
                    if self.scale.at(slot) < 0.0 {
                        self.scale.put(slot, UNSET);
                    }
                    if self.cast_scale.at(slot) > 0.0 {
                        self.cast_scale.put(slot, self.scale.at(slot));
                    }
                    if non_finite {
                        skipped(slot);
                    }
                }
                Change::Roll { amax, scale, cast_scale } => {
                    for row in 1..self.rows.saturating_sub(1) {
                        self.history.put(self.cell(row, slot), self.history.at(self.cell(row + 1, slot)));
                    }
                    if self.rows > 1 {
                        self.history.put(self.cell(self.rows - 1, slot), amax);
                    }
                    self.scale.put(slot, scale);
                    self.cast_scale.put(slot, cast_scale);
                    rolled(slot);
                }
            }
            self.history.put(self.cell(0, slot), self.rest);
        }
    }

    fn cell(&self, row: usize, slot: usize) -> usize {
        row * self.slots + slot
    }

    fn change(&self, slot: usize, update: &ScaleUpdate<'_>) -> Result<Change> {
        let newest = self.history.at(self.cell(0, slot));
        if newest.to_bits() == self.rest.to_bits() {
            return Ok(Change::Rest { non_finite: false });
        }
        if !newest.is_finite() && !update.record_non_finite {
            return Ok(Change::Rest { non_finite: true });
        }
        let stored = self.scale.at(slot);
        let is_determined = self.cast_scale.at(slot) > 0.0;
        let kept = if is_determined { stored } else { UNSET };
        let is_first = stored < 0.0; // false for NaN, which set_scales takes
        if !self.recompute && !is_first {
            return Ok(Change::Roll { amax: newest, scale: stored, cast_scale: kept });
        }
        let window = (1..self.rows).map(|row| self.history.at(self.cell(row, slot)));
        let amax = update.chosen(window, newest);
        let scale = update.scale(amax, stored)?;
        // By its first scale from a recorded amax, the slot's tensors of this scope are quantized again.
        let cast_scale = if is_determined || !ScaleUpdate::is_usable(amax) { kept } else { scale };
        Ok(Change::Roll { amax: newest, scale, cast_scale })
    }
}

/// Whether the arena's next update recomputes scales that slots already have.
pub(crate) fn recompute(arena: &Arena, update: &ScaleUpdate<'_>) -> bool {
    arena.updates().wrapping_add(1).is_multiple_of(update.interval.max(1))
}

pub(crate) fn update_scales(arena: &mut Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    let table = table(arena, update)?;
    let skipped = arena.skipped_counts().cpu("update_scales")?;
    let (clock, last_updates) = arena.update_counts();
    let (clock, last_updates) = (clock.cpu("update_scales")?, last_updates.cpu("update_scales")?);
    // All scales first: a user's function may refuse, and then nothing has changed.
    let changes = table.changes(update)?;
    table.apply(
        changes,
        |slot| {
            skipped[slot].fetch_add(1, Relaxed);
        },
        |slot| last_updates[slot].store(clock[slot].fetch_add(1, Relaxed) + 1, Relaxed),
    );
    arena.finish_update();
    Ok(())
}

pub(crate) fn check_scales(arena: &Arena, update: &ScaleUpdate<'_>) -> Result<()> {
    table(arena, update)?.changes(update).map(drop)
}

fn table<'a>(arena: &'a Arena, update: &ScaleUpdate<'_>) -> Result<Table<'a, [AtomicI32]>> {
    let op = "update_scales";
    let scales = [arena.scale_cells(), arena.cast_scale_cells()];
    let [scale, cast_scale] = [scales[0].cpu(op)?, scales[1].cpu(op)?];
    Ok(Table::new(arena, update, [arena.cpu_history(op)?, scale, cast_scale]))
}
