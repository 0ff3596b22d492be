//! A flag that ranks reduce together with the amaxes.

use super::{Arena, LEAD};
use crate::{Cell, Result};
use std::sync::atomic::Ordering::Relaxed;

impl Arena {
    /// Puts a flag, 0 or 1, in front of row 0, so that the ranks' next reduction of the amaxes also gives all of them the
    /// largest of their flags. [`take_flag`](Self::take_flag) ends this.
    ///
    /// ```
    /// use fp8_kernels::{Arena, ArenaOptions, Cell, Device, REST};
    /// let arena = Arena::new(2, ArenaOptions::default(), &Device::cpu())?;
    /// let flag = Cell::new(0.0, &Device::cpu())?;
    /// arena.carry_flag(&flag)?;
    /// assert_eq!(arena.staged()?, [0.0, REST, REST]);
    /// arena.merge_staged(&[1.0, 3.5, REST])?; // another rank's
    /// arena.take_flag(&flag)?;
    /// assert_eq!((flag.read()?, arena.staged()?), (1.0, vec![3.5, REST]));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// A flag on another device; the device failed.
    pub fn carry_flag(&self, flag: &Cell) -> Result<()> {
        self.flag.merge_cell(flag)?;
        self.carries_flag.store(true, Relaxed);
        Ok(())
    }

    /// Max-combines the flag that the arena carries into `flag`. Afterwards the arena carries none.
    ///
    /// # Errors
    /// A flag on another device; the device failed.
    pub fn take_flag(&self, flag: &Cell) -> Result<()> {
        flag.merge_cell(&self.flag)?;
        self.drop_flag()
    }

    pub(super) fn carries_flag(&self) -> bool {
        self.carries_flag.load(Relaxed)
    }

    pub(super) fn drop_flag(&self) -> Result<()> {
        self.amax_history.fill(LEAD - 1..LEAD, 0.0)?;
        self.carries_flag.store(false, Relaxed);
        Ok(())
    }
}
