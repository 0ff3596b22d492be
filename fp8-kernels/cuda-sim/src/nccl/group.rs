//! The group of calls that a thread has open.

use std::cell::RefCell;

use crate::code::Code;

/// Calls between ncclGroupStart and ncclGroupEnd of a thread.
#[derive(Default)]
pub(super) struct Group {
    pub(super) depth: usize,
    pub(super) communicators: Vec<u64>,
    /// The status of the first call that failed.
    pub(super) failed: Option<Code>,
}

thread_local! {
    pub(super) static GROUP: RefCell<Group> = RefCell::default();
}

/// A call failed. NCCL remembers it where a group is open: nothing of that group is launched, and its end fails alike.
pub(crate) fn heed(name: &str, code: Code) {
    let is_collective =
        ["ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclSend", "ncclRecv"]
            .contains(&name);
    if code == Code::NCCL_IN_PROGRESS {
        return;
    }
    GROUP.with_borrow_mut(|group| {
        if name == "ncclGroupEnd" {
            *group = Group::default(); // ended, whatever it answers
        } else if is_collective && group.depth > 0 {
            group.failed.get_or_insert(code);
        }
    });
}
