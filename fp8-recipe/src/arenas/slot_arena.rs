//! An arena that has some of a model's slots.

use crate::Result;
use fp8_kernels::{Arena, ArenaOptions, Cell, Counters, UNSET, UpdateClock};
use std::ops::Range;

/// The arena of one recipe and pass. It has the slots that the recipe uses, a range of the model's.
///
/// The functions address slots by their index in the model. Those that read or write all slots take the model's slots, of which
/// the ones that the arena does not have are 0 and ignored.
#[derive(Debug)]
pub(crate) struct SlotArena {
    arena: Arena,
    used: Range<usize>,
    /// The number of the model's slots.
    all: usize,
}

impl SlotArena {
    /// Creates an arena for the slots `used` of those of `clock`. With `counts`, the clock counts its updates.
    pub(crate) fn new(
        clock: &UpdateClock,
        used: Range<usize>,
        options: ArenaOptions,
        counts: bool,
    ) -> Result<Self> {
        let arena = if counts {
            Arena::with_clock(&clock.part(used.clone())?, options)?
        } else {
            Arena::new(used.len(), options, clock.device())?
        };
        Ok(Self { arena, used, all: clock.slots() })
    }

    /// Returns the arena itself, which numbers its own slots from 0.
    pub(crate) fn own(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn own_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    pub(crate) fn options(&self) -> &ArenaOptions {
        self.arena.options()
    }

    pub(crate) fn updates(&self) -> u64 {
        self.arena.updates()
    }

    pub(crate) fn set_updates(&mut self, updates: u64) {
        self.arena.set_updates(updates);
    }

    /// Returns a slot's index in the arena itself.
    pub(crate) fn index(&self, slot: usize) -> Option<usize> {
        self.used.contains(&slot).then(|| slot - self.used.start)
    }

    pub(crate) fn scale(&self, slot: usize) -> Option<&Cell> {
        self.arena.scale(self.index(slot)?)
    }

    pub(crate) fn staging(&self, slot: usize) -> Option<&Cell> {
        self.arena.staging(self.index(slot)?)
    }

    pub(crate) fn counters(&self, slot: usize) -> Option<&Counters> {
        self.arena.counters(self.index(slot)?)
    }

    pub(crate) fn scales(&self) -> Result<Vec<f32>> {
        Ok(self.of_model(&self.arena.scales()?, 1))
    }

    /// As [`Arena::cast_scales`]. Slots that the arena does not have are [`UNSET`].
    pub(crate) fn cast_scales(&self) -> Result<Vec<f32>> {
        let mut scales = self.of_model(&self.arena.cast_scales()?, 1);
        scales.iter_mut().filter(|scale| **scale == 0.0).for_each(|scale| *scale = UNSET);
        Ok(scales)
    }

    pub(crate) fn set_cast_scales(&mut self, scales: &[f32]) -> Result<()> {
        Ok(self.arena.set_cast_scales(&self.of_arena(scales))?)
    }

    /// As [`Arena::is_determined`].
    pub(crate) fn is_determined(&self, slot: usize) -> bool {
        self.index(slot).is_some_and(|index| self.arena.is_determined(index))
    }

    pub(crate) fn last_updates(&self) -> Result<Vec<u64>> {
        Ok(self.of_model(&self.arena.last_updates()?, 1))
    }

    /// Returns the past amaxes, row by row from oldest to newest.
    pub(crate) fn history(&self) -> Result<Vec<f32>> {
        Ok(self.of_model(&self.arena.history()?, self.options().history_len - 1))
    }

    pub(crate) fn set_scales(&mut self, scales: &[f32]) -> Result<()> {
        Ok(self.arena.set_scales(&self.of_arena(scales))?)
    }

    pub(crate) fn set_last_updates(&mut self, last_updates: &[u64]) -> Result<()> {
        Ok(self.arena.set_last_updates(&self.of_arena(last_updates))?)
    }

    /// As [`Arena::set_history`], which says what happens to rows that are too many or too few.
    pub(crate) fn set_history(&mut self, rows: &[f32]) -> Result<()> {
        Ok(self.arena.set_history(&self.of_arena(rows))?)
    }

    /// Makes rows of the model's slots from rows of the arena's.
    fn of_model<T: Copy + Default>(&self, values: &[T], rows: usize) -> Vec<T> {
        let mut all = vec![T::default(); rows * self.all];
        let own = values.chunks_exact(self.used.len().max(1));
        for (row, own) in all.chunks_exact_mut(self.all.max(1)).zip(own) {
            row[self.used.clone()].copy_from_slice(own);
        }
        all
    }

    /// Makes rows of the arena's slots from rows of the model's.
    fn of_arena<T: Copy>(&self, rows: &[T]) -> Vec<T> {
        let rows = rows.chunks_exact(self.all.max(1));
        rows.filter_map(|row| row.get(self.used.clone())).flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_kernels::Device;

    #[test]
    fn rows_of_the_model_have_the_arenas_slots_in_their_place() {
        let clock = UpdateClock::new(4, &Device::cpu()).unwrap();
        let options = ArenaOptions { history_len: 3, ..Default::default() };
        let mut arena = SlotArena::new(&clock, 1..3, options, true).unwrap();
        arena.set_history(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
        assert_eq!(arena.own().history().unwrap(), [2.0, 3.0, 6.0, 7.0]);
        assert_eq!(arena.history().unwrap(), [0.0, 2.0, 3.0, 0.0, 0.0, 6.0, 7.0, 0.0]);
        arena.set_scales(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!((arena.scales().unwrap(), arena.own().slots()), (vec![0.0, 2.0, 3.0, 0.0], 2));
        assert_eq!(arena.scale(2).unwrap().read().unwrap(), 3.0);
        assert!(arena.scale(0).is_none() && arena.staging(3).is_none() && arena.counters(3).is_none());
        arena.set_last_updates(&[5, 6, 7, 8]).unwrap();
        assert_eq!(arena.last_updates().unwrap(), [0, 6, 7, 0]);
    }

    #[test]
    fn an_arena_may_have_no_slots() {
        let clock = UpdateClock::new(2, &Device::cpu()).unwrap();
        let mut arena = SlotArena::new(&clock, 1..1, ArenaOptions::default(), true).unwrap();
        arena.set_scales(&[1.0, 1.0]).unwrap();
        assert_eq!((arena.scales().unwrap(), arena.own().slots()), (vec![0.0; 2], 0));
    }
}
