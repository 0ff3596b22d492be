//! The scales by which tensors of the last update are quantized again.

use super::Arena;
use crate::cells::Cells;
use crate::{Cell, Result, UNSET, host};

impl Arena {
    /// Returns, for each slot, the scale by which a tensor that was quantized in the last updated scope is quantized again,
    /// so that an FP8 copy can be made anew. For a slot whose scale came from a recorded amax before that update, this is the
    /// scale that it had then. For one whose scale comes from a recorded amax since that update, it is the new scale, because
    /// the scope quantized with a first scale. [`UNSET`] if no recorded amax has determined a scale: such a slot has its
    /// [`first_scale`](crate::ArenaOptions::first_scale) or, if that is [`UNSET`], takes each tensor's own.
    ///
    /// ```
    /// use fp8_kernels::{Arena, ArenaOptions, Device, ScalePolicy, ScaleRule, UNSET, ops};
    /// let options = ArenaOptions { history_len: 2, first_scale: 1.0, ..Default::default() };
    /// let mut arena = Arena::new(1, options, &Device::cpu())?;
    /// assert_eq!((arena.scales()?, arena.cast_scales()?), (vec![1.0], vec![UNSET]));
    /// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    /// let update =
    ///     ops::ScaleUpdate { amax: ops::AmaxRule::MostRecent, rule: &rule, interval: 1, record_non_finite: false };
    /// for (amax, scale, cast_scale) in [(0.0, 1.0, UNSET), (3.5, 128.0, 128.0), (7.0, 64.0, 128.0)] {
    ///     arena.merge_staged(&[amax])?;
    ///     ops::update_scales(&mut arena, &update)?;
    ///     assert_eq!((arena.scales()?, arena.cast_scales()?), (vec![scale], vec![cast_scale]));
    /// }
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn cast_scales(&self) -> Result<Vec<f32>> {
        self.cast_scale.read(0..self.slots)
    }

    /// Sets the [`cast_scales`](Self::cast_scales). [`set_scales`](Self::set_scales) has set them to the scales, so this is
    /// only needed for slots whose scale comes from no recorded amax, or whose last update is to be restored.
    ///
    /// ```
    /// use fp8_kernels::{Arena, ArenaOptions, Device, UNSET};
    /// let mut arena = Arena::new(2, ArenaOptions { first_scale: 1.0, ..Default::default() }, &Device::cpu())?;
    /// arena.set_scales(&[1.0, 128.0])?;
    /// arena.set_cast_scales(&[UNSET, 64.0])?;
    /// assert_eq!((arena.is_determined(0), arena.is_determined(1)), (false, true));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// Another number of scales than slots; the device failed.
    pub fn set_cast_scales(&mut self, scales: &[f32]) -> Result<()> {
        self.expect_rows("set_cast_scales", scales, scales.len() == self.slots)?;
        self.write_cast_scales(scales)
    }

    pub(super) fn write_cast_scales(&self, scales: &[f32]) -> Result<()> {
        let mut cast_scales = host::copied("set_cast_scales", scales)?;
        // A provisional scale comes from no recorded amax.
        let provisional = cast_scales.iter_mut().filter(|scale| scale.is_nan() || **scale <= 0.0);
        provisional.for_each(|scale| *scale = UNSET);
        self.cast_scale.write(0, &cast_scales)
    }

    /// Returns whether a recorded amax has determined a slot's scale, as far as the host knows without waiting for the device.
    /// Once it is true it stays so, unless scales are set. On a GPU it becomes true some time after the update.
    ///
    /// ```
    /// use fp8_kernels::{Arena, ArenaOptions, Device};
    /// let mut arena = Arena::new(1, ArenaOptions::default(), &Device::cpu())?;
    /// assert!(!arena.is_determined(0));
    /// arena.set_scales(&[128.0])?;
    /// assert!(arena.is_determined(0));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn is_determined(&self, slot: usize) -> bool {
        // A positive scale cell says the same unless it started as one, and costs no second copy to the host.
        let cells = if self.options.first_scale > 0.0 { &self.cast_cells } else { &self.scale_cells };
        cells.get(slot).is_some_and(Cell::is_determined)
    }

    /// Allocates cells for a copy of the [`cast_scales`](Self::cast_scales), which [`KeptScales::fill`] makes after an update.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn kept_scales(&self) -> Result<KeptScales> {
        Ok(KeptScales { cells: self.cast_scale.duplicate()? })
    }

    pub(crate) fn cast_scale_cells(&self) -> &Cells {
        &self.cast_scale
    }

    /// Notes that queued work may have set scales.
    pub(crate) fn refresh_known(&self) {
        let cells = if self.options.first_scale > 0.0 { &self.cast_scale } else { &self.scale };
        // Not to know cells costs time only, and the next call reports what breaks the device.
        drop(cells.refresh_known());
    }
}

/// A copy of an arena's [`cast_scales`](Arena::cast_scales), which later updates do not change.
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, Device};
/// let mut arena = Arena::new(2, ArenaOptions::default(), &Device::cpu())?;
/// let kept = arena.kept_scales()?;
/// arena.set_cast_scales(&[64.0, 128.0])?; // or an update
/// let cells = kept.fill(&arena, &[1])?;
/// arena.set_cast_scales(&[1.0, 2.0])?;
/// assert_eq!(cells[0].read()?, 128.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct KeptScales {
    cells: Cells,
}

impl KeptScales {
    /// Copies the scales of `arena`, in one copy on the device, and returns the cells of `slots`. Nothing waits.
    ///
    /// # Errors
    /// A slot that the arena does not have; another arena than the one that allocated the cells; the device failed.
    pub fn fill(self, arena: &Arena, slots: &[usize]) -> Result<Vec<Cell>> {
        self.cells.copy_from(&arena.cast_scale)?;
        let cells: Vec<Cell> = slots.iter().map(|&slot| self.cells.handle(slot)).collect::<Result<_>>()?;
        let determined = cells.iter().zip(slots).filter(|(_, slot)| arena.is_determined(**slot));
        determined.for_each(|(cell, _)| cell.assume_determined());
        Ok(cells)
    }
}
