//! Counts of updates per slot, by which several arenas are ordered.
//!
//! The counts are on the device. In an update, one thread owns a slot, and updates are queued one after the other, so counting
//! needs no atomics, no further launch and no work of the host; replays of a recorded step count, too.

use crate::cells::Counts;
use crate::{Device, Error, Result};
use std::ops::Range;

/// Counts the updates of each slot over all arenas that share the clock, to tell which arena updated a slot last.
///
/// An update that rolls a slot's history adds one to the slot's count, and the arena stores the new count as the slot's last
/// update ([`Arena::last_updates`](crate::Arena::last_updates)). Clones share the counts.
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, Device, ScalePolicy, ScaleRule, UpdateClock, ops};
/// let clock = UpdateClock::new(1, &Device::cpu())?;
/// let mut first = Arena::with_clock(&clock, ArenaOptions::default())?;
/// let mut second = Arena::with_clock(&clock, ArenaOptions::default())?;
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let update =
///     ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
/// for arena in [&mut first, &mut second] {
///     arena.merge_staged(&[3.5])?;
///     ops::update_scales(arena, &update)?;
/// }
/// assert_eq!((first.last_updates()?, second.last_updates()?), (vec![1], vec![2])); // the second has the newer history
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct UpdateClock {
    device: Device,
    slots: usize,
    readings: Counts,
}

impl UpdateClock {
    /// Creates a clock for `slots` slots, with all counts 0.
    ///
    /// # Errors
    /// More slots than fit into memory; a step is being recorded in a graph; the device is out of memory or failed.
    pub fn new(slots: usize, device: &Device) -> Result<Self> {
        if slots > isize::MAX as usize / 8 {
            let remedy = "expected at most what fits into memory".to_owned();
            return Err(Error::Option {
                op: "update clock",
                option: "slots",
                value: slots.to_string(),
                remedy,
            });
        }
        device.expect_eager("update clock", "open a scope of this recipe once before")?;
        Ok(Self { device: device.clone(), slots, readings: Counts::new(slots, device)? })
    }

    /// Returns the clock of those slots alone. It shares their counts with this clock, so arenas of all slots and of some can
    /// be compared.
    ///
    /// ```
    /// use fp8_kernels::{Device, UpdateClock};
    /// let clock = UpdateClock::new(4, &Device::cpu())?;
    /// clock.part(1..3)?.set(&[7, 8])?;
    /// assert_eq!((clock.read()?, clock.part(2..4)?.read()?), (vec![0, 7, 8, 0], vec![8, 0]));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// Slots that the clock does not have.
    pub fn part(&self, slots: Range<usize>) -> Result<Self> {
        let len = slots.len();
        Ok(Self { device: self.device.clone(), slots: len, readings: self.readings.part(slots)? })
    }

    /// Returns the device that the counts are on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns how often each slot has been updated, over all arenas. On a GPU this waits until all work queued so far is
    /// done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<Vec<u64>> {
        self.readings.read(0..self.slots)
    }

    /// Sets the counts of all slots, when training resumes from a checkpoint.
    ///
    /// # Errors
    /// A number of counts that is not the number of slots; the device failed.
    pub fn set(&self, readings: &[u64]) -> Result<()> {
        if readings.len() != self.slots {
            return Err(Error::Elements {
                op: "update clock",
                len: readings.len(),
                shape: [self.slots].into(),
            });
        }
        self.readings.write(readings)
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.readings
    }
}
