//! Small uploads through pinned memory: a ring of segments, so that the host queues a copy and continues.
//!
//! Pageable memory would make the driver wait. A segment is used again when the copies out of it are done; the host waits
//! for that only if a whole ring of uploads is still in flight.

use super::context::Context;
use crate::Result;
use cudarc::driver::{result, sys};

const SEGMENT: usize = 256 * 1024;
const SEGMENTS: usize = 4;

/// A ring of pinned segments, one of them in use.
#[derive(Debug, Default)]
pub(super) struct Staging {
    segments: Vec<Segment>,
    current: usize,
}

#[derive(Debug)]
struct Segment {
    memory: *mut u8,
    used: usize,
    /// Recorded behind the last copy out of it, once the ring has moved on.
    copied: sys::CUevent,
}

// SAFETY: the memory and the event belong to the process, not to a thread; the ring is used behind a lock.
unsafe impl Send for Segment {}

impl Staging {
    /// Queues a copy of `bytes` to `address`; false if they are too many for this, or no memory can be pinned.
    pub(super) fn upload(&mut self, context: &Context, bytes: &[u8], address: u64) -> Result<bool> {
        if bytes.len() > SEGMENT {
            return Ok(false);
        }
        let Some(memory) = self.room(context, bytes.len())? else { return Ok(false) };
        // SAFETY: `room` found a pinned segment with that many unused bytes behind `memory`, which no copy in flight reads;
        // it and `bytes` are different allocations.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len()) };
        // SAFETY: just written, and not changed before the event behind the copy has happened.
        let staged = unsafe { std::slice::from_raw_parts(memory, bytes.len()) };
        // SAFETY: `address` has room for `bytes`, as the caller says; both live until the stream has passed the copy.
        unsafe { result::memcpy_htod_async(address, staged, context.raw_stream()) }
            .map_err(|error| context.driver_error("cuMemcpyHtoDAsync", "upload", error))?;
        Ok(true)
    }

    /// Returns memory to which `len` bytes may be written; `None` if no memory can be pinned.
    fn room(&mut self, context: &Context, len: usize) -> Result<Option<*mut u8>> {
        let fits = |segment: &Segment| segment.used + len <= SEGMENT;
        if !self.segments.get(self.current).is_some_and(fits) && !self.advance(context)? {
            return Ok(None);
        }
        let segment = &mut self.segments[self.current];
        // SAFETY: within the segment's SEGMENT bytes: `fits`, or just emptied and len ≤ SEGMENT.
        let memory = unsafe { segment.memory.add(segment.used) };
        // Whole vectors, so that the next starts aligned.
        segment.used = (segment.used + len).next_multiple_of(16);
        Ok(Some(memory))
    }

    /// Makes a segment without copies in flight the current one; false if there is none and no memory can be pinned.
    fn advance(&mut self, context: &Context) -> Result<bool> {
        if let Some(full) = self.segments.get(self.current) {
            // SAFETY: both are this device's and alive.
            unsafe { result::event::record(full.copied, context.raw_stream()) }
                .map_err(|error| context.driver_error("cuEventRecord", "upload", error))?;
        }
        if self.segments.len() < SEGMENTS {
            let Some(segment) = Segment::new(context)? else { return Ok(false) };
            self.segments.push(segment);
            self.current = self.segments.len() - 1;
            return Ok(true);
        }
        let next = (self.current + 1) % SEGMENTS;
        let segment = &mut self.segments[next];
        // SAFETY: the event is alive; it was recorded when the ring moved on from this segment.
        unsafe { result::event::synchronize(segment.copied) }
            .map_err(|error| context.driver_error("cuEventSynchronize", "upload", error))?;
        segment.used = 0;
        self.current = next;
        Ok(true)
    }

    /// Frees the ring. The device's context is current, and its stream has no work left.
    pub(super) fn release(&mut self) {
        for segment in self.segments.drain(..) {
            // SAFETY: made by Segment::new and destroyed once; a failure leaves nothing to do.
            let _ = unsafe { result::event::destroy(segment.copied) };
            // SAFETY: as above; no copy out of it is in flight any more.
            let _ = unsafe { result::free_host(segment.memory.cast()) };
        }
    }
}

impl Segment {
    /// None where the system lets no more memory be pinned.
    fn new(context: &Context) -> Result<Option<Self>> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let copied = result::event::create(flags)
            .map_err(|error| context.driver_error("cuEventCreate", "upload", error))?;
        // SAFETY: flags 0 are plain pinned memory; freed by `release`.
        match unsafe { result::malloc_host(SEGMENT, 0) } {
            Ok(memory) => Ok(Some(Self { memory: memory.cast(), used: 0, copied })),
            Err(error) => {
                // SAFETY: made above, used by nothing.
                let _ = unsafe { result::event::destroy(copied) };
                match error.0 {
                    sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
                    _ => Err(context.driver_error("cuMemHostAlloc", "upload", error)),
                }
            }
        }
    }
}
