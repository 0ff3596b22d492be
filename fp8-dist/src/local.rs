//! Ranks that are threads of one process.
//!
//! A collective is one exchange: each rank puts its message on the table; who comes last compares them all and puts
//! them into every rank's mailbox. A message on the table belongs to the exchange under way and no other: no rank can
//! come to the next one before it has emptied its mailbox, and none is complete before all have come. An exchange that
//! was completed is completed for all ranks, whatever happens before the slowest has looked into its mailbox.

use crate::member::{Exchange, Member};
use crate::message::Message;
use crate::{Error, Failure, ProcessGroup, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A group of threads: one handle per rank, in rank order. Each thread owns its handle, so that the others learn of its
/// end when it panics or returns early. `id` is the group's part in the job ("dp"); `deadline` is how long a rank
/// waits in one collective for the others.
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
    let zero =
        |option, value: String, remedy| Err(Error::Option { id: id.to_owned(), option, value, remedy });
    if world_size == 0 {
        return zero("world_size", world_size.to_string(), "a group has at least one rank");
    }
    if deadline.is_zero() {
        return zero(
            "deadline",
            format!("{deadline:?}"),
            "expected the longest time that ranks may be apart",
        );
    }
    let table = Table {
        messages: (0..world_size).map(|_| None).collect(),
        mailboxes: vec![None; world_size],
        left: vec![false; world_size],
        failure: None,
    };
    let meeting = Arc::new(Meeting { table: Mutex::new(table), changed: Condvar::new() });
    let seat = |rank| Seat {
        id: id.to_owned(),
        rank,
        world_size,
        deadline,
        turn: Mutex::new(()),
        meeting: meeting.clone(),
    };
    Ok((0..world_size).map(|rank| Arc::new(Member(seat(rank))) as Arc<dyn ProcessGroup>).collect())
}

/// One rank's place. Dropped with the last handle.
#[derive(Debug)]
struct Seat {
    id: String,
    rank: usize,
    world_size: usize,
    deadline: Duration,
    /// Threads that share a handle come one after the other.
    turn: Mutex<()>,
    meeting: Arc<Meeting>,
}

#[derive(Debug)]
struct Meeting {
    table: Mutex<Table>,
    changed: Condvar,
}

/// One entry per rank each.
#[derive(Debug)]
struct Table {
    messages: Vec<Option<Message>>,
    mailboxes: Vec<Option<Arc<Vec<Message>>>>,
    left: Vec<bool>,
    failure: Option<Failure>,
}

impl Table {
    /// Ends the exchange if all have come.
    fn try_complete(&mut self) -> bool {
        if self.messages.iter().any(Option::is_none) {
            return false;
        }
        let all: Vec<Message> = self.messages.iter_mut().filter_map(Option::take).collect();
        match Message::first_difference(&all) {
            Some(difference) => self.fail(difference),
            None => self.mailboxes.fill(Some(Arc::new(all))),
        }
        true
    }

    /// Who has not come yet.
    fn missing(&self) -> Vec<usize> {
        (0..self.messages.len()).filter(|&rank| self.messages[rank].is_none()).collect()
    }

    /// The first failure is the one that counts.
    fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
        self.messages.fill_with(|| None);
    }
}

impl Exchange for Seat {
    fn id(&self) -> &str {
        &self.id
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn exchange(&self, message: Message) -> Result<Arc<Vec<Message>>> {
        let _turn = self.turn.lock(); // whoever has it keeps the deadline, too
        let until = Instant::now().checked_add(self.deadline); // none: longer than clocks run
        let call = message.call.clone();
        let mut table = self.meeting.table.lock();
        if let Some(failure) = table.failure.clone() {
            return Err(Error::Poisoned { call: call.to_string(), failure });
        }
        table.messages[self.rank] = Some(message);
        if table.try_complete() {
            self.meeting.changed.notify_all();
        }
        loop {
            if let Some(all) = table.mailboxes[self.rank].take() {
                return Ok(all);
            }
            if let Some(failure) = table.failure.clone() {
                return Err(Error::Failed { call: call.to_string(), failure });
            }
            let missing = table.missing();
            let left: Vec<usize> = missing.iter().copied().filter(|&rank| table.left[rank]).collect();
            let late = until.is_some_and(|until| until <= Instant::now());
            if !left.is_empty() {
                table.fail(Failure::Left { ranks: left });
                self.meeting.changed.notify_all();
            } else if late {
                table.fail(Failure::Deadline { missing, waited: self.deadline });
                self.meeting.changed.notify_all();
            } else if let Some(until) = until {
                self.meeting.changed.wait_until(&mut table, until);
            } else {
                self.meeting.changed.wait(&mut table);
            }
        }
    }

    fn poison(&self, reason: &str) {
        self.meeting.table.lock().fail(Failure::GaveUp { rank: self.rank, reason: reason.to_owned() });
        self.meeting.changed.notify_all();
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.poison("its thread panicked");
        }
        self.meeting.table.lock().left[self.rank] = true;
        self.meeting.changed.notify_all();
    }
}
