//! The same cases over TCP, and what only processes can get wrong together.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod agreement;
mod chaos;
mod child;
mod collectives;
mod division;
mod dtypes;
mod events;
mod failures;
mod gather;
mod large;
mod leaving;
mod messages;
mod moves;
mod outputs;
mod pending;
mod ports;
mod processes;
mod rendezvous;
mod scaling;
mod schedules;
mod slow;
mod speak;
mod strangers;
mod support;
mod tokens;
mod twins;

use fp8_dist::{Environment, tcp};
use std::thread;
use std::time::Duration;
use support::*;

/// Returns the environment of each rank's process, with a port that only this group uses.
fn environments(ranks: usize) -> Vec<Environment> {
    let alone = Environment {
        world_size: ranks,
        exact_port: true,
        // Without a name a group waits for other jobs to show up.
        run_id: "test".to_owned(),
        ..Environment::on_this_machine(ports::free())
    };
    (0..ranks).map(|rank| Environment { rank, local_rank: rank, ..alone.clone() }).collect()
}

/// A new group: one handle per rank, in rank order.
fn groups(ranks: usize, deadline: Duration) -> Vec<Group> {
    thread::scope(|scope| {
        let join = |environment| scope.spawn(move || tcp("dp", &environment, deadline).unwrap());
        let threads: Vec<_> = environments(ranks).into_iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
