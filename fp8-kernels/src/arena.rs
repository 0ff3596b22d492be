//! The amax histories and scales of all slots of one direction, contiguous, at addresses that never move.
//!
//! Row 0 is staging: operations max-combine the current amaxes into it, and it is itself the buffer that ranks reduce.
//! Rows 1 … len − 1 run from oldest to newest. For len 1, row 0 is staging and window at once.
//!
//! Whatever is asked of all slots is one copy between device and host, whatever is asked of one slot at least one: who
//! wants many slots asks for all.

use crate::cells::{Cells, Counts};
use crate::{
    Cell, CounterValues, Counters, Device, Error, REST, Replayed, Result, Shape, UNSET, UpdateClock, host,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

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

/// The amax histories, scales and counters of all slots of one direction, on a device.
///
/// Row 0 of the histories is staging: operations max-combine the current amaxes into it, and ranks reduce it. Rows
/// 1 … `history_len` − 1 run from the oldest amax to the newest. For a `history_len` of 1, row 0 is both.
pub struct Arena {
    device: Device,
    options: ArenaOptions,
    slots: usize,
    /// `[history_len][slots]`.
    amax_history: Cells,
    scale: Cells,
    /// [`CounterValues::LEN`] a slot.
    counters: Counts,
    skipped_non_finite: Counts,
    clock: UpdateClock,
    /// The clock's reading at each slot's last update.
    last_updates: Counts,
    updates: Arc<Updates>,
    /// Handles to lend.
    staging_cells: Vec<Cell>,
    scale_cells: Vec<Cell>,
    slot_counters: Vec<Counters>,
}

/// How many committed scopes have updated an arena.
#[derive(Debug, Default)]
struct Updates {
    count: AtomicU64,
    /// Slots that had scales for good have none any more: recorded steps, which rely on them, would quantize with 1.
    is_set_back: AtomicBool,
}

impl Replayed for Updates {
    fn advance(&self) -> Result<()> {
        if self.is_set_back.load(Relaxed) {
            let remedy = "slots it was recorded with have lost their scales: run and commit a step that is not recorded";
            return Err(Error::Replay { remedy });
        }
        self.count.fetch_add(1, Relaxed);
        Ok(())
    }

    fn retreat(&self) {
        self.count.fetch_sub(1, Relaxed);
    }
}

impl Arena {
    /// An arena at rest, with an update clock of its own.
    ///
    /// # Errors
    /// A history of no rows, or one too large for memory.
    pub fn new(slots: usize, options: ArenaOptions, device: &Device) -> Result<Self> {
        check_size(slots, &options)?;
        Self::with_clock(&UpdateClock::new(slots, device)?, options)
    }

    /// An arena at rest for the slots of `clock`, on its device. Arenas that share a clock tell which of them has updated a
    /// slot last: see [`last_updates`](Self::last_updates).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_clock(clock: &UpdateClock, options: ArenaOptions) -> Result<Self> {
        let (slots, device) = (clock.slots(), clock.device());
        check_size(slots, &options)?;
        device.expect_eager("arena", "open a scope of this recipe once before")?;
        let amax_history = Cells::new(options.history_len * slots, 0.0, device)?;
        // The handles take the most memory: where there are too many, that is known before cells are written.
        let staging_cells = amax_history.handles(0..slots)?;
        amax_history.fill(0..slots, options.rest)?;
        let scale = Cells::new(slots, options.first_scale, device)?;
        let counters = Counts::new(slots * CounterValues::LEN, device)?;
        Ok(Self {
            device: device.clone(),
            options,
            slots,
            staging_cells,
            scale_cells: scale.handles(0..slots)?,
            slot_counters: counters.handles(slots)?,
            skipped_non_finite: Counts::new(slots, device)?,
            clock: clock.clone(),
            last_updates: Counts::new(slots, device)?,
            amax_history,
            scale,
            counters,
            updates: Arc::default(),
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
        self.updates.count.load(Relaxed)
    }

    /// Sets the number of updates, on resuming.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates.count.store(updates, Relaxed);
    }

    /// The reading of the arena's [`UpdateClock`] after each slot's last update here; 0 for a slot that was never updated.
    /// Of two arenas with one clock, the one with the larger number has the newer history of a slot. An update that leaves a
    /// slot as it is (it did not run, or its amax was left out) does not count.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn last_updates(&self) -> Result<Vec<u64>> {
        self.last_updates.read(0..self.slots)
    }

    /// Replaces what [`last_updates`](Self::last_updates) returns, on resuming. The clock stays as it is.
    ///
    /// # Errors
    /// Another number of slots; the device failed.
    pub fn set_last_updates(&mut self, last_updates: &[u64]) -> Result<()> {
        if last_updates.len() != self.slots {
            let (op, len) = ("set_last_updates", last_updates.len());
            return Err(Error::Elements { op, len, shape: [self.slots].into() });
        }
        self.last_updates.write(last_updates)
    }

    /// The staging cell of a slot.
    pub fn staging(&self, slot: usize) -> Option<&Cell> {
        self.staging_cells.get(slot)
    }

    /// The scale cell of a slot.
    pub fn scale(&self, slot: usize) -> Option<&Cell> {
        self.scale_cells.get(slot)
    }

    /// The counters of a slot.
    pub fn counters(&self, slot: usize) -> Option<&Counters> {
        self.slot_counters.get(slot)
    }

    /// The scale cells of all slots, as they stand.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn scales(&self) -> Result<Vec<f32>> {
        self.scale.read(0..self.slots)
    }

    /// Replaces the scale cells of all slots.
    ///
    /// # Errors
    /// Another number of slots; the device failed.
    pub fn set_scales(&mut self, scales: &[f32]) -> Result<()> {
        self.expect_rows("set_scales", scales, scales.len() == self.slots)?;
        let loses = |(cell, &scale): (&Cell, &f32)| cell.is_known_set() && (scale.is_nan() || scale <= 0.0);
        let is_set_back = self.scale_cells.iter().zip(scales).any(loses);
        self.scale.write(0, scales)?;
        if is_set_back {
            self.updates.is_set_back.store(true, Relaxed);
        }
        Ok(())
    }

    /// Copies of all scale cells, which later updates leave as they are: one copy on the device.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn copy_scales(&self) -> Result<Vec<Cell>> {
        self.scale.duplicate()?.handles(0..self.slots)
    }

    /// The counters of all slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn counters_all(&self) -> Result<Vec<CounterValues>> {
        Ok(CounterValues::from_block(&self.counters.read(0..self.slots * CounterValues::LEN)?))
    }

    /// The counters of all slots back to zero.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset_counters(&self) -> Result<()> {
        self.counters.reset(0..self.slots * CounterValues::LEN)
    }

    /// How often a slot's amax was not finite and so left out of its window.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn skipped_non_finite(&self, slot: usize) -> Result<u64> {
        self.expect_slot("skipped_non_finite", slot)?;
        Ok(self.skipped_non_finite.read(slot..slot + 1)?.first().copied().unwrap_or(0))
    }

    /// [`skipped_non_finite`](Self::skipped_non_finite) of all slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn skipped_non_finite_all(&self) -> Result<Vec<u64>> {
        self.skipped_non_finite.read(0..self.slots)
    }

    /// Rows 1 … len − 1 of all slots, row by row from oldest to newest.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn history(&self) -> Result<Vec<f32>> {
        self.amax_history.read(self.slots..self.options.history_len * self.slots)
    }

    /// Replaces rows 1 … len − 1 of all slots: by the newest of more rows, or by zeros before fewer.
    ///
    /// # Errors
    /// Rows that are not one value per slot each; the device failed.
    pub fn set_history(&mut self, rows: &[f32]) -> Result<()> {
        self.expect_rows(
            "set_history",
            rows,
            rows.is_empty() || rows.len().is_multiple_of(self.slots.max(1)),
        )?;
        let len = (self.options.history_len - 1) * self.slots;
        let newest = rows.get(rows.len().saturating_sub(len)..).unwrap_or_default();
        let mut history = host::zeroed("set_history", len)?;
        history[len - newest.len()..].copy_from_slice(newest);
        self.amax_history.write(self.slots, &history)
    }

    /// Rows 1 … len − 1 of a slot, oldest to newest.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn window(&self, slot: usize) -> Result<Vec<f32>> {
        self.expect_slot("window", slot)?;
        Ok(self.history()?.into_iter().skip(slot).step_by(self.slots).collect())
    }

    /// Replaces rows 1 … len − 1 of a slot: the newest values of a longer `window`, zeros before a shorter one.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn set_window(&mut self, slot: usize, window: &[f32]) -> Result<()> {
        self.expect_slot("set_window", slot)?;
        let mut history = self.history()?;
        let newest_first = window.iter().rev().copied().chain(std::iter::repeat(0.0));
        let rows = history.chunks_exact_mut(self.slots).rev();
        rows.filter_map(|row| row.get_mut(slot)).zip(newest_first).for_each(|(cell, amax)| *cell = amax);
        self.amax_history.write(self.slots, &history)
    }

    /// The newest amax of a slot's window; 0 for a history of length 1, which keeps none.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn newest(&self, slot: usize) -> Result<f32> {
        self.expect_slot("newest", slot)?;
        match self.options.history_len {
            1 => Ok(0.0),
            rows => self.amax_history.read_one((rows - 1) * self.slots + slot),
        }
    }

    /// [`newest`](Self::newest) of all slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn newest_all(&self) -> Result<Vec<f32>> {
        match self.options.history_len {
            1 => host::zeroed("newest_all", self.slots),
            rows => self.amax_history.read((rows - 1) * self.slots..rows * self.slots),
        }
    }

    /// Row 0, copied to the host.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn staged(&self) -> Result<Vec<f32>> {
        self.amax_history.read(0..self.slots)
    }

    /// Max-combines another rank's row 0 into this one.
    ///
    /// # Errors
    /// Another number of slots; the device failed.
    pub fn merge_staged(&self, row: &[f32]) -> Result<()> {
        self.expect_rows("merge_staged", row, row.len() == self.slots)?;
        self.amax_history.merge_max(0, row)
    }

    /// Undoes what an open scope wrote: staging to rest, provisional scales to unset.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn roll_back(&self) -> Result<()> {
        self.amax_history.fill(0..self.slots, self.options.rest)?;
        self.scale.replace_negative(UNSET)
    }

    /// The address of row 0 on a GPU: [`slots`](Self::slots) f32.
    pub(crate) fn cuda_staged(&self, op: &'static str) -> Result<u64> {
        Ok(self.amax_history.cuda(op)?.ptr())
    }

    /// `[history_len][slots]`, staging first.
    pub(crate) fn history_cells(&self) -> &Cells {
        &self.amax_history
    }

    pub(crate) fn scale_cells(&self) -> &Cells {
        &self.scale
    }

    pub(crate) fn skipped_counts(&self) -> &Counts {
        &self.skipped_non_finite
    }

    /// The clock's reading for each slot, and the reading at its last update here.
    pub(crate) fn update_counts(&self) -> (&Counts, &Counts) {
        (self.clock.counts(), &self.last_updates)
    }

    #[expect(clippy::needless_pass_by_ref_mut, reason = "who updates an arena holds it alone")]
    pub(crate) fn finish_update(&mut self) {
        self.updates.count.fetch_add(1, Relaxed);
        if self.device.capture_number().is_none() {
            self.updates.is_set_back.store(false, Relaxed);
        }
        self.device.on_replay(self.updates.clone());
    }

    fn expect_slot(&self, op: &'static str, slot: usize) -> Result<()> {
        if slot < self.slots {
            return Ok(());
        }
        let remedy = format!("this arena has {} slots, numbered from 0", self.slots);
        Err(Error::Option { op, option: "slot", value: slot.to_string(), remedy })
    }

    fn expect_rows(&self, op: &'static str, values: &[f32], fits: bool) -> Result<()> {
        if fits {
            return Ok(());
        }
        Err(Error::Elements { op, len: values.len(), shape: [self.slots].into() })
    }
}

/// Prints sizes, device and the number of updates.
impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slots, options: ArenaOptions { history_len, .. }, device, .. } = self;
        write!(f, "Arena({slots} slots, history_len {history_len}, {device}, {} updates)", self.updates())
    }
}

/// Refuses a history without rows, and an arena that no memory holds.
fn check_size(slots: usize, options: &ArenaOptions) -> Result<()> {
    let sizes = Shape::from([options.history_len, slots, CounterValues::LEN]);
    if options.history_len > 0 && sizes.check_size("arena").is_ok() {
        return Ok(());
    }
    Err(Error::Option {
        op: "arena",
        option: "amax_history_len",
        value: options.history_len.to_string(),
        remedy: format!("expected at least 1, and at most what fits into memory for {slots} slots"),
    })
}
