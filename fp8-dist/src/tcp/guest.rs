//! The end of every rank but rank 0: a thread reads what rank 0 sends into an inbox.

use super::{GOODBYE, closed, prepare, spawn};
use crate::meeting::All;
use crate::member::Exchange;
use crate::message::{Message, Part};
use crate::timed::{Timed, Until, is_late};
use crate::wire::{self, Frame};
use crate::{Environment, Error, Failure, Result, events};
use parking_lot::{Condvar, Mutex};
use std::io::{self, BufReader, BufWriter};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a rank that says that it gives up tries to, and waits for what rank 0 makes of it.
const WORD: Duration = Duration::from_secs(2);

/// The end of every other rank. Dropped with the last handle.
#[derive(Debug)]
pub(crate) struct Guest {
    id: String,
    rank: usize,
    world_size: usize,
    deadline: Duration,
    /// Threads that share a handle come one after the other.
    turn: Mutex<()>,
    out: Mutex<BufWriter<Timed>>,
    /// The connection once more, to close it while another thread is sending.
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
    /// What this rank has told rank 0, whose word on that, or on what came first, is on its way.
    own_failure: Option<Failure>,
    left: Vec<usize>,
    /// The connection was closed by a rank 0 that had left: no failure for one who needs no more of it.
    closed: Option<Failure>,
    /// Nothing more is read.
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

    /// Also waits for another thread that is sending, until then.
    fn send(&self, frame: &Frame, until: Until) -> io::Result<()> {
        let out = match until.instant() {
            Some(instant) => self.out.try_lock_until(instant),
            None => Some(self.out.lock()),
        };
        let mut out = out.ok_or(io::ErrorKind::TimedOut)?;
        out.get_mut().until = until;
        wire::send(&mut *out, frame)
    }

    /// How long an exchange may take, with the time that its data take. Rank 0 keeps the deadline; the rest is for its
    /// word to arrive, and for a rank 0 that says nothing.
    fn patience(&self) -> Duration {
        let grace = (self.deadline / 4).clamp(Duration::from_millis(100), Duration::from_secs(2));
        self.deadline.saturating_add(grace)
    }
}

impl State {
    /// Records a failure. The first one counts and is returned, to be reported.
    fn fail(&mut self, failure: Failure) -> Option<Failure> {
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

    /// Takes in what rank 0 sends, until the connection closes.
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
                Ok(Frame::Bring(_) | Frame::Welcome) | Err(_) => {
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

    /// Waits until nothing more is read, at most for `patience`.
    fn drain(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while !state.is_at_end && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    /// What rank 0 says next, until then.
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
        let poisoned = |failure| Err(Error::Poisoned { call: call.to_string(), failure });
        {
            let state = self.inbox.state.lock();
            if let Some(failure) = state.failure.clone() {
                return poisoned(failure);
            }
            if state.own_failure.is_some() {
                drop(state);
                return poisoned(
                    self.failure().unwrap_or(Failure::Deadline { missing: vec![0], waited: self.deadline }),
                );
            }
        }
        // One for the whole exchange, however slowly rank 0 reads or answers.
        let until = Until::after(self.patience());
        // Where it cannot be sent the connection is closed, which the inbox finds out.
        let sent = self.send(&Frame::Bring(message), until);
        let heard = if sent.is_ok() { until } else { until.within(GOODBYE) };
        match self.inbox.outcome(heard) {
            Some(Ok(parts)) => {
                let message = |part| Message { call: call.clone(), names: Vec::new(), part };
                Ok(Arc::new(parts.into_iter().map(message).collect()))
            }
            Some(Err(failure)) => Err(Error::Failed { call: call.to_string(), failure }),
            None => {
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
                Err(Error::Failed { call: call.to_string(), failure })
            }
        }
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
        // Where it cannot be sent the connection is closed, which tells rank 0.
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
        // What rank 0 is still sending is read until it has read this and closes the connection, which ends the inbox's
        // thread: a connection closed with bytes unread is reset, and that might take the last word along.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.inbox.drain(patience);
    }
}
