//! Groups whose ranks are threads of one process.

use crate::division::{Divide, Division, End, Ranks, Request};
use crate::exchange::Exchange;
use crate::meeting::{Meeting, Seat};
use crate::member::Member;
use crate::{Error, ProcessGroup, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Creates a group whose ranks are threads of this process, and returns one handle per rank, in rank order.
///
/// Move each handle into its thread: when a thread panics or returns early, dropping its handle tells the other ranks. `id` names
/// the group in errors and in scaling state ("dp"). `deadline` is how long a rank waits in one collective for the others.
///
/// ```
/// use fp8_dist::local;
/// use std::{thread, time::Duration};
///
/// let ranks = local("dp", 2, Duration::from_secs(10))?;
/// thread::scope(|scope| {
///     for group in ranks {
///         scope.spawn(move || group.barrier().unwrap());
///     }
/// });
/// # Ok::<(), fp8_dist::Error>(())
/// ```
///
/// # Errors
/// A world size or a deadline of 0.
pub fn local(id: &str, world_size: usize, deadline: Duration) -> Result<Vec<Arc<dyn ProcessGroup>>> {
    check_options(id, world_size, deadline)?;
    tracing::info!(group = id, world_size, "group formed");
    let threads = Threads::new(id, world_size, deadline);
    Ok((0..world_size)
        .map(|rank| Arc::new(Member::new(threads.end(rank))) as Arc<dyn ProcessGroup>)
        .collect())
}

/// The ranks of a group, all in this process.
#[derive(Debug)]
struct Threads {
    id: String,
    world_size: usize,
    deadline: Duration,
    meeting: Arc<Meeting>,
    /// New groups of some of the ranks, as long as ranks are missing in them.
    forming: Mutex<Vec<Forming>>,
}

/// A group that the first of its ranks to come has created.
#[derive(Debug)]
struct Forming {
    /// The number of the division, which all ranks count alike, and the group's first rank.
    key: (u64, usize),
    threads: Arc<Threads>,
    missing: usize,
}

/// A rank's way to divide its group.
#[derive(Debug)]
struct Divider {
    threads: Arc<Threads>,
    /// The number of times that the rank has divided the group, locked while it does.
    divisions: Mutex<u64>,
}

impl Threads {
    fn new(id: &str, world_size: usize, deadline: Duration) -> Arc<Self> {
        let meeting = Meeting::new(id, world_size, deadline, |_| false);
        Arc::new(Self { id: id.to_owned(), world_size, deadline, meeting, forming: Mutex::default() })
    }

    fn end(self: &Arc<Self>, rank: usize) -> End {
        let seat = Seat::new(&self.id, rank, self.world_size, self.meeting.clone());
        let divider = Divider { threads: self.clone(), divisions: Mutex::new(0) };
        End { exchange: Box::new(seat), divide: Box::new(divider), direct: None }
    }

    /// Returns the new group of `ranks`.
    fn group(&self, id: &str, division: u64, ranks: &[usize]) -> Arc<Self> {
        let key = (division, ranks.first().copied().unwrap_or_default());
        let mut forming = self.forming.lock();
        let mut group = match forming.iter().position(|group| group.key == key) {
            Some(index) => forming.swap_remove(index),
            None => {
                let threads = Self::new(id, ranks.len(), self.deadline);
                Forming { key, threads, missing: ranks.len() }
            }
        };
        let threads = group.threads.clone();
        group.missing -= 1;
        if group.missing > 0 {
            forming.push(group);
        }
        threads
    }
}

impl Divide for Divider {
    fn divide(&self, exchange: &dyn Exchange, division: &Division<'_>) -> Result<Option<(End, Ranks)>> {
        let mut divisions = self.divisions.lock();
        *divisions += 1;
        let (color, key) = division.color_and_key();
        let place = division.agree(exchange, &Request { color, key, address: None, secret: [0; 16] })?;
        Ok(place.map(|place| {
            let group = self.threads.group(division.id, *divisions, &place.ranks);
            (group.end(place.rank), place.ranks)
        }))
    }
}

/// The end of a group of one rank.
#[cfg(test)]
pub(crate) fn end_of_one() -> End {
    Threads::new("alone", 1, Duration::from_secs(60)).end(0)
}

/// Checks the options that all backends share.
pub(crate) fn check_options(id: &str, world_size: usize, deadline: Duration) -> Result<()> {
    let zero =
        |option, value: String, remedy| Err(Error::Option { id: id.to_owned(), option, value, remedy });
    if world_size == 0 {
        return zero("world_size", world_size.to_string(), "expected at least 1");
    }
    if deadline.is_zero() {
        return zero(
            "deadline",
            format!("{deadline:?}"),
            "expected more than 0: how long ranks wait for each other",
        );
    }
    Ok(())
}
