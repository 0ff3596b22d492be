//! The event for a group that has failed.

use crate::Failure;

/// Reports the first failure of a group, once per process: one warning for each rank that is its cause, or a single one if no rank
/// is. Call it without holding a lock, since it runs the user's subscriber.
pub(crate) fn lost(group: &str, world_size: usize, failure: &Failure) {
    let ranks: &[usize] = match failure {
        Failure::GaveUp { rank, .. } | Failure::Lost { rank, .. } => &[*rank],
        Failure::Left { ranks } | Failure::Deadline { missing: ranks, .. } => ranks,
        _ => {
            tracing::warn!(group, world_size, cause = %failure, "group failed");
            return;
        }
    };
    for rank in ranks {
        tracing::warn!(group, rank, world_size, cause = %failure, "rank lost");
    }
}
