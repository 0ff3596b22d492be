//! One rank's part of a collective, or of a group of calls, as work of a stream.
//!
//! When the stream gets there, the rank's bytes go to the hub; the stream waits until those of all ranks have come, and
//! then writes the results. The calls of a group go on together, in no order. An aborted collective leaves bytes that
//! mean nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use ptx_interp::Memory;

use super::link::Link;
use super::shape::{Number, Shape};
use crate::fault::Fault;

/// The outcome of running some work.
#[derive(Debug)]
pub(crate) enum Ran {
    /// It is done, after so many simulated nanoseconds.
    For(u64),
    /// It has begun, and goes on when [`Collective::is_ready`].
    Until(Box<Collective>),
}

#[derive(Debug)]
pub(crate) struct Collective {
    link: Link,
    rank: usize,
    calls: Vec<Call>,
    state: State,
    pub(crate) has_arrived: bool,
    shared: Arc<Shared>,
}

/// A call, alone or of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) shape: Shape,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// The numbers of bytes that this rank reads and writes.
    pub(crate) bytes: (usize, usize),
    /// Its number on the communicator, once it is started.
    pub(crate) number: Option<Number>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    New,
    /// On its way through a stream.
    Started,
    /// Kept by a graph, whose copies run.
    Node,
}

/// The state that the collectives of a communicator share with its handle.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) is_aborted: AtomicBool,
    /// Collectives that have not run.
    outstanding: AtomicUsize,
    /// Nodes of graphs that live.
    nodes: AtomicUsize,
    rounds: AtomicU64,
    /// The messages between each two ranks so far, as this rank counts them.
    messages: Mutex<BTreeMap<Number, u64>>,
}

impl Shared {
    /// Returns true while a communicator that is being finalized has to wait: for its operations, and for the end of every
    /// graph that captured some of them (in NCCL's source, `commDestroySync` continues when `localPersistentRefs` is 0).
    pub(crate) fn is_in_use(&self) -> bool {
        self.outstanding.load(Ordering::Acquire) > 0 || self.nodes.load(Ordering::Acquire) > 0
    }

    /// The number of a rank's next call.
    fn next(&self, rank: usize, shape: Shape) -> Number {
        let Some(first) = Number::of_message(rank, shape) else {
            return Number(self.rounds.fetch_add(1, Ordering::AcqRel));
        };
        let mut messages = self.messages.lock();
        let count = messages.entry(first).or_default();
        *count += 1;
        first.after(*count - 1)
    }
}

impl Clone for Collective {
    /// A launch of a graph: a collective of its own.
    fn clone(&self) -> Self {
        Self::new(self.link.clone(), self.rank, self.calls.clone(), self.shared.clone()).started()
    }
}

impl Collective {
    pub(crate) const fn new(link: Link, rank: usize, calls: Vec<Call>, shared: Arc<Shared>) -> Self {
        Self { link, rank, calls, state: State::New, has_arrived: false, shared }
    }

    /// With its place among the collectives of its communicator.
    pub(crate) fn started(mut self) -> Self {
        for call in &mut self.calls {
            call.number = Some(self.shared.next(self.rank, call.shape));
        }
        self.state = State::Started;
        self.shared.outstanding.fetch_add(1, Ordering::AcqRel);
        self
    }

    /// Kept by a graph, and never run itself.
    pub(crate) fn noted(mut self) -> Self {
        self.state = State::Node;
        self.shared.nodes.fetch_add(1, Ordering::AcqRel);
        self
    }

    /// Whether running it would move it on.
    pub(crate) fn is_ready(&self) -> bool {
        !self.has_arrived || self.is_aborted() || self.has_results()
    }

    fn has_results(&self) -> bool {
        self.calls.iter().filter_map(|call| call.number).all(|number| self.link.has_result(number))
    }

    fn is_aborted(&self) -> bool {
        self.shared.is_aborted.load(Ordering::Acquire)
    }

    pub(crate) fn perform(mut self: Box<Self>, memory: &Memory) -> Result<Ran, Fault> {
        if self.is_aborted() {
            // Anything may stand there then, and that can be read.
            for call in self.calls.iter().filter(|call| call.bytes.1 > 0) {
                memory.fill(call.to, &[0xa5], call.bytes.1)?;
            }
            return Ok(Ran::For(1000));
        }
        if !self.has_arrived {
            for call in &self.calls {
                // Only what was started is queued.
                let Some(number) = call.number else { continue };
                let mut bytes = vec![0; call.bytes.0];
                if !bytes.is_empty() {
                    memory.read(call.from, &mut bytes)?;
                }
                self.link.arrive(number, call.shape, bytes);
            }
            self.has_arrived = true;
        }
        if !self.has_results() {
            return Ok(Ran::Until(self));
        }
        let mut moved = 0;
        for call in &self.calls {
            let result = call.number.and_then(|number| self.link.take(number)).unwrap_or_default();
            // Of ranks that disagreed there is no result; that is reported, and the communicator has failed.
            if result.len() == call.bytes.1 && !result.is_empty() {
                memory.write(call.to, &result)?;
            }
            moved += result.len() as u64;
        }
        Ok(Ran::For(5000 + moved / 10))
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        let count = match self.state {
            State::New => return,
            State::Started => &self.shared.outstanding,
            State::Node => &self.shared.nodes,
        };
        count.fetch_sub(1, Ordering::AcqRel);
    }
}
