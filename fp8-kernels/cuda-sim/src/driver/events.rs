//! Events.

use core::ffi::c_uint;

use crate::code::{Code, Outcome};
use crate::entry::entries;
use crate::ffi::Out;
use crate::queue::Until;
use crate::state::{Driver, unless_stalled};

/// Tag of event handles.
const KIND: u64 = 2;
const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

/// CUDA Driver API, cuEventElapsedTime: "If cuEventRecord() has not been called on either event, then
/// CUDA_ERROR_INVALID_HANDLE is returned. If […] one or both of the events has not yet been completed […]
/// CUDA_ERROR_NOT_READY is returned. If either event was created with the CU_EVENT_DISABLE_TIMING flag, then this
/// function will return CUDA_ERROR_INVALID_HANDLE."
fn elapsed(driver: &mut Driver, milliseconds: Out<f32>, start: u64, end: u64) -> Outcome {
    let milliseconds = milliseconds.checked()?;
    let queue = &driver.context()?.queue;
    for event in [start, end] {
        if !queue.event(event)?.timed || !queue.recorded(event)? {
            return Err(Code::INVALID_HANDLE);
        }
    }
    let (Some(start), Some(end)) = (queue.time(start)?, queue.time(end)?) else {
        return Err(Code::NOT_READY);
    };
    milliseconds.set((end as f64 - start as f64) as f32 / 1e6)
}

entries! {
    Context fn cuEventCreate(event: Out<u64>, flags: c_uint) |driver| {
        let event = event.checked()?;
        // CUDA Driver API, cuEventCreate: the valid flags are four, and CU_EVENT_INTERPROCESS "must" come with
        // CU_EVENT_DISABLE_TIMING. Events between processes are not simulated.
        if flags >= 2 * INTERPROCESS || flags & INTERPROCESS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = driver.handle(KIND);
        driver.context()?.queue.open_event(handle, flags & DISABLE_TIMING == 0);
        event.set(handle)
    }

    // CUDA Driver API, cuEventDestroy: "An event may be destroyed before it is complete […]. In this case, the call does
    // not block on completion of the event, and any associated resources will automatically be released asynchronously".
    Release fn cuEventDestroy_v2(event: u64) |driver| {
        driver.context()?.queue.close_event(event)
    }

    Context fn cuEventRecord(event: u64, stream: u64) |driver| {
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        context.queue.event(event)?;
        if context.captures.record(id, event)? {
            return Ok(());
        }
        context.queue.record(id, event)?;
        driver.after_submit(id)
    }

    // CUDA Driver API, cuEventQuery: "Returns CUDA_SUCCESS if all captured work has been completed, or
    // CUDA_ERROR_NOT_READY if any captured work is incomplete." An event never recorded has none. A query moves the
    // device by one step, so that polling ends.
    Context fn cuEventQuery(event: u64) |driver| {
        driver.context()?.captures.expect_event_outside(event)?;
        let Some(ticket) = driver.context()?.queue.outstanding(event)? else { return Ok(()) };
        unless_stalled(driver.step(Until::Record(ticket)))?;
        match driver.context()?.queue.outstanding(event)? {
            None => Ok(()),
            Some(_) => Err(Code::NOT_READY),
        }
    }

    Context fn cuEventSynchronize(event: u64) |driver| {
        driver.context()?.captures.expect_event_outside(event)?;
        match driver.context()?.queue.outstanding(event)? {
            None => Ok(()),
            Some(ticket) => driver.drive(Until::Record(ticket)),
        }
    }

    Context fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) |driver| {
        elapsed(driver, milliseconds, start, end)
    }

    Context fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) |driver| {
        elapsed(driver, milliseconds, start, end)
    }
}
