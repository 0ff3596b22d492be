//! The amax histories and scales of all slots of one direction, contiguous, at addresses that never move.
//!
//! Row 0 is staging: operations max-combine the current amaxes into it, and it is itself the buffer that ranks reduce.
//! Rows 1 … len − 1 run from oldest to newest. For len 1, row 0 is staging and window at once.
//!
//! Reading or writing all slots is one copy between device and host. Reading or writing a single slot is at least one copy
//! too, so code that needs many slots uses the functions for all of them.

mod cast_scales;
mod flag;
mod rows;

pub use cast_scales::KeptScales;

use crate::cells::{Cells, Counts};
use crate::{
    Cell, CounterValues, Counters, Device, Error, REST, Replayed, Result, Shape, UNSET, UpdateClock, host,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

/// Options of an [`Arena`].
#[derive(Debug, Clone, Copy)]
pub struct ArenaOptions {
    /// The number of rows of the amax history, including staging. Default: 1024.
    pub history_len: usize,
    /// The value of a staging cell whose slot has not run: [`REST`], or 0 for Transformer Engine's rule. Default: [`REST`].
    pub rest: f32,
    /// The initial value of scale cells: [`UNSET`] to calibrate on the first step, or 1. Default: [`UNSET`].
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
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, Device, REST, UNSET};
/// let mut arena = Arena::new(2, ArenaOptions { history_len: 4, ..Default::default() }, &Device::cpu())?;
/// assert_eq!(arena.staged()?, [REST; 2]); // no slot has run
/// assert_eq!(arena.scales()?, [UNSET; 2]); // and none has a scale
///
/// arena.merge_staged(&[3.5, REST])?; // slot 0 runs
/// assert_eq!(arena.staged()?, [3.5, REST]);
/// arena.roll_back()?;
/// assert_eq!(arena.staged()?, [REST; 2]);
///
/// arena.set_window(1, &[1.0, 2.0])?;
/// assert_eq!(arena.window(1)?, [0.0, 1.0, 2.0]); // oldest to newest
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub struct Arena {
    device: Device,
    options: ArenaOptions,
    slots: usize,
    /// [`LEAD`] cells, the last of which is the flag, then `[history_len][slots]`.
    amax_history: Cells,
    scale: Cells,
    /// See [`Arena::cast_scales`].
    cast_scale: Cells,
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
    cast_cells: Vec<Cell>,
    slot_counters: Vec<Counters>,
    flag: Cell,
    /// Whether ranks reduce the flag together with row 0.
    carries_flag: AtomicBool,
}

/// The cells before row 0. Row 0 begins at a multiple of 128 bytes, and the flag is directly before it, so that one
/// reduction covers both.
const LEAD: usize = 32;

/// The number of committed scopes that have updated an arena.
#[derive(Debug, Default)]
struct Updates {
    count: AtomicU64,
    /// Whether slots have lost scales that were confirmed. Recorded steps rely on those scales and would quantize with 1.
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
    /// Allocates an arena in which no slot has run, with an update clock of its own.
    ///
    /// # Errors
    /// A history of no rows, or one too large for memory.
    pub fn new(slots: usize, options: ArenaOptions, device: &Device) -> Result<Self> {
        check_size(slots, &options)?;
        Self::with_clock(&UpdateClock::new(slots, device)?, options)
    }

    /// Allocates an arena for the slots of `clock`, on its device. No slot has run yet. Arenas that share a clock can be
    /// compared to find the one that updated a slot last: see [`last_updates`](Self::last_updates).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_clock(clock: &UpdateClock, options: ArenaOptions) -> Result<Self> {
        let (slots, device) = (clock.slots(), clock.device());
        check_size(slots, &options)?;
        device.expect_eager("arena", "open a scope of this recipe once before")?;
        let amax_history = Cells::new(LEAD + options.history_len * slots, 0.0, device)?;
        // The handles need the most memory, so an arena that is too large fails here, before cells are written.
        let staging_cells = amax_history.handles(LEAD..LEAD + slots)?;
        amax_history.fill(LEAD..LEAD + slots, options.rest)?;
        let flag = amax_history.handle(LEAD - 1)?;
        let scale = Cells::new(slots, options.first_scale, device)?;
        let cast_scale = Cells::new(slots, UNSET, device)?;
        let counters = Counts::new(slots * CounterValues::LEN, device)?;
        Ok(Self {
            device: device.clone(),
            options,
            slots,
            staging_cells,
            scale_cells: scale.handles(0..slots)?,
            cast_cells: cast_scale.handles(0..slots)?,
            slot_counters: counters.handles(slots)?,
            flag,
            carries_flag: AtomicBool::new(false),
            skipped_non_finite: Counts::new(slots, device)?,
            clock: clock.clone(),
            last_updates: Counts::new(slots, device)?,
            amax_history,
            scale,
            cast_scale,
            counters,
            updates: Arc::default(),
        })
    }

    /// Returns the device that the arena is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the options that the arena was made with.
    pub fn options(&self) -> &ArenaOptions {
        &self.options
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of committed scopes that have updated the arena.
    pub fn updates(&self) -> u64 {
        self.updates.count.load(Relaxed)
    }

    /// Sets the number of updates, when training resumes.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates.count.store(updates, Relaxed);
    }

    /// Returns the reading of the arena's [`UpdateClock`] after each slot's last update here, or 0 for a slot that was never
    /// updated. Of two arenas with one clock, the one with the larger number has the newer history of a slot. An update that
    /// does not change a slot (it did not run, or its amax was left out) does not count.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn last_updates(&self) -> Result<Vec<u64>> {
        self.last_updates.read(0..self.slots)
    }

    /// Replaces what [`last_updates`](Self::last_updates) returns, when training resumes. The clock stays as it is.
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

    /// Returns the staging cell of a slot, or `None` if there is no such slot.
    pub fn staging(&self, slot: usize) -> Option<&Cell> {
        self.staging_cells.get(slot)
    }

    /// Returns the scale cell of a slot, or `None` if there is no such slot.
    pub fn scale(&self, slot: usize) -> Option<&Cell> {
        self.scale_cells.get(slot)
    }

    /// Returns the counters of a slot, or `None` if there is no such slot.
    pub fn counters(&self, slot: usize) -> Option<&Counters> {
        self.slot_counters.get(slot)
    }

    /// Returns the values of the scale cells of all slots; provisional scales are negative.
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
        self.write_cast_scales(scales)?;
        if is_set_back {
            self.updates.is_set_back.store(true, Relaxed);
        }
        Ok(())
    }

    /// Copies all scale cells in one copy on the device. Later updates do not change the copies.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn copy_scales(&self) -> Result<Vec<Cell>> {
        self.scale.duplicate()?.handles(0..self.slots)
    }

    /// Returns the values of the counters of all slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn counters_all(&self) -> Result<Vec<CounterValues>> {
        Ok(CounterValues::from_block(&self.counters.read(0..self.slots * CounterValues::LEN)?))
    }

    /// Sets the counters of all slots to zero.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset_counters(&self) -> Result<()> {
        self.counters.reset(0..self.slots * CounterValues::LEN)
    }

    /// Returns how often a slot's amax was not finite and was therefore left out of its window.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn skipped_non_finite(&self, slot: usize) -> Result<u64> {
        self.expect_slot("skipped_non_finite", slot)?;
        Ok(self.skipped_non_finite.read(slot..slot + 1)?.first().copied().unwrap_or(0))
    }

    /// Returns [`skipped_non_finite`](Self::skipped_non_finite) of all slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn skipped_non_finite_all(&self) -> Result<Vec<u64>> {
        self.skipped_non_finite.read(0..self.slots)
    }

    /// Returns rows 1 … len − 1 of all slots, row by row from oldest to newest.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn history(&self) -> Result<Vec<f32>> {
        self.amax_history.read(LEAD + self.slots..LEAD + self.options.history_len * self.slots)
    }

    /// Replaces rows 1 … len − 1 of all slots. Of more rows, the newest are taken; fewer rows are preceded by zeros.
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
        self.amax_history.write(LEAD + self.slots, &history)
    }

    /// Returns rows 1 … len − 1 of a slot, from oldest to newest.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn window(&self, slot: usize) -> Result<Vec<f32>> {
        self.expect_slot("window", slot)?;
        Ok(self.history()?.into_iter().skip(slot).step_by(self.slots).collect())
    }

    /// Replaces rows 1 … len − 1 of a slot. Of a longer `window`, the newest values are taken; a shorter one is preceded by
    /// zeros.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn set_window(&mut self, slot: usize, window: &[f32]) -> Result<()> {
        self.expect_slot("set_window", slot)?;
        let mut history = self.history()?;
        let newest_first = window.iter().rev().copied().chain(std::iter::repeat(0.0));
        let rows = history.chunks_exact_mut(self.slots).rev();
        rows.filter_map(|row| row.get_mut(slot)).zip(newest_first).for_each(|(cell, amax)| *cell = amax);
        self.amax_history.write(LEAD + self.slots, &history)
    }

    /// Returns the newest amax of a slot's window, or 0 for a history of length 1, which has no past amaxes.
    ///
    /// # Errors
    /// No such slot; the device failed.
    pub fn newest(&self, slot: usize) -> Result<f32> {
        self.expect_slot("newest", slot)?;
        match self.options.history_len {
            1 => Ok(0.0),
            rows => self.amax_history.read_one(LEAD + (rows - 1) * self.slots + slot),
        }
    }

    /// Returns [`newest`](Self::newest) of all slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn newest_all(&self) -> Result<Vec<f32>> {
        match self.options.history_len {
            1 => host::zeroed("newest_all", self.slots),
            rows => self.amax_history.read(LEAD + (rows - 1) * self.slots..LEAD + rows * self.slots),
        }
    }

    /// Copies what ranks reduce to the host: row 0, preceded by the flag while the arena [carries one](Self::carry_flag).
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn staged(&self) -> Result<Vec<f32>> {
        self.amax_history.read(LEAD - usize::from(self.carries_flag())..LEAD + self.slots)
    }

    /// Returns the number of values that ranks reduce, the length of [`staged`](Self::staged).
    pub fn staged_len(&self) -> usize {
        self.slots + usize::from(self.carries_flag())
    }

    /// Max-combines what another rank has [`staged`](Self::staged) into this arena.
    ///
    /// # Errors
    /// Another number of values; the device failed.
    pub fn merge_staged(&self, row: &[f32]) -> Result<()> {
        self.expect_rows("merge_staged", row, row.len() == self.staged_len())?;
        self.amax_history.merge_max(LEAD - usize::from(self.carries_flag()), row)
    }

    /// Discards what an open scope wrote: puts staging back to rest and provisional scales back to [`UNSET`].
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn roll_back(&self) -> Result<()> {
        self.amax_history.fill(LEAD..LEAD + self.slots, self.options.rest)?;
        if self.carries_flag() {
            self.drop_flag()?;
        }
        self.scale.replace_negative(UNSET)
    }

    /// Returns the address of what ranks reduce on a GPU, an array of [`staged_len`](Self::staged_len) f32.
    pub(crate) fn cuda_staged(&self, op: &'static str) -> Result<u64> {
        Ok(self.cuda_history(op)? - if self.carries_flag() { 4 } else { 0 })
    }

    /// Returns the address of `[history_len][slots]` f32 on a GPU, staging first.
    pub(crate) fn cuda_history(&self, op: &'static str) -> Result<u64> {
        Ok(self.amax_history.cuda(op)?.ptr() + 4 * LEAD as u64)
    }

    /// Returns `[history_len][slots]` in host memory, staging first.
    pub(crate) fn cpu_history(&self, op: &'static str) -> Result<&[AtomicI32]> {
        Ok(self.amax_history.cpu(op)?.get(LEAD..).unwrap_or_default())
    }

    /// Reads all rows, staging first.
    pub(crate) fn all_rows(&self) -> Result<Vec<f32>> {
        self.amax_history.read(LEAD..LEAD + self.options.history_len * self.slots)
    }

    /// Replaces all rows, staging first.
    pub(crate) fn set_all_rows(&self, rows: &[f32]) -> Result<()> {
        self.amax_history.write(LEAD, rows)
    }

    pub(crate) fn scale_cells(&self) -> &Cells {
        &self.scale
    }

    pub(crate) fn skipped_counts(&self) -> &Counts {
        &self.skipped_non_finite
    }

    /// Returns the clock's reading for each slot, and its reading at the last update of the slot in this arena.
    pub(crate) fn update_counts(&self) -> (&Counts, &Counts) {
        (self.clock.counts(), &self.last_updates)
    }

    #[expect(clippy::needless_pass_by_ref_mut, reason = "an update needs exclusive access to the arena")]
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
}

/// Prints sizes, device and the number of updates.
impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slots, options: ArenaOptions { history_len, .. }, device, .. } = self;
        write!(f, "Arena({slots} slots, history_len {history_len}, {device}, {} updates)", self.updates())
    }
}

/// Returns an error for a history without rows, or an arena too large for memory.
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
