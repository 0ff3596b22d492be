//! Stream capture and graphs: work that is noted instead of queued, and queued as often as its graph is launched.
//!
//! A graph keeps its work in the order of the calls, which satisfies every dependency that was captured. A launch queues
//! it behind what its stream holds; each address is looked up when its turn comes, so memory that was freed in between is
//! found. Graphs inside graphs, memory nodes, copies from or to pageable memory and updates are not simulated:
//! CUDA_ERROR_NOT_SUPPORTED.
//!
//! CUDA C++ Programming Guide, "Prohibited and Unhandled Operations": "It is invalid to synchronize or query the execution
//! status of a stream which is being captured or a captured event, because they do not represent items scheduled for
//! execution. It is also invalid to query the execution status of or synchronize a broader handle which encompasses an
//! active stream capture". "Invalidation": after such an operation "any further use of any streams that are being captured
//! or captured events associated with the capture is invalid and will return an error, until stream capture is ended".

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::code::{Code, Outcome};
use crate::queue::StreamId;
use crate::work::Work;

/// The calls that a capture forbids, besides those on its own streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureMode {
    /// Unsafe ones, to every thread.
    Global,
    /// Unsafe ones, to the capturing thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

/// Captures under way, graphs and executable graphs.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    active: Vec<Capture>,
    pub(crate) graphs: BTreeMap<u64, Arc<[Work]>>,
    pub(crate) executables: BTreeMap<u64, Arc<[Work]>>,
}

#[derive(Debug)]
struct Capture {
    origin: StreamId,
    /// The origin's stream waits for the legacy one.
    blocking: bool,
    mode: CaptureMode,
    thread: u64,
    work: Vec<Work>,
    /// Every stream that took part: how often it was used, and up to which use others wait for it.
    members: BTreeMap<StreamId, Member>,
    /// Captured records, by event: the stream, and how often it had been used.
    events: BTreeMap<u64, (StreamId, u64)>,
    invalid: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Member {
    uses: u64,
    joined: u64,
}

impl Capture {
    fn touch(&mut self, stream: StreamId) -> u64 {
        let member = self.members.entry(stream).or_default();
        member.uses += 1;
        member.uses
    }
}

impl Captures {
    /// CUDA Driver API, cuStreamBeginCapture: CUDA_ERROR_ILLEGAL_STATE for a stream in capture; "Capture must not have been
    /// initiated on the stream"; the legacy stream cannot be captured.
    pub(crate) fn begin(
        &mut self,
        origin: StreamId,
        blocking: bool,
        mode: CaptureMode,
        thread: u64,
    ) -> Outcome {
        if origin == StreamId::Legacy {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.is_capturing(origin) {
            return Err(Code::ILLEGAL_STATE);
        }
        let mut capture = Capture {
            origin,
            blocking,
            mode,
            thread,
            work: Vec::new(),
            members: BTreeMap::new(),
            events: BTreeMap::new(),
            invalid: false,
        };
        capture.members.insert(origin, Member::default());
        self.active.push(capture);
        Ok(())
    }

    /// Ends the capture that began on `stream` and returns its work. An error in the captured work removes the capture; an
    /// error of the caller leaves it.
    ///
    /// CUDA Driver API: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED; CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture was not
    /// initiated in this stream"; CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "the capture sequence contains a fork that was not
    /// joined to the primary stream"; CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, unless the mode is relaxed.
    pub(crate) fn end(&mut self, stream: StreamId, thread: u64) -> Outcome<Arc<[Work]>> {
        let Some(index) = self.active.iter().position(|capture| capture.origin == stream) else {
            return Err(if self.is_capturing(stream) {
                Code::STREAM_CAPTURE_UNMATCHED
            } else {
                Code::ILLEGAL_STATE
            });
        };
        if self.active[index].mode != CaptureMode::Relaxed && self.active[index].thread != thread {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = self.active.remove(index);
        if capture.invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let unjoined = |(id, member): (&StreamId, &Member)| *id != stream && member.joined < member.uses;
        if capture.members.iter().any(unjoined) {
            return Err(Code::STREAM_CAPTURE_UNJOINED);
        }
        Ok(capture.work.into())
    }

    pub(crate) fn is_capturing(&self, stream: StreamId) -> bool {
        self.active.iter().any(|capture| capture.members.contains_key(&stream))
    }

    /// `CUstreamCaptureStatus`.
    pub(crate) fn status(&self, stream: StreamId) -> i32 {
        match self.active.iter().find(|capture| capture.members.contains_key(&stream)) {
            None => 0,
            Some(capture) if capture.invalid => 2,
            Some(_) => 1,
        }
    }

    pub(crate) fn abandon(&mut self) {
        self.active.clear();
    }

    /// One line for each kind of handle with its count.
    pub(crate) fn live(&self) -> String {
        let counts = [
            ("captures", self.active.len()),
            ("graphs", self.graphs.len()),
            ("graph executables", self.executables.len()),
        ];
        let live = counts.iter().filter(|(_, count)| *count > 0);
        live.map(|(kind, count)| format!("{kind} {count}\n")).collect()
    }

    /// The capture that a stream takes part in, still valid.
    fn of(&mut self, stream: StreamId) -> Outcome<Option<&mut Capture>> {
        match self.active.iter_mut().find(|capture| capture.members.contains_key(&stream)) {
            Some(capture) if capture.invalid => Err(Code::STREAM_CAPTURE_INVALIDATED),
            found => Ok(found),
        }
    }

    /// Refuses any use of the legacy stream while one that it waits for is in capture.
    ///
    /// CUDA C++ Programming Guide, "Prohibited and Unhandled Operations": then "any attempted use of the legacy stream is
    /// invalid", for "enqueueing to the legacy stream would create a dependency on the streams being captured, and
    /// querying it or synchronizing it would query or synchronize the streams being captured".
    /// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: "the operation would have resulted in a disallowed implicit dependency on a
    /// current capture sequence from cudaStreamLegacy".
    fn expect_no_implicit_dependency(&mut self, stream: StreamId) -> Outcome {
        if stream != StreamId::Legacy || !self.active.iter().any(|capture| capture.blocking) {
            return Ok(());
        }
        let blocking = self.active.iter_mut().filter(|capture| capture.blocking);
        blocking.for_each(|capture| capture.invalid = true);
        Err(Code::STREAM_CAPTURE_IMPLICIT)
    }

    /// Notes work for a stream in capture; gives it back where there is none.
    pub(crate) fn submit(&mut self, stream: StreamId, work: Work) -> Outcome<Option<Work>> {
        self.expect_no_implicit_dependency(stream)?;
        let Some(capture) = self.of(stream)? else { return Ok(Some(work)) };
        if matches!(work, Work::Upload { .. } | Work::Free { .. }) {
            capture.invalid = true;
            return Err(Code::NOT_SUPPORTED);
        }
        capture.touch(stream);
        capture.work.push(work);
        Ok(None)
    }

    /// Notes an event's record; false where the stream is not in capture.
    pub(crate) fn record(&mut self, stream: StreamId, event: u64) -> Outcome<bool> {
        self.expect_no_implicit_dependency(stream)?;
        let Some(capture) = self.of(stream)? else {
            for capture in &mut self.active {
                capture.events.remove(&event);
            }
            return Ok(false);
        };
        let uses = capture.members.get(&stream).map_or(0, |member| member.uses);
        capture.events.insert(event, (stream, uses));
        Ok(true)
    }

    /// Notes a wait: on a captured event a stream joins the capture. False where neither is captured.
    ///
    /// CUDA_ERROR_STREAM_CAPTURE_ISOLATION: "A dependency would have been created which crosses the capture sequence
    /// boundary": a stream in capture that waits for an event that is not captured.
    pub(crate) fn wait(&mut self, stream: StreamId, event: u64) -> Outcome<bool> {
        self.expect_no_implicit_dependency(stream)?;
        let Some(index) = self.active.iter().position(|capture| capture.events.contains_key(&event)) else {
            let Some(capture) = self.of(stream)? else { return Ok(false) };
            capture.invalid = true;
            return Err(Code::STREAM_CAPTURE_ISOLATION);
        };
        let elsewhere =
            |(other, capture): (usize, &Capture)| other != index && capture.members.contains_key(&stream);
        if self.active.iter().enumerate().any(elsewhere) {
            return Err(Code::STREAM_CAPTURE_ISOLATION);
        }
        let capture = &mut self.active[index];
        if capture.invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        if let Some((from, uses)) = capture.events.get(&event).copied()
            && from != stream
            && let Some(member) = capture.members.get_mut(&from)
        {
            member.joined = member.joined.max(uses);
        }
        capture.touch(stream);
        Ok(true)
    }

    /// Refuses a synchronisation with, or a question to, a stream in capture.
    pub(crate) fn expect_outside(&mut self, stream: StreamId) -> Outcome {
        self.expect_no_implicit_dependency(stream)?;
        match self.of(stream)? {
            None => Ok(()),
            Some(capture) => {
                capture.invalid = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// As `expect_outside`, for an event.
    pub(crate) fn expect_event_outside(&mut self, event: u64) -> Outcome {
        match self.active.iter_mut().find(|capture| capture.events.contains_key(&event)) {
            None => Ok(()),
            Some(capture) => {
                capture.invalid = true;
                Err(Code::CAPTURED_EVENT)
            }
        }
    }

    /// As `expect_outside`, for all streams.
    pub(crate) fn expect_none(&mut self) -> Outcome {
        if self.active.is_empty() {
            return Ok(());
        }
        self.active.iter_mut().for_each(|capture| capture.invalid = true);
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Refuses what may wait for the device behind the caller's back.
    ///
    /// CUDA Driver API, cuThreadExchangeStreamCaptureMode: under CU_STREAM_CAPTURE_MODE_GLOBAL "potentially unsafe API
    /// calls" are prohibited to all threads, under …_THREAD_LOCAL to the capturing one, under …_RELAXED to none; "such as
    /// cudaMalloc".
    pub(crate) fn expect_unsafe_allowed(&mut self, thread: u64) -> Outcome {
        let forbids = |capture: &&mut Capture| match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == thread,
            CaptureMode::Relaxed => false,
        };
        match self.active.iter_mut().find(forbids) {
            None => Ok(()),
            Some(capture) => {
                capture.invalid = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }
}
