//! Groups of threads: what they compute together, and what they are told when they cannot.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod agreement;
mod collectives;
mod division;
mod dtypes;
mod failures;
mod gather;
mod gather_blocks;
mod gather_codes;
mod gather_nvfp4;
mod interleavings;
mod large;
mod messages;
mod moves;
mod outputs;
mod pending;
mod quantizer;
mod scaling;
mod schedules;
mod shared_scales;
mod support;

use fp8_dist::local;
use std::time::Duration;
use support::*;

/// A new group: one handle per rank, in rank order.
fn groups(ranks: usize, deadline: Duration) -> Vec<Group> {
    local("dp", ranks, deadline).unwrap()
}
