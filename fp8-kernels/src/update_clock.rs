//! Which of several arenas has updated a slot last.
//!
//! Each slot has a count of its own, on the device: an update that rolls the slot's window adds one to it and notes the
//! result as the slot's last update in its arena ([`Arena::last_updates`](crate::Arena::last_updates)). One thread owns a
//! slot, and updates are queued one after the other, so this needs no atomics, no further launch, and nothing from the
//! host: replays of a recorded step count as well.

use crate::cells::Counts;
use crate::{Device, Error, Result};

/// Orders the updates of each slot over all arenas that share it. Clones share the same counts.
///
/// ```
/// use fp8_kernels::{Arena, ArenaOptions, Device, ScalePolicy, ScaleRule, UpdateClock, ops};
/// let clock = UpdateClock::new(1, &Device::cpu())?;
/// let mut arenas = [(); 2].map(|()| Arena::with_clock(&clock, ArenaOptions::default()));
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let update =
///     ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
/// for arena in &mut arenas {
///     let arena = arena.as_mut().map_err(|error| format!("{error}"))?;
///     arena.merge_staged(&[3.5])?;
///     ops::update_scales(arena, &update)?;
/// }
/// let last: Vec<_> = arenas.iter().flatten().flat_map(Arena::last_updates).collect();
/// assert_eq!(last, [[1], [2]]); // the second arena's history is the newer one
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct UpdateClock {
    device: Device,
    slots: usize,
    readings: Counts,
}

impl UpdateClock {
    /// A clock for `slots` slots, all at 0.
    ///
    /// # Errors
    /// More slots than memory's address range holds; a step is being recorded; the device is out of memory or failed.
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

    /// The device that it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// How often each slot has been updated, over all arenas. On a GPU this waits until all work queued so far is done.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn read(&self) -> Result<Vec<u64>> {
        self.readings.read(0..self.slots)
    }

    /// Replaces the readings of all slots, on resuming.
    ///
    /// # Errors
    /// Another number of slots; the device failed.
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
