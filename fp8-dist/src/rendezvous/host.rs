//! Rank 0's part: one thread serves all connections, seats the ranks, and looks for another job with the same settings.

use super::hello::{Hello, differ};
use super::line::Line;
use super::meeting::Meeting;
use super::proof::Nonce;
use super::protocol::{PATIENCE, TICK, VERSION, VERSION_NAME};
use super::search::Search;
use super::visit::{Visit, Visitor};
use crate::timed::{Timed, Until, keep_alive};
use crate::wire::{self, Frame};
use crate::{Error, Failure, Result};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The number of unknown connections that are served at once, unless twice the world size is larger.
const STRANGERS: usize = 64;
/// The interval at which the connections of seated ranks are checked.
const GLANCE: Duration = Duration::from_millis(50);
/// The time that rank 0 of a job without a run id waits for the rank 0 of another job after all ranks have arrived. It
/// waits at most half of the deadline.
const SETTLE: Duration = Duration::from_secs(1);
/// The time for which rank 0 reports its failure to ranks that still arrive.
const LINGER: Duration = Duration::from_secs(1);

pub(super) fn host(meeting: &Meeting<'_>, listener: Option<TcpListener>) -> Result<Vec<TcpStream>> {
    expect_here(meeting)?;
    let listener = match listener.map_or_else(|| listen(meeting), |listener| open(meeting, listener)) {
        Ok(listener) => listener,
        // All ports are in use, perhaps by a job with the same settings, which must learn of this one.
        Err(error) => return Err(if twin_elsewhere(meeting) { second_job(meeting) } else { error }),
    };
    let own = listener.local_addr().map_err(|error| meeting.network("listening".to_owned(), error))?;
    let others = meeting.ports().filter(|&port| port != own.port());
    let settle = match meeting.environment.names_one_run() {
        true => Duration::ZERO,
        false => SETTLE.min(meeting.deadline / 2),
    };
    let host = Host {
        meeting,
        listener,
        visits: VecDeque::new(),
        search: Search::new(own.ip(), others, meeting.until),
        seats: (1..meeting.environment.world_size).map(|_| None).collect(),
        told: Vec::new(),
        elsewhere: None,
        settle,
        settled: Until::after(settle),
        glance: Until::after(GLANCE),
    };
    host.run()
}

fn second_job(meeting: &Meeting<'_>) -> Error {
    meeting.failed(Failure::SecondJob { port: meeting.environment.master_port })
}

/// Returns true if a rank 0 with the same settings listens on one of the ports.
fn twin_elsewhere(meeting: &Meeting<'_>) -> bool {
    let ip = meeting.environment.master_addr.parse().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut search = Search::new(ip, meeting.ports(), meeting.until);
    while !search.is_over() {
        if search.finds_twin(&meeting.own, &meeting.environment.token) {
            return true;
        }
        thread::sleep(TICK);
    }
    false
}

/// The longest wait for the addresses of a name, which is only a check.
const LOOKUP: Duration = Duration::from_secs(1);

/// Returns an error if no address of `MASTER_ADDR` is one of this machine: the other ranks would look for rank 0 elsewhere.
fn expect_here(meeting: &Meeting<'_>) -> Result<()> {
    let host = meeting.environment.master_addr.clone();
    let (send, found) = mpsc::channel();
    let look_up = move || {
        let addresses = (host.as_str(), 0).to_socket_addrs().map(|all| all.collect::<Vec<_>>());
        let _ = send.send(addresses.unwrap_or_default());
    };
    // A name that is unknown here, or not known in time, may be known to the others.
    let started = thread::Builder::new().name("fp8-dist lookup".to_owned()).spawn(look_up);
    let addresses = started
        .ok()
        .and_then(|_| found.recv_timeout(LOOKUP.min(meeting.deadline / 2)).ok())
        .unwrap_or_default();
    let is_elsewhere = |address: &SocketAddr| {
        UdpSocket::bind(address).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
    };
    if addresses.is_empty() || !addresses.iter().all(is_elsewhere) {
        return Ok(());
    }
    let value = Some(meeting.environment.master_addr.clone());
    let remedy = "rank 0 is this process, and its machine does not have this address: set MASTER_ADDR to one that it has, \
                  or start rank 0 there; if others reach it by an address that it does not know, set 0.0.0.0 for rank 0";
    Err(Error::Environment { name: "MASTER_ADDR", value, remedy: remedy.to_owned() })
}

/// Listens at `MASTER_ADDR` if it is an address of this machine, otherwise at all addresses. A name is not used, because a machine
/// may resolve its own name to a loopback address, where other machines cannot reach it.
fn listen(meeting: &Meeting<'_>) -> Result<TcpListener> {
    let host = meeting.environment.master_addr.as_str();
    let mut newest = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for port in meeting.ports() {
        let is_address = host == "localhost" || host.parse::<IpAddr>().is_ok();
        let mut addresses: Vec<SocketAddr> = match is_address {
            true => (host, port).to_socket_addrs().map_err(|error| meeting.unknown_host(error))?.collect(),
            false => Vec::new(),
        };
        addresses.extend([SocketAddr::from(([0; 16], port)), SocketAddr::from(([0; 4], port))]);
        for address in addresses {
            match TcpListener::bind(address) {
                Ok(listener) => return open(meeting, listener),
                Err(error) => {
                    let is_taken = error.kind() == io::ErrorKind::AddrInUse;
                    newest = error;
                    if is_taken {
                        break; // the next port
                    }
                }
            }
        }
    }
    let first = meeting.environment.master_port;
    let last = meeting.ports().last().unwrap_or(first);
    Err(meeting.network(format!("listening at {host}, ports {first} to {last}"), newest))
}

/// Makes a listener one that does not wait.
fn open(meeting: &Meeting<'_>, listener: TcpListener) -> Result<TcpListener> {
    match listener.set_nonblocking(true) {
        Ok(()) => Ok(listener),
        Err(error) => Err(meeting.network("listening".to_owned(), error)),
    }
}

struct Host<'a> {
    meeting: &'a Meeting<'a>,
    listener: TcpListener,
    /// Connections of unknown processes, and those to which the last message has not been sent; the oldest first.
    visits: VecDeque<Visit>,
    search: Search,
    /// The seats of ranks 1, 2, ….
    seats: Vec<Option<Seat>>,
    /// Processes without a seat that have been told of a failure.
    told: Vec<Line>,
    elsewhere: Option<Elsewhere>,
    /// The time that the group waits after the last rank has arrived. Another job with the same settings may still
    /// appear, and that rank may belong to it.
    settle: Duration,
    settled: Until,
    glance: Until,
}

struct Seat {
    line: Line,
    attempt: [u8; 16],
}

/// Why a rank that connected did not join. Reported if no other process takes its place.
struct Elsewhere {
    rank: usize,
    failure: Failure,
    /// Whether the rank has proved that it knows the token. Such a reason is not replaced by one of an unknown process.
    is_known: bool,
}

impl Host<'_> {
    fn run(mut self) -> Result<Vec<TcpStream>> {
        loop {
            self.accept();
            let mut failure = self.talk(None);
            if self.search.finds_twin(&self.meeting.own, &self.meeting.environment.token) {
                failure = failure.or(Some(self.second_job()));
            }
            self.watch();
            if failure.is_none() && self.is_complete() {
                return self.welcome();
            }
            // If all ranks have arrived, the group is complete in a moment.
            if failure.is_none() && self.meeting.is_over() && !self.missing().is_empty() {
                failure = Some(self.late());
            }
            if let Some(failure) = failure {
                return Err(self.end(failure));
            }
            thread::sleep(TICK);
        }
    }

    const fn second_job(&self) -> Failure {
        Failure::SecondJob { port: self.meeting.environment.master_port }
    }

    fn missing(&self) -> Vec<usize> {
        (1..).zip(&self.seats).filter(|(_, seat)| seat.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Accepts pending connections. Above the limit, each new one replaces the oldest.
    fn accept(&mut self) {
        let most = STRANGERS.max(2 * self.meeting.environment.world_size);
        for _ in 0..most {
            // On an error, no connection is pending, one has closed again, or too many files are open at the moment.
            let Ok((stream, _)) = self.listener.accept() else { return };
            let Ok(visit) = Visit::new(stream) else { continue };
            if self.visits.len() >= most {
                self.visits.pop_front();
            }
            self.visits.push_back(visit);
        }
    }

    /// Advances all conversations and returns the first failure. `ending` is sent to every rank of this group that still arrives.
    fn talk(&mut self, ending: Option<&Failure>) -> Option<Failure> {
        let mut failure = None;
        for _ in 0..self.visits.len() {
            let Some(mut visit) = self.visits.pop_front() else { break };
            match visit.advance(&self.meeting.environment.token) {
                Ok(Visitor::Unknown) => self.visits.push_back(visit),
                Ok(Visitor::Version(rank, version)) => {
                    self.note(rank, false, |rank| differ(VERSION_NAME, rank, &version, &VERSION));
                    self.visits.push_back(visit);
                }
                Ok(Visitor::Token(rank)) => {
                    self.note(rank, false, |rank| Failure::Token { rank });
                    self.visits.push_back(visit);
                }
                Ok(Visitor::Known(hello, nonce)) => {
                    // An error concerns this connection only; its rank will connect again.
                    let found = self.receive(visit, &hello, nonce, ending).unwrap_or(None);
                    failure = failure.or(found);
                }
                Err(_) => {}
            }
        }
        failure
    }

    fn note(&mut self, rank: u64, is_known: bool, failure: impl FnOnce(usize) -> Failure) {
        let rank = usize::try_from(rank).unwrap_or(usize::MAX);
        if is_known || self.elsewhere.as_ref().is_none_or(|elsewhere| !elsewhere.is_known) {
            self.elsewhere = Some(Elsewhere { rank, failure: failure(rank), is_known });
        }
    }

    /// Seats a process that knows the token, or returns why it cannot.
    fn receive(
        &mut self,
        mut visit: Visit,
        hello: &Hello,
        nonce: Nonce,
        ending: Option<&Failure>,
    ) -> io::Result<Option<Failure>> {
        let own = &self.meeting.own;
        let answer = |visit: &mut Visit| visit.answer(hello, nonce, own, &self.meeting.environment.token);
        if own.is_twin(hello) {
            answer(&mut visit)?;
            self.told.push(visit.into_line());
            return Ok(Some(self.second_job()));
        }
        if let Some(failure) = own.difference(hello) {
            // It may belong to another group, of this job or another one.
            answer(&mut visit)?;
            self.visits.push_back(visit);
            self.note(hello.rank, true, |_| failure);
            return Ok(None);
        }
        let index = usize::try_from(hello.rank).ok().and_then(|rank| rank.checked_sub(1));
        let Some(seat) = index.and_then(|index| self.seats.get_mut(index)) else { return Ok(None) };
        let live = seat.as_ref().filter(|seat| seat.line.is_alive());
        if ending.is_none() && live.is_some_and(|seat| seat.attempt == hello.attempt) {
            // The same process has connected by another address.
            visit.say_seated()?;
            self.visits.push_back(visit);
            return Ok(None);
        }
        answer(&mut visit)?;
        let mut line = visit.into_line();
        let is_live = live.is_some();
        if let Some(failure) = ending {
            tell(&mut line, failure);
            self.told.push(line);
            return Ok(None);
        }
        if is_live {
            self.told.push(line);
            return Ok(Some(Failure::Twice { rank: index.unwrap_or_default() + 1 }));
        }
        let _ = keep_alive(line.stream());
        tracing::info!(
            group = self.meeting.id,
            rank = hello.rank,
            world_size = self.meeting.environment.world_size,
            address = line.stream().peer_addr().ok().map(tracing::field::display),
            "rank joined"
        );
        *seat = Some(Seat { line, attempt: hello.attempt });
        self.settled = Until::after(self.settle);
        Ok(None)
    }

    /// Frees the seats of closed connections, so that the ranks can connect again.
    fn watch(&mut self) {
        for seat in &mut self.seats {
            if let Some(Seat { line, .. }) = seat
                && !line.is_flushed()
                && (line.flush().is_err() || line.is_late())
            {
                *seat = None;
            }
        }
        if self.glance.is_past() {
            self.glance = Until::after(GLANCE);
            self.free();
        }
    }

    fn free(&mut self) {
        for seat in &mut self.seats {
            seat.take_if(|seat| !seat.line.is_alive());
        }
    }

    fn is_complete(&mut self) -> bool {
        let all = |seats: &[Option<Seat>]| seats.iter().flatten().count() == seats.len();
        let is_settled = self.settled.is_past() || self.meeting.until.is_past();
        if !all(&self.seats) || !self.search.is_over() || !is_settled {
            return false;
        }
        self.free();
        all(&self.seats) && self.seats.iter().flatten().all(|seat| seat.line.is_flushed())
    }

    fn welcome(self) -> Result<Vec<TcpStream>> {
        let meeting = self.meeting;
        let streams = self.seats.into_iter().flatten().map(|seat| seat.line.into_stream());
        let streams = streams.collect::<io::Result<Vec<_>>>();
        let streams = streams.map_err(|error| meeting.network("using a connection".to_owned(), error))?;
        let until = Until::after(PATIENCE);
        let welcome = |stream| {
            let mut stream = Timed::new(stream, until);
            // The first exchange detects a rank that is lost by now.
            let _ = wire::send(&mut stream, &Frame::Welcome);
            stream.stream
        };
        Ok(streams.into_iter().map(welcome).collect())
    }

    /// Returns the failure at the deadline: which ranks are missing, or why.
    fn late(&mut self) -> Failure {
        let missing = self.missing();
        // If its place is taken, the process did not belong to this group.
        match self.elsewhere.take().filter(|elsewhere| missing.contains(&elsewhere.rank)) {
            Some(elsewhere) => elsewhere.failure,
            None => Failure::Deadline { missing, waited: self.meeting.deadline },
        }
    }

    /// Reports the failure to all ranks that have arrived or still arrive.
    fn end(mut self, failure: Failure) -> Error {
        for line in self.seats.iter_mut().flatten().map(|seat| &mut seat.line).chain(&mut self.told) {
            tell(line, &failure);
        }
        // The number of ranks of a second job that will still arrive is unknown.
        let linger = match failure {
            Failure::SecondJob { .. } => Until::after(LINGER),
            _ => self.meeting.until.within(LINGER),
        };
        let awaited = match failure {
            Failure::SecondJob { .. } => usize::MAX,
            _ => self.missing().len() + self.told.len(),
        };
        while self.told.len() < awaited && !linger.is_past() {
            self.accept();
            let _ = self.talk(Some(&failure));
            for line in self.seats.iter_mut().flatten().map(|seat| &mut seat.line).chain(&mut self.told) {
                let _ = line.flush();
            }
            thread::sleep(TICK);
        }
        self.meeting.failed(failure)
    }
}

/// Tells a connected process why the group cannot form.
fn tell(line: &mut Line, failure: &Failure) {
    let mut frame = Vec::new();
    if wire::send(&mut frame, &Frame::Fail(failure.clone())).is_ok() {
        line.say(&frame);
        // Whatever the system does not accept now is sent while rank 0 lingers.
        let _ = line.flush();
    }
}
