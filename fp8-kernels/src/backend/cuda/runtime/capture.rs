//! Graphs: what a step queues on a device, recorded once and launched as one.
//!
//! While a step is recorded nothing runs, so nothing may wait for the device or read from it, kernels must be loaded and
//! products planned, and slots must have their scales: all of it is so after a few steps. Memory comes from the kept
//! blocks or from a second stream. Small uploads are copied to pinned memory that the graph keeps, and are constants of
//! it. Numbers that change between launches are stored on the device; [`Replayed`](crate::Replayed) writes them before each
//! launch.

use super::context::Context;
use super::memory::Memory;
use crate::{Error, Replayed, Result};
use cudarc::driver::{result, sys};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;

/// Bytes of a piece of pinned memory for uploads.
const PIECE: usize = 256 * 1024;

/// A capture under way on a device.
#[derive(Default)]
struct Session {
    replayed: Vec<Arc<dyn Replayed>>,
    pinned: Vec<Piece>,
}

/// Pinned memory that a graph's uploads read.
struct Piece {
    memory: *mut u8,
    used: usize,
    len: usize,
}

// SAFETY: the memory belongs to the process, not to a thread; it is written behind a lock, before the graph runs.
unsafe impl Send for Piece {}
// SAFETY: as above; a graph only keeps it.
unsafe impl Sync for Piece {}

impl Session {
    /// A copy of `bytes` that lives as long as the graph.
    fn keep(&mut self, context: &Context, bytes: &[u8]) -> Result<&[u8]> {
        let has_room = |piece: &Piece| piece.len - piece.used >= bytes.len();
        if !self.pinned.last().is_some_and(has_room) {
            let len = bytes.len().max(PIECE);
            // SAFETY: flags 0 are plain pinned memory; freed by `release`.
            let memory = unsafe { result::malloc_host(len, 0) }
                .map_err(|error| context.driver_error("cuMemHostAlloc", "capture", error))?;
            self.pinned.push(Piece { memory: memory.cast(), used: 0, len });
        }
        let Some(piece) = self.pinned.last_mut() else { return Ok(&[]) };
        // SAFETY: the piece has room for `bytes` behind what is used.
        let place = unsafe { piece.memory.add(piece.used) };
        // SAFETY: as above; both are different allocations.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        piece.used = (piece.used + bytes.len()).next_multiple_of(16).min(piece.len);
        // SAFETY: just written; lives until the graph is released.
        Ok(unsafe { std::slice::from_raw_parts(place, bytes.len()) })
    }
}

fn release(pinned: Vec<Piece>) {
    for piece in pinned {
        // SAFETY: made by Session::keep and freed once; no launch that reads it runs any more.
        let _ = unsafe { result::free_host(piece.memory.cast()) };
    }
}

/// A step on one device, to be launched again and again. The kernels that it names must stay loaded meanwhile.
pub(super) struct Recorded {
    memory: Arc<Memory>,
    executable: sys::CUgraphExec,
    capture: u64,
    /// One launch at a time: counters are advanced, written and read by the launch before the next one's.
    turn: Mutex<()>,
    replayed: Vec<Arc<dyn Replayed>>,
    pinned: Vec<Piece>,
}

// SAFETY: an executable graph belongs to the process, and the driver allows launches from any thread, one at a time, which
// `turn` sees to.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

impl Recorded {
    /// Advances the host's counters and launches the step.
    pub(super) fn replay(&self) -> Result<()> {
        let _turn = self.turn.lock();
        let mut advanced = 0;
        let result = self
            .replayed
            .iter()
            .try_for_each(|replayed| replayed.advance().inspect(|()| advanced += 1))
            .and_then(|()| self.launch());
        if result.is_err() {
            self.replayed[..advanced].iter().rev().for_each(|replayed| replayed.retreat());
        }
        result
    }

    fn launch(&self) -> Result<()> {
        self.memory.ready()?;
        self.replayed.iter().try_for_each(|replayed| replayed.upload())?;
        // SAFETY: instantiated in this context and not destroyed; what its work names is held as long as it lives.
        let status = unsafe { sys::cuGraphLaunch(self.executable, self.memory.raw_stream()) };
        status.result().map_err(|error| self.memory.driver_error("cuGraphLaunch", "replay", error))?;
        self.replayed.iter().for_each(|replayed| replayed.launched());
        Ok(())
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let memory = &self.memory;
        let _ = memory.stream().context().bind_to_thread();
        if !self.pinned.is_empty() {
            // A launch in flight reads the pinned memory.
            let _ = memory.stream().synchronize();
        }
        // SAFETY: instantiated once, destroyed once; a launch in flight ends first.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        release(std::mem::take(&mut self.pinned));
        memory.drop_graph(self.capture);
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.capture, **self.memory)
    }
}

/// The stream is in capture until this goes.
struct Recording<'a> {
    memory: &'a Memory,
    is_open: bool,
}

impl Recording<'_> {
    /// Ends the capture; the graph is the caller's.
    fn end(&mut self) -> Result<sys::CUgraph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: this stream is in capture, `graph` lives through the call.
        let status = unsafe { sys::cuStreamEndCapture(self.memory.raw_stream(), &mut graph) };
        status.result().map_err(|error| self.memory.driver_error("cuStreamEndCapture", "capture", error))?;
        self.is_open = false;
        Ok(graph)
    }
}

impl Drop for Recording<'_> {
    // The step failed, or panicked, or its end did: what was recorded is thrown away. Where nothing is left to end, the
    // driver says so.
    fn drop(&mut self) {
        if self.is_open
            && let Ok(graph) = self.end()
        {
            destroy(graph);
        }
    }
}

fn destroy(graph: sys::CUgraph) {
    if !graph.is_null() {
        // SAFETY: made by cuStreamEndCapture, destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
    }
}

/// The memory serves the capture until this is dropped.
struct Serving<'a> {
    captures: &'a Captures,
    capture: u64,
    has_graph: bool,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let session = self.captures.session.lock().take().unwrap_or_default();
        self.captures.memory.end_capture(self.has_graph);
        // Nothing is left where the session became a graph.
        session.replayed.iter().rev().for_each(|replayed| replayed.retreat());
        release(session.pinned);
    }
}

/// The captures of a device, one at a time.
pub(super) struct Captures {
    memory: Arc<Memory>,
    session: Mutex<Option<Session>>,
}

impl Captures {
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        Self { memory, session: Mutex::default() }
    }

    /// Records what `step` queues and launches it once. The stream has no work left.
    pub(super) fn record<T, E: From<Error>>(
        &self,
        step: impl FnOnce() -> Result<T, E>,
    ) -> Result<(Recorded, T), E> {
        let memory = &self.memory;
        memory.open_side_stream()?;
        let mut serving = {
            let mut session = self.session.lock();
            if session.is_some() {
                let remedy = "a capture of this device is under way already";
                return Err(Error::Capture { op: "capture".to_owned(), remedy }.into());
            }
            *session = Some(Session::default());
            Serving { captures: self, capture: memory.begin_capture(), has_graph: false }
        };
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this device's and not in capture: the session was free.
        let status = unsafe { sys::cuStreamBeginCapture_v2(memory.raw_stream(), mode) };
        status.result().map_err(|error| memory.driver_error("cuStreamBeginCapture", "capture", error))?;
        let mut recording = Recording { memory, is_open: true };
        let output = step()?;
        let graph = recording.end()?;
        let executable = self.instantiate(graph);
        destroy(graph);
        let executable = executable?;
        let Session { replayed, pinned } = self.session.lock().take().unwrap_or_default();
        serving.has_graph = true;
        let capture = serving.capture;
        drop(serving);
        let memory = Arc::clone(memory);
        let recorded = Recorded { memory, executable, capture, turn: Mutex::new(()), replayed, pinned };
        if let Err(error) = recorded.launch() {
            recorded.replayed.iter().rev().for_each(|replayed| replayed.retreat());
            return Err(error.into());
        }
        Ok((recorded, output))
    }

    fn instantiate(&self, graph: sys::CUgraph) -> Result<sys::CUgraphExec> {
        let mut executable = std::ptr::null_mut();
        // SAFETY: `graph` was just captured, `executable` lives through the call.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        status.result().map_err(|error| self.memory.driver_error("cuGraphInstantiate", "capture", error))?;
        Ok(executable)
    }

    /// Lets `replayed` take part in every launch of the graph that is being recorded; does nothing if none is.
    pub(super) fn on_replay(&self, replayed: Arc<dyn Replayed>) {
        if let Some(session) = &mut *self.session.lock() {
            session.replayed.push(replayed);
        }
    }

    /// Records a copy of `bytes` to `address`: a constant of the graph. False outside captures.
    pub(super) fn record_upload(&self, address: u64, bytes: &[u8]) -> Result<bool> {
        let mut session = self.session.lock();
        let Some(session) = &mut *session else { return Ok(false) };
        let kept = session.keep(&self.memory, bytes)?;
        // SAFETY: `address` has room for `bytes`, as the caller says; what is kept lives as long as the graph.
        unsafe { result::memcpy_htod_async(address, kept, self.memory.raw_stream()) }
            .map_err(|error| self.memory.driver_error("cuMemcpyHtoDAsync", "upload", error))?;
        Ok(true)
    }
}
