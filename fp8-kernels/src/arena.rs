//! The amax histories and scales of all slots of one direction, contiguous, at addresses that never move.
//!
//! Row 0 is staging: operations max-combine the current amaxes into it, and it is itself the buffer that ranks reduce.
//! Rows 1 … len − 1 run from oldest to newest. For len 1, row 0 is staging and window at once.

use crate::{Cell, Counters, Device, Error, REST, Result, UNSET};

/// How an arena starts, and which value means "did not run".
#[derive(Debug, Clone, Copy)]
pub struct ArenaOptions {
    /// Rows, staging included.
    pub history_len: usize,
    /// What a staging cell holds that nothing ran into: [`REST`], or 0 under Transformer Engine's rule.
    pub rest: f32,
    /// What scale cells start with: [`UNSET`] to calibrate on the first step, or 1.
    pub first_scale: f32,
}

impl Default for ArenaOptions {
    fn default() -> Self {
        Self { history_len: 1024, rest: REST, first_scale: UNSET }
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Arena {
    device: Device,
    options: ArenaOptions,
    slots: usize,
    /// `[history_len][slots]`.
    amax_history: Vec<Cell>,
    scale: Vec<Cell>,
    counters: Vec<Counters>,
    skipped_non_finite: Vec<u64>,
    updates: u64,
}

impl Arena {
    /// An arena at rest.
    ///
    /// # Errors
    /// A history of no rows, or one too large for memory's address range.
    pub fn new(slots: usize, options: ArenaOptions, device: &Device) -> Result<Self> {
        let cells = options.history_len.checked_mul(slots).filter(|_| options.history_len > 0);
        let cells = cells.filter(|&cells| cells <= isize::MAX as usize / 8).ok_or_else(|| Error::Option {
            op: "arena",
            option: "amax_history_len",
            value: options.history_len.to_string(),
            remedy: format!("expected at least 1, and at most what fits into memory for {slots} slots"),
        })?;
        let rest = |i: usize| Cell::new(if i < slots { options.rest } else { 0.0 });
        Ok(Self {
            device: device.clone(),
            options,
            slots,
            amax_history: (0..cells).map(rest).collect(),
            scale: (0..slots).map(|_| Cell::new(options.first_scale)).collect(),
            counters: (0..slots).map(|_| Counters::default()).collect(),
            skipped_non_finite: vec![0; slots],
            updates: 0,
        })
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How it started.
    pub fn options(&self) -> &ArenaOptions {
        &self.options
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// How many committed scopes have updated it.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Sets the number of updates, on resuming.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// The staging cell of a slot.
    pub fn staging(&self, slot: usize) -> Option<&Cell> {
        self.amax_history.get(..self.slots)?.get(slot)
    }

    /// The scale cell of a slot.
    pub fn scale(&self, slot: usize) -> Option<&Cell> {
        self.scale.get(slot)
    }

    /// The counters of a slot.
    pub fn counters(&self, slot: usize) -> Option<&Counters> {
        self.counters.get(slot)
    }

    /// How often a slot's amax was not finite and so left out of its window.
    pub fn skipped_non_finite(&self, slot: usize) -> u64 {
        self.skipped_non_finite.get(slot).copied().unwrap_or(0)
    }

    /// Rows 1 … len − 1 of a slot, oldest to newest.
    pub fn window(&self, slot: usize) -> Vec<f32> {
        (1..self.options.history_len).map(|row| self.cell(row, slot).read()).collect()
    }

    /// The newest amax of a slot's window; 0 for a history of length 1, which keeps none.
    pub fn newest(&self, slot: usize) -> f32 {
        match self.options.history_len {
            1 => 0.0,
            rows => self.cell(rows - 1, slot).read(),
        }
    }

    /// Replaces rows 1 … len − 1 of a slot: the newest values of a longer `window`, zeros before a shorter one.
    pub fn set_window(&mut self, slot: usize, window: &[f32]) {
        let rows = self.options.history_len;
        for row in 1..rows {
            let from_newest = rows - row; // 1 for the newest row
            let value = window.len().checked_sub(from_newest).map_or(0.0, |i| window[i]);
            self.cell(row, slot).write(value);
        }
    }

    /// Row 0, copied to the host.
    pub fn staged(&self) -> Vec<f32> {
        self.amax_history[..self.slots].iter().map(Cell::read).collect()
    }

    /// Max-combines another rank's row 0 into this one.
    ///
    /// # Errors
    /// Another number of slots.
    pub fn merge_staged(&self, row: &[f32]) -> Result<()> {
        if row.len() != self.slots {
            return Err(Error::Elements { op: "merge_staged", len: row.len(), shape: [self.slots].into() });
        }
        self.amax_history.iter().zip(row).for_each(|(cell, &amax)| cell.merge_max(amax));
        Ok(())
    }

    /// Undoes what an open scope wrote: staging to rest, provisional scales to unset.
    pub fn roll_back(&self) {
        self.amax_history[..self.slots].iter().for_each(|cell| cell.write(self.options.rest));
        self.scale.iter().filter(|cell| cell.read() < 0.0).for_each(|cell| cell.write(UNSET));
    }

    pub(crate) fn cell(&self, row: usize, slot: usize) -> &Cell {
        &self.amax_history[row * self.slots + slot]
    }

    pub(crate) fn cell_scale(&self, slot: usize) -> &Cell {
        &self.scale[slot]
    }

    pub(crate) fn finish_update(&mut self, non_finite: &[usize]) {
        non_finite.iter().for_each(|&slot| self.skipped_non_finite[slot] += 1);
        self.updates += 1;
    }
}
