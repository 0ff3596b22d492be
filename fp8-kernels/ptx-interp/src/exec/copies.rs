//! Asynchronous copies under way.

use crate::lanes::lanes;

/// The copies that a warp's lanes have not waited for.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(super) pending: Vec<Pending>,
    /// The number of complete groups of each lane, which is the number of the group that its next copies join.
    pub(super) groups: [u32; 32],
}

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) lane: usize,
    pub(super) group: u32,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) data: [u8; 16],
}

impl Copies {
    /// `cp.async.commit_group`: what the lanes have started so far is a group.
    pub(super) fn commit(&mut self, mask: u32) {
        lanes(mask).for_each(|lane| self.groups[lane] += 1);
    }
}
