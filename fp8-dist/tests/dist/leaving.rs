//! Ranks that leave while others are being told that some have left.

use crate::{LONG, f32s, groups};
use fp8_dist::{Failure, ReduceOp};
use std::thread;

/// A rank that has closed its connection is no lost one if it has said that it leaves, however late that is read.
#[test]
fn ranks_that_leave_together_are_not_lost() {
    for round in 0..150 {
        let mut groups = groups(4, LONG);
        let stays = groups.remove(0);
        thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || group.barrier().unwrap());
            }
            stays.barrier().unwrap();
        });
        // By now all are told of each, or are not there to be told.
        let error = stays.all_reduce("x", &f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap_err();
        assert!(matches!(error.failure(), Some(Failure::Left { .. })), "round {round}: {error}");
    }
}
