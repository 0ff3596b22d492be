//! Streams.

use core::ffi::{c_int, c_uint};

use crate::capture::CaptureMode;
use crate::code::{Code, Outcome};
use crate::entry::entries;
use crate::ffi::Out;
use crate::queue::{StreamId, Until};
use crate::state::{CONTEXT, Driver, unless_stalled};
use crate::thread::thread;

/// Tag of stream handles.
const KIND: u64 = 1;
/// Tag of graphs' handles.
const GRAPH: u64 = 10;
const NON_BLOCKING: c_uint = 1;
const GREATEST_PRIORITY: c_int = -5;

fn create(driver: &mut Driver, stream: Out<u64>, flags: c_uint, priority: c_int) -> Outcome {
    let stream = stream.checked()?;
    // CUDA Driver API, cuStreamCreate: "Valid values for Flags are" CU_STREAM_DEFAULT and CU_STREAM_NON_BLOCKING.
    if flags > NON_BLOCKING {
        return Err(Code::INVALID_VALUE);
    }
    let handle = driver.handle(KIND);
    driver.context()?.queue.open_stream(handle, flags != NON_BLOCKING, priority);
    stream.set(handle)
}

entries! {
    Context fn cuStreamCreate(stream: Out<u64>, flags: c_uint) |driver| {
        create(driver, stream, flags, 0)
    }

    // CUDA Driver API, cuStreamCreateWithPriority: a priority outside the range "will automatically be clamped".
    Context fn cuStreamCreateWithPriority(stream: Out<u64>, flags: c_uint, priority: c_int) |driver| {
        create(driver, stream, flags, priority.clamp(GREATEST_PRIORITY, 0))
    }

    // CUDA Driver API, cuStreamDestroy: where the device still works in the stream, "the function will return immediately
    // and the resources associated with hStream will be released automatically once the device has completed all work".
    // An implicit stream is no handle that was created: CUDA_ERROR_INVALID_HANDLE.
    Release fn cuStreamDestroy_v2(stream: u64) |driver| {
        let queue = &mut driver.context()?.queue;
        match queue.find(stream)? {
            id @ StreamId::Created(_) => queue.close_stream(id),
            _ => return Err(Code::INVALID_HANDLE),
        }
        Ok(())
    }

    Context fn cuStreamSynchronize(stream: u64) |driver| {
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        context.captures.expect_outside(id)?;
        driver.drive(Until::Stream(id))
    }

    // CUDA Driver API, cuStreamQuery: "Returns CUDA_SUCCESS if all operations in the stream specified by hStream have
    // completed, or CUDA_ERROR_NOT_READY if not." A query moves the device by one step, so that polling ends.
    Context fn cuStreamQuery(stream: u64) |driver| {
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        context.captures.expect_outside(id)?;
        let until = Until::Stream(id);
        unless_stalled(driver.step(until))?;
        if driver.context()?.queue.is_done(until) { Ok(()) } else { Err(Code::NOT_READY) }
    }

    Context fn cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) |driver| {
        // CUDA Driver API, cuStreamWaitEvent: flags are CU_EVENT_WAIT_DEFAULT or CU_EVENT_WAIT_EXTERNAL, "must be used
        // […] only" in capture.
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        context.queue.event(event)?;
        if context.captures.wait(id, event)? {
            return Ok(());
        }
        context.queue.wait(id, event)?;
        driver.after_submit(id)
    }

    Context fn cuStreamGetCtx(stream: u64, context: Out<u64>) |driver| {
        driver.context()?.queue.find(stream)?;
        context.set(CONTEXT)
    }

    Context fn cuStreamGetFlags(stream: u64, flags: Out<c_uint>) |driver| {
        let queue = &driver.context()?.queue;
        let id = queue.find(stream)?;
        let blocking = queue.stream(id).is_none_or(|stream| stream.blocking || id == StreamId::Legacy);
        flags.set(if blocking { 0 } else { NON_BLOCKING })
    }

    Context fn cuStreamGetPriority(stream: u64, priority: Out<c_int>) |driver| {
        let queue = &driver.context()?.queue;
        let id = queue.find(stream)?;
        priority.set(queue.stream(id).map_or(0, |stream| stream.priority))
    }

    Context fn cuStreamIsCapturing(stream: u64, status: Out<c_int>) |driver| {
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        status.set(context.captures.status(id))
    }

    Context fn cuStreamBeginCapture_v2(stream: u64, mode: c_int) |driver| {
        let mode = match mode {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => return Err(Code::INVALID_VALUE),
        };
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        let blocking = context.queue.stream(id).is_some_and(|stream| stream.blocking);
        context.captures.begin(id, blocking, mode, thread())
    }

    // CUDA Driver API, cuStreamEndCapture: "If phGraph is invalidated … a NULL graph" is returned.
    Context fn cuStreamEndCapture(stream: u64, graph: Out<u64>) |driver| {
        let graph = graph.checked()?;
        graph.set(0)?;
        let handle = driver.handle(GRAPH);
        let context = driver.context()?;
        let id = context.queue.find(stream)?;
        let work = context.captures.end(id, thread())?;
        context.captures.graphs.insert(handle, work);
        graph.set(handle)
    }
}
