//! The confirmed scales of a block, as far as the host knows them without waiting.
//!
//! A scale above 0 is confirmed: kernels only replace it by another scale above 0. Once the host has read one, quantizing
//! needs neither the tensor's amax nor a read of the cell first. After an update of scales the block is copied to pinned
//! memory, unless all of its scales are known to be confirmed. Later queries check whether the copy has arrived.

use super::context::Context;
use super::memory::Buffer;
use crate::{Result, host};
use cudarc::driver::{result, sys};
use parking_lot::Mutex;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The cells of one block that are known to contain a scale above 0.
pub(crate) struct Known {
    context: Arc<Context>,
    /// Identifies the block in this process.
    block: u64,
    state: Mutex<State>,
}

struct State {
    set: Vec<bool>,
    /// For each cell, how often the host has written a value that is not a confirmed scale.
    losses: Vec<u32>,
    /// For each cell, whether [`confirm`](Known::confirm) has said since that it holds a confirmed scale.
    confirmed: Vec<bool>,
    /// For each cell of a copy, the history of the confirmed cell that it is a copy of, until the host writes into the copy.
    origins: Vec<Option<History>>,
    readback: Option<Readback>,
}

/// A cell, and what the host has done to it: see [`Known::history`].
pub(crate) type History = (u64, usize, u32);

/// Pinned memory for the block, and the event recorded after the copy into it.
struct Readback {
    memory: *mut f32,
    copied: sys::CUevent,
    is_in_flight: bool,
    /// Whether the host has written cells since the copy was queued, so that its values must not be used.
    is_stale: bool,
}

// SAFETY: the memory and the event belong to the process, not to a thread; they are used behind a lock.
unsafe impl Send for Readback {}

impl Known {
    /// Describes a new block of `len` cells of one value.
    pub(crate) fn new(context: &Arc<Context>, len: usize, value: f32) -> Result<Self> {
        Self::of(context, host::filled("cells", value > 0.0, len)?, host::filled("cells", None, len)?)
    }

    fn of(context: &Arc<Context>, set: Vec<bool>, origins: Vec<Option<History>>) -> Result<Self> {
        static BLOCKS: AtomicU64 = AtomicU64::new(0);
        let losses = host::filled("cells", 0, set.len())?;
        let confirmed = host::collect("cells", origins.iter().map(Option::is_some))?;
        let state = Mutex::new(State { set, losses, confirmed, origins, readback: None });
        Ok(Self { context: Arc::clone(context), block: BLOCKS.fetch_add(1, Relaxed), state })
    }

    /// Describes a copy of the block that is queued now.
    pub(crate) fn of_copy(&self) -> Result<Self> {
        let mut state = self.state.lock();
        state.receive();
        let origin =
            |index| state.confirmed.get(index).is_some_and(|&is| is).then(|| self.history_in(&state, index));
        let origins = host::collect("cells", (0..state.set.len()).map(origin))?;
        Self::of(&self.context, host::copied("cells", &state.set)?, origins)
    }

    /// Returns whether the cell contains a scale above 0, both now and when work queued from now on runs.
    pub(crate) fn is_set(&self, index: usize) -> bool {
        let mut state = self.state.lock();
        if !state.set.get(index).is_some_and(|&set| set) {
            state.receive();
        }
        state.set.get(index).is_some_and(|&set| set)
    }

    /// Notes that the host has read a scale above 0 from the cell, after all queued work.
    pub(crate) fn was_read(&self, index: usize) {
        if let Some(set) = self.state.lock().set.get_mut(index) {
            *set = true;
        }
    }

    /// Notes that all ranks have found a confirmed scale in this cell. Copies of it from now on have its history.
    pub(crate) fn confirm(&self, index: usize) {
        let mut state = self.state.lock();
        let State { set, confirmed, .. } = &mut *state;
        for known in [set, confirmed] {
            if let Some(known) = known.get_mut(index) {
                *known = true;
            }
        }
    }

    /// Returns a value that identifies the cell and changes when the host writes a value into it that is not a confirmed
    /// scale. Work on the device does not change it, so it changes alike on ranks whose hosts make the same calls. The copy of a
    /// [confirmed](Self::confirm) cell has the cell's: it holds a confirmed scale, too.
    pub(crate) fn history(&self, index: usize) -> History {
        self.history_in(&self.state.lock(), index)
    }

    fn history_in(&self, state: &State, index: usize) -> History {
        let own = || (self.block, index, state.losses.get(index).copied().unwrap_or_default());
        state.origins.get(index).copied().flatten().unwrap_or_else(own)
    }

    /// Notes that the host writes these cells, `value(0)` into the first.
    pub(crate) fn written(&self, range: Range<usize>, value: impl Fn(usize) -> f32) {
        let mut state = self.state.lock();
        if let Some(readback) = &mut state.readback {
            readback.is_stale = readback.is_in_flight;
        }
        let State { set, losses, confirmed, origins, .. } = &mut *state;
        for (i, index) in range.enumerate() {
            let is_confirmed = value(i).is_finite() && value(i) > 0.0;
            if let Some(set) = set.get_mut(index) {
                *set = value(i) > 0.0;
            }
            if let Some(origin) = origins.get_mut(index) {
                *origin = None; // a copy no more
            }
            if let (false, Some(losses), Some(confirmed)) =
                (is_confirmed, losses.get_mut(index), confirmed.get_mut(index))
            {
                *losses = losses.wrapping_add(1);
                *confirmed = false;
            }
        }
    }

    /// Queues a copy of the block after the work so far, unless all cells are known or a copy is already in flight.
    pub(crate) fn refresh(&self, cells: &Buffer) -> Result<()> {
        let mut state = self.state.lock();
        if self.context.is_capturing() {
            // A step is recorded with the scales that are known now. A later refresh finds the others.
            return Ok(());
        }
        state.receive();
        let len = state.set.len();
        if state.set.iter().all(|&set| set) {
            return Ok(());
        }
        let readback = match &mut state.readback {
            Some(readback) => readback,
            none => none.insert(Readback::new(&self.context, len)?),
        };
        if readback.is_in_flight {
            return Ok(());
        }
        readback.queue(&self.context, cells, len)
    }
}

impl State {
    /// Uses the values of a copy that has arrived.
    fn receive(&mut self) {
        let Some(readback) = self.readback.as_mut().filter(|readback| readback.has_arrived()) else { return };
        readback.is_in_flight = false;
        if readback.is_stale {
            return;
        }
        // SAFETY: the block has as many cells, all copied before the event that has happened.
        let values = unsafe { std::slice::from_raw_parts(readback.memory, self.set.len()) };
        self.set.iter_mut().zip(values).for_each(|(set, &value)| *set |= value > 0.0);
    }
}

impl Readback {
    fn new(context: &Context, len: usize) -> Result<Self> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let copied = result::event::create(flags)
            .map_err(|error| context.driver_error("cuEventCreate", "update_scales", error))?;
        // SAFETY: flags 0 are plain pinned memory; freed by Drop of Known.
        match unsafe { result::malloc_host(4 * len, 0) } {
            Ok(memory) => Ok(Self { memory: memory.cast(), copied, is_in_flight: false, is_stale: false }),
            Err(error) => {
                // SAFETY: made above, used by nothing.
                let _ = unsafe { result::event::destroy(copied) };
                Err(context.driver_error("cuMemHostAlloc", "update_scales", error))
            }
        }
    }

    fn queue(&mut self, context: &Context, cells: &Buffer, len: usize) -> Result<()> {
        // SAFETY: pinned memory for `len` f32, into which no copy is in flight: any bytes are f32.
        let memory = unsafe { std::slice::from_raw_parts_mut(self.memory, len) };
        // SAFETY: the block holds as many; the memory stays until Known's Drop has waited for the event.
        unsafe { result::memcpy_dtoh_async(memory, cells.ptr(), context.raw_stream()) }
            .map_err(|error| context.driver_error("cuMemcpyDtoHAsync", "update_scales", error))?;
        // SAFETY: both are this device's and alive.
        if let Err(error) = unsafe { result::event::record(self.copied, context.raw_stream()) } {
            // Without an event, the host must wait for the copy.
            let _ = context.stream().synchronize();
            return Err(context.driver_error("cuEventRecord", "update_scales", error));
        }
        (self.is_in_flight, self.is_stale) = (true, false);
        Ok(())
    }

    fn has_arrived(&self) -> bool {
        // SAFETY: the event is alive, and recorded behind the copy in flight.
        self.is_in_flight && unsafe { result::event::query(self.copied) }.is_ok()
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let Some(readback) = self.state.get_mut().readback.take() else { return };
        let _ = self.context.stream().context().bind_to_thread();
        if readback.is_in_flight {
            // A failure leaves the device unusable: nothing is copied any more.
            let _ = self.context.stream().synchronize();
        }
        // SAFETY: made by Readback::new and destroyed once.
        let _ = unsafe { result::event::destroy(readback.copied) };
        // SAFETY: as above; no copy into it is in flight any more.
        let _ = unsafe { result::free_host(readback.memory.cast()) };
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        let known = state.set.iter().filter(|&&set| set).count();
        write!(f, "Known({known} of {})", state.set.len())
    }
}
