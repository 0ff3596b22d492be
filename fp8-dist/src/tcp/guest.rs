//! The end of the connection of all ranks except rank 0. A thread reads what rank 0 sends into an inbox.

use super::connection::{GOODBYE, closed, prepare, spawn};
use crate::exchange::Exchange;
use crate::meeting::{All, grace, take_from};
use crate::message::{Call, Message, Part};
use crate::timed::{Timed, Until, is_late};
use crate::wire::{self, Frame};
use crate::{Environment, Error, Failure, Result, events};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{self, BufReader, BufWriter};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The time limit for a rank to report that it gives up, and to receive rank 0's answer.
const WORD: Duration = Duration::from_secs(2);

/// A rank other than rank 0. Dropped with its last handle.
#[derive(Debug)]
pub(crate) struct Guest {
    id: String,
    rank: usize,
    world_size: usize,
    deadline: Duration,
    /// Serializes threads that share a handle.
    turn: Mutex<()>,
    out: Mutex<BufWriter<Timed>>,
    /// A second handle of the connection, to close it while another thread is sending.
    stream: TcpStream,
    inbox: Arc<Inbox>,
}

#[derive(Debug)]
struct Inbox {
    group: String,
    world_size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    reply: Option<Vec<Option<Part>>>,
    failure: Option<Failure>,
    /// The failure that this rank has reported. Rank 0 answers with the group's first failure.
    own_failure: Option<Failure>,
    left: Vec<usize>,
    /// The messages of single ranks, and the sender of each.
    mail: VecDeque<(usize, Message)>,
    /// Rank 0 has left and closed the connection. This is a failure only for later calls.
    closed: Option<Failure>,
    /// Whether the inbox's thread has ended.
    is_at_end: bool,
}

impl Guest {
    pub(super) fn new(
        id: &str,
        environment: &Environment,
        deadline: Duration,
        stream: TcpStream,
    ) -> io::Result<Self> {
        prepare(&stream)?;
        let inbox = Arc::new(Inbox {
            group: id.to_owned(),
            world_size: environment.world_size,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let (incoming, received) = (stream.try_clone()?, inbox.clone());
        let out = Timed::new(stream.try_clone()?, Until::after(deadline));
        spawn("fp8-dist inbox of", environment.rank, move || received.fill(incoming))?;
        Ok(Self {
            id: id.to_owned(),
            rank: environment.rank,
            world_size: environment.world_size,
            deadline,
            turn: Mutex::new(()),
            out: Mutex::new(BufWriter::with_capacity(1 << 16, out)),
            stream,
            inbox,
        })
    }

    /// Sends a frame by `until`, including the wait for another thread that is sending.
    fn send(&self, frame: &Frame, until: Until) -> io::Result<()> {
        let out = match until.instant() {
            Some(instant) => self.out.try_lock_until(instant),
            None => Some(self.out.lock()),
        };
        let mut out = out.ok_or(io::ErrorKind::TimedOut)?;
        out.get_mut().until = until;
        wire::send(&mut *out, frame)
    }

    /// Returns an error if the group has failed, as far as this rank knows.
    fn expect_usable(&self, call: &Call) -> Result<()> {
        let (failure, is_own) = {
            let state = self.inbox.state.lock();
            (state.failure.clone(), state.own_failure.is_some())
        };
        let late = || Failure::Deadline { missing: vec![0], waited: self.deadline };
        match failure.or_else(|| is_own.then(|| self.failure().unwrap_or_else(late))) {
            Some(failure) => Err(Error::Poisoned { call: call.to_string(), failure }),
            None => Ok(()),
        }
    }

    /// Ends the group because rank 0 does not answer, or cannot be sent to, and returns the error.
    fn unheard(&self, call: &Call, sent: io::Result<()>) -> Error {
        let failure = match sent {
            Err(error) if !is_late(&error) => Failure::Lost { rank: 0, reason: closed(&error) },
            _ => Failure::Deadline { missing: vec![0], waited: self.deadline },
        };
        let mut state = self.inbox.state.lock();
        let first = state.fail(failure.clone());
        let failure = state.failure.clone().unwrap_or(failure);
        drop(state);
        self.inbox.report(first);
        let _ = self.stream.shutdown(Shutdown::Both);
        Error::Failed { call: call.to_string(), failure }
    }

    /// Returns the time limit of an exchange, including the transfer of its data. Rank 0 enforces the deadline; the grace period lets
    /// its message arrive, and covers a rank 0 that does not answer.
    fn patience(&self) -> Duration {
        self.deadline.saturating_add(grace(self.deadline))
    }
}

impl State {
    /// Records a failure. The first one counts and is returned, to be reported.
    fn fail(&mut self, failure: Failure) -> Option<Failure> {
        self.mail.clear();
        match self.failure {
            Some(_) => None,
            None => Some(self.failure.insert(failure).clone()),
        }
    }
}

impl Inbox {
    /// Emits the event for a failure. The state must not be locked.
    fn report(&self, failure: Option<Failure>) {
        if let Some(failure) = failure {
            events::lost(&self.group, self.world_size, &failure);
        }
    }

    /// Receives what rank 0 sends until the connection closes.
    fn fill(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        loop {
            let frame = wire::receive(&mut stream);
            let mut state = self.state.lock();
            match frame {
                Ok(Frame::Complete(parts)) => state.reply = Some(parts),
                Ok(Frame::Fail(failure)) => {
                    let first = state.fail(failure);
                    drop(state);
                    self.report(first);
                    self.changed.notify_all();
                    continue;
                }
                Ok(Frame::Left(ranks)) => state.left = ranks,
                Ok(Frame::Mail { peer, message }) => state.mail.push_back((peer, message)),
                Ok(Frame::Bring(_) | Frame::Calls(_) | Frame::Welcome) | Err(_) => {
                    let reason =
                        frame.err().map_or("it sent what only other ranks send".to_owned(), |e| closed(&e));
                    let first = if state.left.contains(&0) {
                        state.closed = Some(Failure::Left { ranks: vec![0] });
                        state.own_failure.take().and_then(|failure| state.fail(failure))
                    } else {
                        state.fail(Failure::Lost { rank: 0, reason })
                    };
                    state.is_at_end = true;
                    drop(state);
                    self.changed.notify_all();
                    return self.report(first);
                }
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Waits until the inbox's thread has ended, at most for `patience`.
    fn drain(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while !state.is_at_end && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    /// Waits for the next message of rank `from`. The error is the group's failure, or `None` if none has come by `until`, or the rank has left.
    fn mail(&self, from: usize, until: Until) -> Result<Message, Option<Failure>> {
        let mut state = self.state.lock();
        loop {
            if let Some(message) = take_from(&mut state.mail, from) {
                return Ok(message);
            }
            if let Some(failure) = state.failure.clone().or_else(|| state.closed.clone()) {
                return Err(Some(failure));
            }
            if state.left.contains(&from) || until.is_past() {
                return Err(None);
            }
            match until.instant() {
                Some(until) => drop(self.changed.wait_until(&mut state, until)),
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Waits for rank 0's next message; `None` if it does not arrive by `until`.
    fn outcome(&self, until: Until) -> Option<Result<Vec<Option<Part>>, Failure>> {
        let until = until.instant();
        let mut state = self.state.lock();
        loop {
            if let Some(parts) = state.reply.take() {
                return Some(Ok(parts));
            }
            if let Some(failure) = state.failure.clone().or_else(|| state.closed.clone()) {
                return Some(Err(failure));
            }
            match until {
                Some(until) if until <= Instant::now() => return None,
                Some(until) => drop(self.changed.wait_until(&mut state, until)),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl Exchange for Guest {
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
        let call = message.call.clone();
        self.expect_usable(&call)?;
        // One deadline for the whole exchange, however slowly rank 0 reads or answers.
        let until = Until::after(self.patience());
        // If sending fails, the connection is closed, which the inbox detects.
        let sent = self.send(&Frame::Bring(message), until);
        let heard = if sent.is_ok() { until } else { until.within(GOODBYE) };
        match self.inbox.outcome(heard) {
            Some(Ok(parts)) => {
                let message = |part| Message { call: call.clone(), names: Vec::new(), part };
                Ok(Arc::new(parts.into_iter().map(message).collect()))
            }
            Some(Err(failure)) => Err(Error::Failed { call: call.to_string(), failure }),
            None => Err(self.unheard(&call, sent)),
        }
    }

    fn send_to(&self, to: usize, message: Message) -> Result<()> {
        let call = message.call.clone();
        self.expect_usable(&call)?;
        let failed = |failure| Err(Error::Failed { call: call.to_string(), failure });
        let (closed, has_left) = {
            let state = self.inbox.state.lock();
            (state.closed.clone(), state.left.contains(&to))
        };
        if let Some(failure) = closed {
            return failed(failure); // messages go by way of rank 0
        }
        if has_left {
            let failure = Failure::Left { ranks: vec![to] };
            self.fail(failure.clone());
            return failed(self.failure().unwrap_or(failure));
        }
        let until = Until::after(self.patience());
        let sent = self.send(&Frame::Mail { peer: to, message }, until);
        if sent.is_ok() {
            return Ok(());
        }
        // The cause may be on its way.
        let until = Instant::now() + GOODBYE.min(self.deadline);
        let mut state = self.inbox.state.lock();
        let cause = loop {
            let cause = state.failure.clone().or_else(|| state.closed.clone());
            if cause.is_some() || self.inbox.changed.wait_until(&mut state, until).timed_out() {
                break cause;
            }
        };
        drop(state);
        match cause {
            Some(failure) => failed(failure),
            None => Err(self.unheard(&call, sent)),
        }
    }

    fn receive_from(&self, from: usize, call: &Call) -> Result<Message> {
        self.expect_usable(call)?;
        let until = Until::after(self.deadline);
        let failure = match self.inbox.mail(from, until) {
            Ok(message) => return Ok(message),
            Err(Some(failure)) => failure,
            Err(None) => {
                let failure = match self.inbox.state.lock().left.contains(&from) {
                    true => Failure::Left { ranks: vec![from] },
                    false => Failure::Deadline { missing: vec![from], waited: self.deadline },
                };
                self.fail(failure);
                // Messages come by way of rank 0, which answers unless it is the late one itself.
                self.failure().unwrap_or(Failure::Deadline { missing: vec![0], waited: self.deadline })
            }
        };
        Err(Error::Failed { call: call.to_string(), failure })
    }

    fn fail(&self, failure: Failure) {
        {
            let mut state = self.inbox.state.lock();
            if state.closed.is_some() {
                // Rank 0 has left and cannot be asked.
                let first = state.fail(failure);
                drop(state);
                return self.inbox.report(first);
            }
            state.own_failure.get_or_insert_with(|| failure.clone());
        }
        // If sending fails, closing the connection tells rank 0.
        if self.send(&Frame::Fail(failure), Until::after(WORD.min(self.deadline))).is_err() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    fn failure(&self) -> Option<Failure> {
        let until = Instant::now() + self.deadline.min(WORD);
        let mut state = self.inbox.state.lock();
        while state.own_failure.is_some() && state.failure.is_none() {
            if self.inbox.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.failure.clone()
    }

    #[cfg(feature = "cuda")]
    fn name_call(&self, _number: u64, _name: &str) {}

    #[cfg(feature = "cuda")]
    fn tell_calls(&self, numbers: &[u64]) -> bool {
        let Some(mut out) = self.out.try_lock() else { return false };
        out.get_mut().until = Until::after(self.deadline);
        if wire::send(&mut *out, &Frame::Calls(numbers.to_vec())).is_err() {
            // A frame that is sent in part is the end, which the inbox detects.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        true
    }

    #[cfg(feature = "cuda")]
    fn left(&self) -> Vec<usize> {
        self.inbox.state.lock().left.clone()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if thread::panicking() {
            self.poison("its thread panicked");
        }
        let patience = GOODBYE.min(self.deadline);
        let _ = self.send(&Frame::Left(vec![self.rank]), Until::after(patience));
        // Keep reading until rank 0 has read this and closes the connection, which ends the inbox's thread. Closing a connection with
        // unread bytes would reset it, and the message might be lost.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.inbox.drain(patience);
    }
}
