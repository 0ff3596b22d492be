//! This process's communicators, and the thread that moves their streams.
//!
//! On hardware a collective runs by itself; here work runs where somebody waits for it. So that no rank waits for one
//! whose host is busy elsewhere, a thread runs each stream that holds a collective up to that collective.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::collective::{Collective, Shared};
use super::hub::{self, Hello, Hub, ID_BYTES};
use super::link::Link;
use super::shape::Shape;
use crate::code::{Code, Outcome};
use crate::queue::{StreamId, Until};
use crate::state::{self, Driver};
use crate::work::Work;

/// Tag of communicator handles.
const KIND: u64 = 9;
const PACE: Duration = Duration::from_micros(300);
/// Work that the thread runs before others have their turn.
const STEPS: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Communicators {
    by_handle: BTreeMap<u64, Communicator>,
    /// Of ids made here.
    hubs: BTreeMap<u64, Arc<Hub>>,
    has_thread: bool,
}

#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) is_blocking: bool,
    link: Link,
    shared: Arc<Shared>,
    /// Posted, and not yet in their streams: calls of a communicator that does not block.
    posted: Vec<(u64, Box<Collective>)>,
    /// Posted in a group that is still open.
    grouped: Vec<(u64, Box<Collective>)>,
    is_finalized: bool,
}

impl Communicators {
    pub(crate) fn count(&self) -> usize {
        self.by_handle.len()
    }

    /// Ends those that were never destroyed: they are nobody's any more.
    pub(crate) fn forget(&mut self) {
        while let Some(&handle) = self.by_handle.keys().next() {
            // It was found just now.
            let _ = self.remove(handle, true);
        }
    }

    /// An id of a new communicator.
    pub(crate) fn new_id(&mut self) -> Outcome<[u8; ID_BYTES]> {
        let nonce = RandomState::new().hash_one(std::process::id());
        let hub = Hub::open(nonce).map_err(|_| Code::NCCL_SYSTEM_ERROR)?;
        let id = hub.id();
        self.hubs.insert(nonce, hub);
        Ok(id)
    }

    /// NCCL User Guide, ncclResult_t: ncclInvalidArgument, "One argument has an invalid value", here for a handle that is
    /// none.
    pub(crate) fn get(&mut self, handle: u64) -> Outcome<&mut Communicator> {
        self.by_handle.get_mut(&handle).ok_or(Code::NCCL_INVALID_ARGUMENT)
    }

    /// Ends a handle. Collectives that are still queued end with it.
    pub(crate) fn remove(&mut self, handle: u64, abort: bool) -> Outcome {
        let known = self.by_handle.remove(&handle).ok_or(Code::NCCL_INVALID_ARGUMENT)?;
        known.shared.is_aborted.store(true, Ordering::Release);
        known.link.leave(abort);
        // The last holder of a hub of this process is the link of its last rank.
        self.hubs.retain(|_, hub| Arc::strong_count(hub) > 1);
        Ok(())
    }
}

impl Driver {
    pub(crate) fn new_communicator(&mut self, id: &[u8], hello: &Hello, is_blocking: bool) -> Outcome<u64> {
        // What ncclGetUniqueId has not made: ncclInvalidArgument.
        let (nonce, port) = hub::read_id(id).ok_or(Code::NCCL_INVALID_ARGUMENT)?;
        let link = match self.communicators.hubs.get(&nonce) {
            Some(hub) => Link::here(hub.clone(), hello),
            // Nobody listens there any more: ncclRemoteError, "a call failed possibly due to a network error or a remote
            // process exiting prematurely".
            None => Link::there(port, nonce, hello).map_err(|_| Code::NCCL_REMOTE_ERROR)?,
        };
        let handle = self.handle(KIND);
        let communicator = Communicator {
            rank: hello.rank,
            ranks: hello.ranks,
            is_blocking,
            link,
            shared: Arc::default(),
            posted: Vec::new(),
            grouped: Vec::new(),
            is_finalized: false,
        };
        self.communicators.by_handle.insert(handle, communicator);
        if !self.communicators.has_thread {
            let started = thread::Builder::new().name("fp8-cuda-sim collectives".into()).spawn(move_streams);
            self.communicators.has_thread = started.is_ok();
        }
        Ok(handle)
    }

    /// A call of a collective. It is in its stream at once on a communicator that blocks, else when its state is asked for,
    /// and of a group not before that ends.
    pub(crate) fn post(
        &mut self,
        handle: u64,
        shape: Shape,
        [from, to]: [u64; 2],
        stream: u64,
        is_in_group: bool,
    ) -> Outcome {
        // ncclUnhandledCudaError, "A call to a CUDA function failed", for what is no stream.
        self.context()
            .and_then(|context| context.queue.find(stream))
            .map_err(|_| Code::NCCL_UNHANDLED_CUDA_ERROR)?;
        let known = self.communicators.get(handle)?;
        let bytes = shape.bytes(known.rank, known.ranks).ok_or(Code::NCCL_INVALID_ARGUMENT)?;
        let collective = Collective {
            link: known.link.clone(),
            round: None,
            shape,
            from,
            to,
            bytes,
            has_arrived: false,
            is_node: false,
            shared: known.shared.clone(),
        };
        let place = if is_in_group { &mut known.grouped } else { &mut known.posted };
        place.push((stream, Box::new(collective)));
        Ok(())
    }

    /// Puts what was posted into its streams.
    pub(crate) fn enqueue_posted(&mut self, handle: u64) -> Outcome {
        for (stream, collective) in std::mem::take(&mut self.communicators.get(handle)?.posted) {
            let stream = self.context()?.queue.find(stream).map_err(|_| Code::NCCL_UNHANDLED_CUDA_ERROR)?;
            // In capture it becomes a node of the graph, and each launch of that a collective.
            let is_node = self.context()?.captures.is_capturing(stream);
            let collective = Box::new(if is_node { collective.noted() } else { collective.started() });
            self.submit(stream, Work::Collective(collective)).map_err(|_| Code::NCCL_UNHANDLED_CUDA_ERROR)?;
        }
        Ok(())
    }
}

impl Communicator {
    /// Success, `ncclInProgress`, or what went wrong.
    pub(crate) fn state(&self) -> Outcome {
        match self.link.state() {
            None => Err(Code::NCCL_IN_PROGRESS),
            Some(Err(code)) => Err(code),
            Some(Ok(())) if !self.posted.is_empty() || !self.grouped.is_empty() => {
                Err(Code::NCCL_IN_PROGRESS)
            }
            Some(Ok(())) if self.is_finalized && self.shared.is_in_use() => Err(Code::NCCL_IN_PROGRESS),
            Some(Ok(())) => Ok(()),
        }
    }

    /// The end of a group, whose calls are launched or forgotten.
    pub(crate) fn end_group(&mut self, is_launched: bool) {
        let grouped = std::mem::take(&mut self.grouped);
        if is_launched {
            self.posted.extend(grouped);
        }
    }

    pub(crate) fn finalize(&mut self) {
        self.is_finalized = true;
    }

    pub(crate) fn is_finalized(&self) -> bool {
        self.is_finalized
    }
}

/// The thread's life: that of the process.
fn move_streams() {
    loop {
        thread::sleep(PACE);
        let mut driver = state::driver();
        if driver.dead.is_some() {
            continue;
        }
        let Some(context) = &driver.context else { continue };
        for stream in context.queue.collective_streams() {
            advance(&mut driver, stream);
        }
    }
}

/// Runs a stream while a collective is in it and nothing holds it up. What goes wrong the next call of the host hears.
fn advance(driver: &mut Driver, stream: StreamId) {
    for _ in 0..STEPS {
        let Some(context) = &driver.context else { return };
        if !context.queue.collective_streams().contains(&stream)
            || !driver.step(Until::Stream(stream)).unwrap_or(false)
        {
            return;
        }
    }
}
