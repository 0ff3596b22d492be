//! This process's communicators by handle.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::collective::{Call, Shared};
use super::hub::{Hub, ID_BYTES};
use super::link::Link;
use crate::code::{Code, Outcome};

#[derive(Debug, Default)]
pub(crate) struct Communicators {
    pub(super) by_handle: BTreeMap<u64, Communicator>,
    /// The hubs of the ids that were made here.
    pub(super) hubs: BTreeMap<u64, Arc<Hub>>,
    pub(super) has_thread: bool,
}

#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) is_blocking: bool,
    pub(super) link: Link,
    pub(super) shared: Arc<Shared>,
    /// Posted, and not yet in their streams: calls of a communicator that does not block.
    pub(super) posted: Vec<Posted>,
    /// Posted in a group that is still open.
    pub(super) grouped: Vec<(u64, Call)>,
    pub(super) is_finalized: bool,
}

/// A call, or those of a group, for a stream.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) stream: u64,
    pub(super) calls: Vec<Call>,
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
        self.hubs.clear();
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
        // The last holder of a hub of this process is the link of its last rank. One that nobody has joined yet is waited for.
        self.hubs.retain(|_, hub| Arc::strong_count(hub) > 1 || !hub.has_members());
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
        if !is_launched {
            return;
        }
        let mut posted: Vec<Posted> = Vec::new();
        for (stream, call) in grouped {
            match posted.iter_mut().find(|posted| posted.stream == stream) {
                Some(posted) => posted.calls.push(call),
                None => posted.push(Posted { stream, calls: vec![call] }),
            }
        }
        self.posted.extend(posted);
    }

    pub(crate) fn finalize(&mut self) {
        self.is_finalized = true;
    }

    pub(crate) fn is_finalized(&self) -> bool {
        self.is_finalized
    }
}
