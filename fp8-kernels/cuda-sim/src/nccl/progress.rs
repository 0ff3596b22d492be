//! Collectives on their way into streams, and the thread that moves those streams.
//!
//! On hardware a collective runs by itself; here work runs where a call waits for it. So that no rank waits for one
//! whose host is busy elsewhere, a thread runs each stream that holds a collective up to that collective.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::collective::{Call, Collective};
use super::communicators::{Communicator, Posted};
use super::hub::{self, Hello};
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
        let call = Call { shape, from, to, bytes, number: None };
        match is_in_group {
            true => known.grouped.push((stream, call)),
            false => known.posted.push(Posted { stream, calls: vec![call] }),
        }
        Ok(())
    }

    /// Puts what was posted into its streams.
    pub(crate) fn enqueue_posted(&mut self, handle: u64) -> Outcome {
        let known = self.communicators.get(handle)?;
        let (link, rank, shared) = (known.link.clone(), known.rank, known.shared.clone());
        for Posted { stream, calls } in std::mem::take(&mut known.posted) {
            let collective = Collective::new(link.clone(), rank, calls, shared.clone());
            let stream = self.context()?.queue.find(stream).map_err(|_| Code::NCCL_UNHANDLED_CUDA_ERROR)?;
            // In capture it becomes a node of the graph, and each launch of that a collective.
            let is_node = self.context()?.captures.is_capturing(stream);
            let collective = Box::new(if is_node { collective.noted() } else { collective.started() });
            self.submit(stream, Work::Collective(collective)).map_err(|_| Code::NCCL_UNHANDLED_CUDA_ERROR)?;
        }
        Ok(())
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
