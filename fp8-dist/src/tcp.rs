//! Ranks that are processes, connected to rank 0 by TCP.
//!
//! Rank 0 holds the table on which all messages come together; two threads for each other rank carry its messages there
//! and the outcome back. So what a group of processes computes and reports is what a group of threads does: sums in rank
//! order, one failure for all. A connection that closes before its rank has left is a failure at once.

use crate::local::check_options;
use crate::meeting::{All, Meeting, News, Seat};
use crate::member::{Exchange, Member};
use crate::message::{Message, Part};
use crate::rendezvous::{self, Met};
use crate::wire::{self, Frame};
use crate::{Environment, Error, Failure, ProcessGroup, Result};
use parking_lot::{Condvar, Mutex};
use std::io::{self, BufReader, BufWriter};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A group of processes; this one's handle. `id` is the group's part in the job ("dp"); `deadline` is how long a rank
/// waits for the others, first for them to come and then in each collective, with the time that the data take.
///
/// Rank 0 listens where `environment` says; see [`Environment`]. All traffic goes through it and is neither encrypted nor
/// authenticated: for the networks that other training traffic is on.
///
/// ```no_run
/// use fp8_dist::{Environment, ReduceOp, tcp};
/// use fp8_kernels::{Device, Tensor};
/// use std::time::Duration;
///
/// let group = tcp("dp", &Environment::read()?, Duration::from_secs(60))?; // under torchrun
/// let x = Tensor::scalar(1.0, &Device::cpu())?;
/// assert_eq!(group.all_reduce("ranks", &x, ReduceOp::Sum)?.item()?, group.world_size() as f32);
/// # Ok::<(), fp8_dist::Error>(())
/// ```
///
/// # Errors
/// A deadline of 0, an environment that contradicts itself, no port to listen at; on every rank: a rank that does not come
/// in time, or with another world size, id or version.
pub fn tcp(id: &str, environment: &Environment, deadline: Duration) -> Result<Arc<dyn ProcessGroup>> {
    Ok(match connect(id, environment, deadline)? {
        Connected::Host(host) => Arc::new(Member::new(host)),
        Connected::Guest(guest) => Arc::new(Member::new(guest)),
    })
}

/// A rank's end of a group of processes.
pub(crate) enum Connected {
    Host(Seat),
    Guest(Guest),
}

pub(crate) fn connect(id: &str, environment: &Environment, deadline: Duration) -> Result<Connected> {
    check_options(id, environment.world_size, deadline)?;
    let network =
        |source| Error::Network { id: id.to_owned(), what: "using a connection".to_owned(), source };
    match rendezvous::meet(id, environment, deadline)? {
        Met::Host(guests) => host(id, guests, deadline).map(Connected::Host).map_err(network),
        Met::Guest(stream) => {
            Guest::new(id, environment, deadline, stream).map(Connected::Guest).map_err(network)
        }
    }
}

/// Rank 0's end: its own seat, and the couriers of the others.
fn host(id: &str, guests: Vec<TcpStream>, deadline: Duration) -> io::Result<Seat> {
    seat_all(id, guests, deadline, employ)
}

/// With `employ`, which starts a rank's couriers. Where that fails all ranks are told, those that have couriers by them.
fn seat_all(
    id: &str,
    guests: Vec<TcpStream>,
    deadline: Duration,
    employ: impl Fn(&Arc<Meeting>, usize, &TcpStream, Duration) -> io::Result<()>,
) -> io::Result<Seat> {
    let world_size = guests.len() + 1;
    let meeting = Meeting::new(world_size, deadline, |rank| rank > 0);
    for (rank, stream) in (1..).zip(&guests) {
        if let Err(error) = employ(&meeting, rank, stream, deadline) {
            let reason = format!("it cannot use its connection to rank {rank}: {error}");
            let failure = Failure::GaveUp { rank: 0, reason };
            meeting.fail(failure.clone());
            for (rank, mut stream) in (1..).zip(&guests).skip(rank - 1) {
                meeting.unlink(rank);
                let _ = wire::send(&mut stream, &Frame::Fail(failure.clone()));
                let _ = stream.shutdown(Shutdown::Write);
            }
            meeting.flush(deadline.min(Duration::from_secs(5)));
            return Err(error);
        }
    }
    Ok(Seat::new(id, 0, world_size, meeting))
}

fn employ(meeting: &Arc<Meeting>, rank: usize, stream: &TcpStream, deadline: Duration) -> io::Result<()> {
    prepare(stream, deadline)?;
    let (incoming, outgoing) = (stream.try_clone()?, stream.try_clone()?);
    let (table, news) = (meeting.clone(), meeting.clone());
    spawn("fp8-dist from", rank, move || bring_in(&table, rank, incoming))?;
    spawn("fp8-dist to", rank, move || carry_out(&news, rank, outgoing))
}

fn prepare(stream: &TcpStream, deadline: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    // One who does not read must not hold up the others for ever.
    stream.set_write_timeout(Some(deadline.min(Duration::from_secs(86_400))))
}

fn spawn(what: &str, rank: usize, f: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(format!("{what} {rank}")).spawn(f).map(drop)
}

/// Puts what a rank sends on the table, until it leaves.
fn bring_in(meeting: &Meeting, rank: usize, stream: TcpStream) {
    let mut stream = BufReader::new(stream);
    loop {
        let reason = match wire::receive(&mut stream) {
            Ok(Frame::Bring(message)) => match meeting.bring(rank, message) {
                // A message that comes too late for a group that has failed is answered by the failure.
                Ok(true) | Err(_) => continue,
                Ok(false) => "it sent two messages for one exchange".to_owned(),
            },
            Ok(Frame::Fail(failure)) => {
                meeting.fail(failure);
                continue;
            }
            Ok(Frame::Left(_)) => {
                meeting.leave(rank);
                break;
            }
            Ok(Frame::Complete(_) | Frame::Welcome) => "it sent what only rank 0 sends".to_owned(),
            Err(error) => closed(&error),
        };
        meeting.fail(Failure::Lost { rank, reason });
        break;
    }
    // No more is read: what it may still send shall not fill up anything.
    let _ = stream.get_ref().shutdown(Shutdown::Read);
    meeting.unlink(rank);
}

/// Tells a rank what it is to know, until there is nothing more.
fn carry_out(meeting: &Meeting, rank: usize, stream: TcpStream) {
    let mut out = BufWriter::with_capacity(1 << 16, stream);
    loop {
        let sent = match meeting.news(rank) {
            News::Complete(all) => wire::send_all(&mut out, &all),
            News::Failed(failure) => wire::send(&mut out, &Frame::Fail(failure)),
            News::Left(ranks) => wire::send(&mut out, &Frame::Left(ranks)),
            News::End => break,
        };
        meeting.delivered(rank);
        if let Err(error) = sent {
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
                meeting.fail(Failure::Lost { rank, reason: closed(&error) });
            }
            // A closed connection: whether its rank has left or is lost stands in what it sent last, which the other
            // thread reads.
            let _ = out.get_ref().shutdown(Shutdown::Write);
            meeting.unlink(rank);
            break;
        }
    }
}

fn closed(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::InvalidData => format!("{error}"),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it takes no data".to_owned(),
        _ => format!("its connection closed, as when its process ends ({error})"),
    }
}

/// The end of every other rank. Dropped with the last handle.
#[derive(Debug)]
pub(crate) struct Guest {
    id: String,
    rank: usize,
    world_size: usize,
    deadline: Duration,
    /// Threads that share a handle come one after the other.
    turn: Mutex<()>,
    out: Mutex<BufWriter<TcpStream>>,
    inbox: Arc<Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
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
    fn new(id: &str, environment: &Environment, deadline: Duration, stream: TcpStream) -> io::Result<Self> {
        prepare(&stream, deadline)?;
        let inbox = Arc::new(Inbox::default());
        let (incoming, received) = (stream.try_clone()?, inbox.clone());
        spawn("fp8-dist inbox of", environment.rank, move || received.fill(incoming))?;
        Ok(Self {
            id: id.to_owned(),
            rank: environment.rank,
            world_size: environment.world_size,
            deadline,
            turn: Mutex::new(()),
            out: Mutex::new(BufWriter::with_capacity(1 << 16, stream)),
            inbox,
        })
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        wire::send(&mut *self.out.lock(), frame)
    }

    /// Rank 0 keeps the deadline; this is for its word to arrive, and for a rank 0 that says nothing.
    fn patience(&self) -> Duration {
        let grace = (self.deadline / 4).clamp(Duration::from_millis(100), Duration::from_secs(2));
        self.deadline.saturating_add(grace)
    }
}

impl Inbox {
    /// Takes in what rank 0 sends, until the connection closes.
    fn fill(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        loop {
            let frame = wire::receive(&mut stream);
            let mut state = self.state.lock();
            match frame {
                Ok(Frame::Complete(parts)) => state.reply = Some(parts),
                Ok(Frame::Fail(failure)) => drop(state.failure.get_or_insert(failure)),
                Ok(Frame::Left(ranks)) => state.left = ranks,
                Ok(Frame::Bring(_) | Frame::Welcome) | Err(_) => {
                    let reason =
                        frame.err().map_or("it sent what only other ranks send".to_owned(), |e| closed(&e));
                    if state.left.contains(&0) {
                        state.closed = Some(Failure::Left { ranks: vec![0] });
                        state.failure = state.failure.take().or(state.own_failure.take());
                    } else {
                        state.failure.get_or_insert(Failure::Lost { rank: 0, reason });
                    }
                    state.is_at_end = true;
                    drop(state);
                    self.changed.notify_all();
                    return;
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

    /// What rank 0 says next, at most for `patience`.
    fn outcome(&self, patience: Duration) -> Option<Result<Vec<Option<Part>>, Failure>> {
        let until = Instant::now().checked_add(patience);
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
        let _turn = self.turn.lock(); // whoever has it keeps the deadline, too
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
        // Where it cannot be sent the connection is closed, which the inbox finds out.
        let sent = self.send(&Frame::Bring(message));
        let patience = if sent.is_ok() { self.patience() } else { Duration::from_secs(1).min(self.deadline) };
        match self.inbox.outcome(patience) {
            Some(Ok(parts)) => {
                let message = |part| Message { call: call.clone(), names: Vec::new(), part };
                Ok(Arc::new(parts.into_iter().map(message).collect()))
            }
            Some(Err(failure)) => Err(Error::Failed { call: call.to_string(), failure }),
            None => {
                let failure = match sent {
                    Ok(()) => Failure::Deadline { missing: vec![0], waited: self.deadline },
                    Err(error) => Failure::Lost { rank: 0, reason: closed(&error) },
                };
                let failure = self.inbox.state.lock().failure.get_or_insert(failure).clone();
                let _ = self.out.lock().get_ref().shutdown(Shutdown::Both);
                Err(Error::Failed { call: call.to_string(), failure })
            }
        }
    }

    fn fail(&self, failure: Failure) {
        {
            let mut state = self.inbox.state.lock();
            if state.closed.is_some() {
                // Nobody is left to ask.
                state.failure.get_or_insert(failure);
                return;
            }
            state.own_failure.get_or_insert_with(|| failure.clone());
        }
        // Where it cannot be sent the connection is closed, which tells rank 0.
        let _ = self.send(&Frame::Fail(failure));
    }

    fn failure(&self) -> Option<Failure> {
        let until = Instant::now() + self.deadline.min(Duration::from_secs(2));
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
        let _ = self.send(&Frame::Left(vec![self.rank]));
        // What rank 0 is still sending is read until it has read this and closes the connection, which ends the inbox's
        // thread: a connection closed with bytes unread is reset, and that might take the last word along.
        let _ = self.out.lock().get_ref().shutdown(Shutdown::Write);
        self.inbox.drain(Duration::from_secs(1).min(self.deadline));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_rank_0_that_cannot_start_its_couriers_tells_all() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || {
            let guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            guest.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            (listener.accept().unwrap().0, guest)
        };
        let (hosts, guests): (Vec<_>, Vec<_>) = (0..3).map(|_| pair()).unzip();
        let start = Instant::now();
        let error = seat_all("dp", hosts, Duration::from_secs(60), |meeting, rank, stream, deadline| {
            if rank == 2 {
                return Err(io::Error::other("no more threads"));
            }
            employ(meeting, rank, stream, deadline)
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "no more threads");
        for mut guest in guests {
            let frame = wire::receive(&mut guest).unwrap();
            let reason = "it cannot use its connection to rank 2: no more threads".to_owned();
            assert!(
                matches!(&frame, Frame::Fail(f) if *f == Failure::GaveUp { rank: 0, reason }),
                "{frame:?}"
            );
        }
        assert!(start.elapsed() < Duration::from_secs(4), "nobody is waited for in vain");
    }
}
