//! Collects the messages of one exchange: in the process whose threads are the ranks, or in the process of rank 0.
//!
//! A collective is one exchange. Each rank puts its message on the table. The last one to arrive compares all messages, computes
//! reductions, and puts the result into every rank's mailbox. Messages of different exchanges never mix: an exchange is complete
//! only when all ranks have arrived, and a rank cannot start the next one before it has emptied its mailbox. A completed exchange
//! succeeds on all ranks, even if the group fails before the slowest rank reads its mailbox.

use crate::calls::Calls;
use crate::exchange::Exchange;
use crate::message::{Call, Message};
use crate::timed::Until;
use crate::{Error, Failure, Result, events, reduction};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most messages that wait for a rank: no program has so many on their way.
const MOST_MAIL: usize = 1 << 16;

/// The messages of all ranks, in rank order.
pub(crate) type All = Arc<Vec<Message>>;

#[derive(Debug)]
pub(crate) struct Meeting {
    id: String,
    table: Mutex<Table>,
    changed: Condvar,
    deadline: Duration,
}

/// The state of all ranks. Each list has one entry per rank.
#[derive(Debug)]
struct Table {
    messages: Vec<Option<Message>>,
    /// The time at which each message arrived.
    since: Vec<Option<Instant>>,
    mailboxes: Vec<Option<All>>,
    left: Vec<bool>,
    /// The links to remote ranks; `None` for ranks in this process, which read their mailboxes themselves.
    links: Vec<Option<Link>>,
    /// The messages that single ranks have sent to each rank, in the order of their arrival, and the sender of each.
    mail: Vec<VecDeque<(usize, Message)>>,
    /// The rank for whose message each rank of this process waits.
    awaits: Vec<Option<usize>>,
    failure: Option<Failure>,
    calls: Calls,
    /// Whether tensors move from rank to rank after the last exchange. Ranks that still wait for them know better than this table which
    /// rank is late.
    has_direct: bool,
    /// Whether single ranks send each other messages. Those that wait for one know better, too.
    has_mail: bool,
}

/// The record of the news that a remote rank has been sent.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    is_sending: bool,
    knows_failure: bool,
    /// The number of ranks that it knows to have left.
    knows_left: usize,
}

/// The next news for a remote rank.
#[derive(Debug)]
pub(crate) enum News {
    Complete(All),
    /// A message of this rank.
    Mail(usize, Message),
    Failed(Failure),
    /// These ranks have left.
    Left(Vec<usize>),
    /// Nothing more will be sent.
    End,
}

impl Table {
    /// Completes the exchange if all ranks have brought their messages. Returns the failure if the messages differ.
    fn try_complete(&mut self) -> Option<Failure> {
        if self.messages.iter().any(Option::is_none) {
            return None;
        }
        let all: Vec<Message> = self.messages.iter_mut().filter_map(Option::take).collect();
        match Message::first_difference(&all) {
            Some(difference) => self.fail(difference),
            None => {
                self.has_direct = all.iter().enumerate().any(|(rank, message)| message.is_announced(rank));
                self.mailboxes.fill(Some(Arc::new(reduction::reduced(all))));
                None
            }
        }
    }

    /// Returns the ranks that have left.
    fn left(&self) -> Vec<usize> {
        (0..self.left.len()).filter(|&rank| self.left[rank]).collect()
    }

    /// Returns the ranks that have not arrived yet.
    fn missing(&self) -> Vec<usize> {
        (0..self.messages.len()).filter(|&rank| self.messages[rank].is_none()).collect()
    }

    /// Records a failure. The first one counts and is returned, to be reported.
    fn fail(&mut self, failure: Failure) -> Option<Failure> {
        self.messages.fill_with(|| None);
        self.mail.iter_mut().for_each(VecDeque::clear);
        match self.failure {
            Some(_) => None,
            None => Some(self.failure.insert(failure).clone()),
        }
    }

    /// Returns the rank that `from` waits for, or the one that that one waits for, and so on, as far as is known here; `from` if they
    /// wait for each other.
    fn late(&self, from: usize) -> usize {
        let next = |rank: &usize| self.awaits.get(*rank).copied().flatten();
        let mut chain = std::iter::successors(Some(from), next).skip(self.awaits.len());
        match chain.next() {
            Some(_) => from,
            None => std::iter::successors(Some(from), next).last().unwrap_or(from),
        }
    }

    /// Returns true if something remains to be sent to a remote rank.
    fn owes(&self, rank: usize) -> bool {
        self.links[rank].is_some_and(|link| {
            let failure = self.failure.is_some() && !link.knows_failure;
            let leave = self.failure.is_none() && link.knows_left < self.left().len();
            let mail = self.failure.is_none() && !self.mail[rank].is_empty();
            self.mailboxes[rank].is_some() || mail || link.is_sending || failure || leave
        })
    }
}

impl Meeting {
    /// Creates the meeting of a group. `remote` says which ranks are in other processes.
    pub(crate) fn new(
        id: &str,
        world_size: usize,
        deadline: Duration,
        remote: impl Fn(usize) -> bool,
    ) -> Arc<Self> {
        let table = Table {
            messages: (0..world_size).map(|_| None).collect(),
            since: vec![None; world_size],
            mailboxes: vec![None; world_size],
            left: vec![false; world_size],
            links: (0..world_size).map(|rank| remote(rank).then(Link::default)).collect(),
            mail: (0..world_size).map(|_| VecDeque::new()).collect(),
            awaits: vec![None; world_size],
            failure: None,
            calls: Calls::new(world_size),
            has_direct: false,
            has_mail: false,
        };
        Arc::new(Self { id: id.to_owned(), table: Mutex::new(table), changed: Condvar::new(), deadline })
    }

    /// Puts a rank's message on the table. Returns false if the rank has one there already.
    pub(crate) fn bring(&self, rank: usize, message: Message) -> Result<bool, Failure> {
        let mut table = self.table.lock();
        if let Some(failure) = table.failure.clone() {
            return Err(failure);
        }
        if table.messages[rank].is_some() || table.mailboxes[rank].is_some() {
            return Ok(false);
        }
        table.messages[rank] = Some(message);
        table.since[rank] = Some(Instant::now());
        let failure = table.try_complete();
        // Also if the exchange is not complete: the thread that serves this rank starts to watch the deadline.
        self.changed.notify_all();
        drop(table);
        self.report(failure);
        Ok(true)
    }

    /// Waits for the result of the exchange, for a rank that has brought its message.
    fn outcome(&self, rank: usize) -> Result<All, Failure> {
        let mut table = self.table.lock();
        loop {
            if let Some(all) = table.mailboxes[rank].take() {
                return Ok(all);
            }
            if let Some(failure) = table.failure.clone() {
                return Err(failure);
            }
            self.wait(&mut table, rank);
        }
    }

    /// Puts a message of one rank into the mail of another. Returns false if there is no such rank.
    pub(crate) fn post(&self, from: usize, to: usize, message: Message) -> Result<bool, Failure> {
        let mut table = self.table.lock();
        if let Some(failure) = table.failure.clone() {
            return Err(failure);
        }
        let is_there = table.left.get(to).map(|left| !left);
        let failure = match (table.mail.get_mut(to).filter(|_| to != from), is_there) {
            (None, _) | (_, None) => return Ok(false),
            (Some(mail), Some(true)) if mail.len() < MOST_MAIL => {
                mail.push_back((from, message));
                table.has_mail = true;
                self.changed.notify_all();
                return Ok(true);
            }
            (_, Some(false)) => Failure::Left { ranks: vec![to] },
            _ => {
                let reason =
                    format!("it sends one tensor more to rank {to}, for which {MOST_MAIL} wait already");
                Failure::Lost { rank: from, reason }
            }
        };
        let first = table.fail(failure.clone());
        self.changed.notify_all();
        drop(table);
        self.report(first);
        Err(failure)
    }

    /// Waits for the next message that `from` has for a rank of this process.
    fn mail(&self, rank: usize, from: usize) -> Result<Message, Failure> {
        let until = Until::after(self.deadline);
        let mut table = self.table.lock();
        loop {
            let mail = table.mail.get_mut(rank);
            let message = mail.and_then(|mail| take_from(mail, from));
            let is_over = message.is_some() || table.failure.is_some();
            if let Some(awaits) = table.awaits.get_mut(rank) {
                *awaits = (!is_over).then_some(from);
            }
            if let Some(message) = message {
                return Ok(message);
            }
            let failure = match table.failure.clone() {
                Some(failure) => return Err(failure),
                None if table.left.get(from) == Some(&true) => Failure::Left { ranks: vec![from] },
                None if until.is_past() => {
                    Failure::Deadline { missing: vec![table.late(from)], waited: self.deadline }
                }
                None => {
                    match until.instant() {
                        Some(until) => drop(self.changed.wait_until(&mut table, until)),
                        None => self.changed.wait(&mut table),
                    }
                    continue;
                }
            };
            let first = table.fail(failure);
            self.changed.notify_all();
            parking_lot::MutexGuard::unlocked(&mut table, || self.report(first));
        }
    }

    /// Waits for the next thing to send to a remote rank.
    pub(crate) fn news(&self, rank: usize) -> News {
        let mut table = self.table.lock();
        loop {
            let Some(link) = table.links[rank] else { return News::End };
            let told = |link: Link| Some(Link { is_sending: true, ..link });
            if let Some(all) = table.mailboxes[rank].take() {
                table.links[rank] = told(link);
                return News::Complete(all);
            }
            if let Some((from, message)) = table.mail[rank].pop_front() {
                table.links[rank] = told(link);
                return News::Mail(from, message);
            }
            match table.failure.clone() {
                Some(_) if link.knows_failure => return News::End,
                Some(failure) => {
                    table.links[rank] = told(Link { knows_failure: true, ..link });
                    return News::Failed(failure);
                }
                None if link.knows_left < table.left().len() => {
                    let left = table.left();
                    table.links[rank] = told(Link { knows_left: left.len(), ..link });
                    return News::Left(left);
                }
                None => self.wait(&mut table, rank),
            }
        }
    }

    /// Records that the result of [`news`](Self::news) has been sent.
    pub(crate) fn delivered(&self, rank: usize) {
        if let Some(link) = &mut self.table.lock().links[rank] {
            link.is_sending = false;
        }
        self.changed.notify_all();
    }

    /// Records that the connection to a rank is closed.
    pub(crate) fn unlink(&self, rank: usize) {
        let mut table = self.table.lock();
        table.links[rank] = None;
        table.mail[rank].clear();
        drop(table);
        self.changed.notify_all();
    }

    /// Waits until everything has been sent to remote ranks, at most for `patience`.
    pub(crate) fn flush(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let mut table = self.table.lock();
        while (0..table.links.len()).any(|rank| table.owes(rank)) {
            if self.changed.wait_until(&mut table, until).timed_out() {
                return;
            }
        }
    }

    /// Waits for a change. Fails the group if other ranks have left or the deadline has passed.
    fn wait(&self, table: &mut parking_lot::MutexGuard<'_, Table>, rank: usize) {
        if table.messages[rank].is_none() {
            self.changed.wait(table);
            return;
        }
        let patience = match table.has_direct || table.has_mail {
            true => self.deadline.saturating_add(grace(self.deadline) / 2),
            false => self.deadline,
        };
        let until = table.since[rank].and_then(|since| since.checked_add(patience)); // none: longer than clocks run
        let missing = table.missing();
        let left: Vec<usize> = missing.iter().copied().filter(|&rank| table.left[rank]).collect();
        let failure = if !left.is_empty() {
            table.fail(Failure::Left { ranks: left })
        } else if until.is_some_and(|until| until <= Instant::now()) {
            table.fail(Failure::Deadline { missing, waited: self.deadline })
        } else {
            match until {
                Some(until) => drop(self.changed.wait_until(table, until)),
                None => self.changed.wait(table),
            }
            return;
        };
        self.changed.notify_all();
        parking_lot::MutexGuard::unlocked(table, || self.report(failure));
    }

    pub(crate) fn fail(&self, failure: Failure) {
        let failure = self.table.lock().fail(failure);
        self.changed.notify_all();
        self.report(failure);
    }

    /// Emits the event for a failure. The table must not be locked.
    fn report(&self, failure: Option<Failure>) {
        if let Some(failure) = failure {
            let world_size = self.table.lock().messages.len();
            events::lost(&self.id, world_size, &failure);
        }
    }

    /// Adds calls that a rank has made, and fails the group if they are not those of the others.
    pub(crate) fn add_calls(&self, rank: usize, numbers: &[u64]) {
        let difference = self.table.lock().calls.add(rank, numbers);
        difference.into_iter().for_each(|difference| self.fail(difference));
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.table.lock().failure.clone()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn left(&self) -> Vec<usize> {
        self.table.lock().left()
    }

    /// Records that a rank will bring no more messages.
    pub(crate) fn leave(&self, rank: usize) {
        let mut table = self.table.lock();
        table.left[rank] = true;
        table.mail[rank].clear();
        drop(table);
        self.changed.notify_all();
    }
}

/// Takes the first message that `from` has sent.
pub(crate) fn take_from(mail: &mut VecDeque<(usize, Message)>, from: usize) -> Option<Message> {
    let index = mail.iter().position(|&(sender, _)| sender == from)?;
    mail.remove(index).map(|(_, message)| message)
}

/// The time by which a rank may exceed the deadline: rank 0 keeps it, and its word has to arrive.
pub(crate) fn grace(deadline: Duration) -> Duration {
    (deadline / 4).clamp(Duration::from_millis(100), Duration::from_secs(2))
}

/// A rank in this process. Dropped with its last handle.
#[derive(Debug)]
pub(crate) struct Seat {
    id: String,
    rank: usize,
    world_size: usize,
    /// Serializes threads that share a handle.
    turn: Mutex<()>,
    meeting: Arc<Meeting>,
}

impl Seat {
    pub(crate) fn new(id: &str, rank: usize, world_size: usize, meeting: Arc<Meeting>) -> Self {
        Self { id: id.to_owned(), rank, world_size, turn: Mutex::new(()), meeting }
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

    fn exchange(&self, message: Message) -> Result<All> {
        let _turn = self.turn.lock(); // its owner waits no longer than the deadline
        let call = message.call.to_string();
        match self.meeting.bring(self.rank, message) {
            Err(failure) => Err(Error::Poisoned { call, failure }),
            Ok(_) => self.meeting.outcome(self.rank).map_err(|failure| Error::Failed { call, failure }),
        }
    }

    fn send_to(&self, to: usize, message: Message) -> Result<()> {
        let call = message.call.to_string();
        if let Some(failure) = self.failure() {
            return Err(Error::Poisoned { call, failure });
        }
        match self.meeting.post(self.rank, to, message) {
            Err(failure) => Err(Error::Failed { call, failure }),
            Ok(_) => Ok(()),
        }
    }

    fn receive_from(&self, from: usize, call: &Call) -> Result<Message> {
        let call = call.to_string();
        if let Some(failure) = self.failure() {
            return Err(Error::Poisoned { call, failure });
        }
        self.meeting.mail(self.rank, from).map_err(|failure| Error::Failed { call, failure })
    }

    fn fail(&self, failure: Failure) {
        self.meeting.fail(failure);
    }

    fn failure(&self) -> Option<Failure> {
        self.meeting.failure()
    }

    #[cfg(feature = "cuda")]
    fn left(&self) -> Vec<usize> {
        self.meeting.left()
    }

    #[cfg(feature = "cuda")]
    fn name_call(&self, number: u64, name: &str) {
        self.meeting.table.lock().calls.name(number, name);
    }

    #[cfg(feature = "cuda")]
    fn tell_calls(&self, numbers: &[u64]) -> bool {
        self.meeting.add_calls(self.rank, numbers);
        true
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.poison("its thread panicked");
        }
        self.meeting.leave(self.rank);
        // The process may end now, and with it the threads that tell the other ranks.
        self.meeting.flush(self.meeting.deadline.min(Duration::from_secs(5)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Operation;

    /// The table of two ranks, of which the second is in another process, after `change`.
    fn owes(change: impl FnOnce(&mut Table)) -> bool {
        let meeting = Meeting::new("dp", 2, Duration::MAX, |rank| rank == 1);
        let mut table = meeting.table.lock();
        change(&mut table);
        assert!(!table.owes(0), "a rank of this process reads its mailbox itself");
        table.owes(1)
    }

    #[test]
    fn ranks_that_move_tensors_have_a_moment_to_name_the_late_one_themselves() {
        use crate::ReduceOp;
        use crate::message::Part;
        use fp8_kernels::{DType, Device, Tensor};
        let deadline = Duration::from_millis(400);
        let x = Tensor::zeros([4], DType::F32, &Device::cpu()).unwrap();
        let announced = |operation| Message::new(operation, "x").with(Part::expected(&x));
        let brought = |operation| Message::new(operation, "x").with(Part::copy(&x).unwrap());
        let sum = Operation::AllReduce(ReduceOp::Sum);
        let root = Operation::Broadcast { root: 1 };
        let cases = [
            (vec![brought(sum), brought(sum)], false),
            (vec![announced(sum), announced(sum)], true),
            (vec![announced(root), brought(root)], false),
            (vec![announced(root), announced(root)], true),
            (vec![brought(Operation::AllGather), announced(Operation::AllGather)], true),
            (vec![Message::new(Operation::Barrier, ""), Message::new(Operation::Barrier, "")], false),
        ];
        for (messages, has_direct) in cases {
            let meeting = Meeting::new("dp", 2, deadline, |_| false);
            for (rank, message) in messages.into_iter().enumerate() {
                meeting.bring(rank, message).unwrap();
            }
            (0..2).for_each(|rank| drop(meeting.outcome(rank).unwrap()));
            let started = Instant::now();
            meeting.bring(0, Message::new(Operation::Barrier, "")).unwrap();
            let late = Failure::Deadline { missing: vec![1], waited: deadline };
            assert_eq!(meeting.outcome(0).unwrap_err(), late);
            assert_eq!(meeting.table.lock().has_direct, has_direct);
            assert!(!has_direct || started.elapsed() >= deadline + grace(deadline) / 2);
        }
    }

    fn link(table: &mut Table) -> &mut Link {
        table.links[1].as_mut().unwrap()
    }

    #[test]
    fn each_kind_of_news_is_owed_to_a_remote_rank_until_it_is_sent() {
        assert!(!owes(|_| {}));
        assert!(owes(|table| table.mailboxes[1] = Some(Arc::default())));
        assert!(owes(|table| table.mail[1].push_back((0, Message::new(Operation::Send { to: 1 }, "x")))));
        assert!(owes(|table| link(table).is_sending = true));
        assert!(owes(|table| table.failure = Some(Failure::Left { ranks: vec![0] })));
        assert!(owes(|table| table.left[0] = true));
        assert!(!owes(|table| {
            table.left[0] = true;
            link(table).knows_left = 1;
        }));
    }
}
