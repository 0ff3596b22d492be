//! One rank's part of a collective, as work of a stream.
//!
//! When the stream gets there, the rank's bytes go to the hub; the stream waits until those of all ranks have come, and
//! then writes the result. An aborted collective leaves bytes that
//! mean nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ptx_interp::Memory;

use super::link::Link;
use super::shape::Shape;
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
    pub(crate) link: Link,
    /// Its number on the communicator; none for a node of a graph, whose copies run.
    pub(crate) round: Option<u64>,
    pub(crate) shape: Shape,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// The numbers of bytes that this rank reads and writes.
    pub(crate) bytes: (usize, usize),
    pub(crate) has_arrived: bool,
    /// Whether this is a node of a graph, whose copies run.
    pub(crate) is_node: bool,
    pub(crate) shared: Arc<Shared>,
}

/// The state that the collectives of a communicator share with its handle.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) is_aborted: AtomicBool,
    /// Collectives that have not run.
    pub(crate) outstanding: AtomicUsize,
    /// Nodes of graphs that live.
    pub(crate) nodes: AtomicUsize,
    rounds: AtomicU64,
}

impl Shared {
    /// Returns true while a communicator that is being finalized has to wait: for its operations, and for the end of every
    /// graph that captured some of them (in NCCL's source, `commDestroySync` continues when `localPersistentRefs` is 0).
    pub(crate) fn is_in_use(&self) -> bool {
        self.outstanding.load(Ordering::Acquire) > 0 || self.nodes.load(Ordering::Acquire) > 0
    }
}

impl Clone for Collective {
    /// A launch of a graph: a collective of its own.
    fn clone(&self) -> Self {
        Self {
            link: self.link.clone(),
            round: None,
            has_arrived: false,
            is_node: false,
            shared: self.shared.clone(),
            ..*self
        }
        .started()
    }
}

impl Collective {
    /// With its place among the collectives of its communicator.
    pub(crate) fn started(mut self) -> Self {
        self.round = Some(self.shared.rounds.fetch_add(1, Ordering::AcqRel));
        self.shared.outstanding.fetch_add(1, Ordering::AcqRel);
        self
    }

    /// Kept by a graph, and never run itself.
    pub(crate) fn noted(mut self) -> Self {
        self.is_node = true;
        self.shared.nodes.fetch_add(1, Ordering::AcqRel);
        self
    }

    /// Whether running it would move it on.
    pub(crate) fn is_ready(&self) -> bool {
        !self.has_arrived || self.is_aborted() || self.round.is_some_and(|round| self.link.has_result(round))
    }

    fn is_aborted(&self) -> bool {
        self.shared.is_aborted.load(Ordering::Acquire)
    }

    pub(crate) fn perform(mut self: Box<Self>, memory: &Memory) -> Result<Ran, Fault> {
        if self.is_aborted() {
            // Anything may stand there then, and that can be read.
            if self.bytes.1 > 0 {
                memory.fill(self.to, &[0xa5], self.bytes.1)?;
            }
            return Ok(Ran::For(1000));
        }
        // Only what was started is queued.
        let Some(round) = self.round else { return Ok(Ran::For(0)) };
        if !self.has_arrived {
            let mut bytes = vec![0; self.bytes.0];
            if !bytes.is_empty() {
                memory.read(self.from, &mut bytes)?;
            }
            self.link.arrive(round, self.shape, bytes);
            self.has_arrived = true;
        }
        let Some(result) = self.link.take(round) else { return Ok(Ran::Until(self)) };
        // Of ranks that disagreed there is no result; that is reported, and the communicator has failed.
        if result.len() == self.bytes.1 && !result.is_empty() {
            memory.write(self.to, &result)?;
        }
        Ok(Ran::For(5000 + result.len() as u64 / 10))
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        if self.round.is_some() {
            self.shared.outstanding.fetch_sub(1, Ordering::AcqRel);
        }
        if self.is_node {
            self.shared.nodes.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
