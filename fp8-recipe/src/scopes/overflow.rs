//! Whether gradients overflowed on any rank: a flag that the commit of a backward scope reduces together with the amaxes.

use crate::arenas::domain::Domain;
use crate::{AmaxGroup, Direction, Result};
use fp8_kernels::{Arena, ArenaOptions, Cell, Device, UNSET, ops};
use std::sync::Arc;

/// The flag of the open scope, and the largest amax of the gradients whose amaxes no arena keeps. They are the staging cells
/// of an arena, so that groups can also reduce them alone.
///
/// The amaxes count because quantizing saturates: products with the codes of an infinite gradient are finite.
#[derive(Debug)]
pub(crate) struct Overflow {
    arena: Arena,
    flag: Cell,
    amax: Cell,
    /// Whether the flag of a scope that was left could not be cleared yet.
    is_stale: bool,
}

impl Overflow {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let options = ArenaOptions { history_len: 1, rest: 0.0, first_scale: UNSET };
        let arena = Arena::new(2, options, device)?;
        let cell = |slot| arena.staging(slot).cloned().map_or_else(|| Cell::new(0.0, device), Ok);
        Ok(Self { flag: cell(0)?, amax: cell(1)?, arena, is_stale: false })
    }

    /// Returns the cell of the flag: 0, or 1 if this rank's gradients overflowed.
    pub(crate) fn flag(&self) -> &Cell {
        &self.flag
    }

    /// Returns the cell for the amaxes of gradients whose slots have none.
    pub(crate) fn amax(&self) -> &Cell {
        &self.amax
    }

    /// Sets the flag if an amax of a gradient is not finite.
    pub(crate) fn check_amaxes<'a>(&self, mut arenas: impl Iterator<Item = &'a Arena>) -> Result<()> {
        ops::check_amaxes(&self.arena, &self.flag)?;
        Ok(arenas.try_for_each(|arena| ops::check_amaxes(arena, &self.flag))?)
    }

    /// Reduces the amaxes of a domain, and the flag with them.
    pub(crate) fn reduce_with(
        &self,
        domain: &mut Domain,
        direction: Direction,
        names: &[Arc<str>],
    ) -> Result<()> {
        if let Some(arenas) = &domain.arenas {
            arenas[direction].own().carry_flag(&self.flag)?;
        }
        domain.reduce(direction, names)?;
        domain.arenas.as_ref().map_or(Ok(()), |arenas| Ok(arenas[direction].own().take_flag(&self.flag)?))
    }

    /// Reduces the flag alone.
    pub(crate) fn reduce(&self, group: &dyn AmaxGroup) -> Result<()> {
        group.all_reduce_max("overflow of gradients", &self.arena)
    }

    /// Max-combines the flag into `results` and clears it.
    pub(crate) fn finish(&self, results: &[Cell]) -> Result<()> {
        results.iter().try_for_each(|result| result.merge_cell(&self.flag))?;
        Ok(self.arena.roll_back()?)
    }

    /// Clears the flag of a scope that is left. If the device fails, [`restore`](Self::restore) tries again later.
    pub(crate) fn roll_back(&mut self) -> Result<()> {
        self.is_stale = true;
        self.arena.roll_back()?;
        self.is_stale = false;
        Ok(())
    }

    /// Repeats a [`roll_back`](Self::roll_back) that failed.
    pub(crate) fn restore(&mut self) -> Result<()> {
        if self.is_stale { self.roll_back() } else { Ok(()) }
    }
}
