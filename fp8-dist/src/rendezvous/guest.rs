//! The part of all ranks except rank 0: they call all ports of the range at once until a rank 0 of their group answers.

use super::call::{Answer, Call};
use super::hello::differ;
use super::line::Line;
use super::meeting::Meeting;
use super::protocol::{GRACE, TICK, VERSION, VERSION_NAME};
use crate::timed::{Timed, is_late, keep_alive};
use crate::wire::{self, Frame};
use crate::{Failure, Result};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// The delay before a port is called again.
const RETRY: Duration = Duration::from_millis(20);
/// The maximum number of times that the delay doubles if the listener does not speak the protocol. The listener may be
/// torchrun's store, which may log a warning for each connection.
const DOUBLINGS: u32 = 6;
/// The interval of name lookups. The name of a machine that is just starting may not be known yet.
const LOOKUP: Duration = Duration::from_millis(500);

/// An address where rank 0 may listen.
struct Target {
    address: SocketAddr,
    call: Option<Call>,
    /// The time of the next call to the address.
    next: Instant,
    /// The number of calls in a row that failed because the listener does not speak the protocol, at most `DOUBLINGS`.
    spoiled: u32,
}

pub(super) fn guest(meeting: &Meeting<'_>) -> Result<TcpStream> {
    let names = look_up(meeting)?;
    let mut targets: Vec<Target> = Vec::new();
    let mut unknown = None;
    // Why a rank 0 that answered is not this group's, and whether it has proved that it knows the token.
    let mut elsewhere: Option<(Failure, bool)> = None;
    let mut newest = None;
    loop {
        for found in names.try_iter() {
            match found {
                Ok(found) => add(&mut targets, &found, meeting),
                Err(error) => unknown = Some(error),
            }
        }
        for target in &mut targets {
            let (answer, address) = (target.advance(meeting), target.address);
            let (failure, is_known) = match answer {
                Ok(Answer::None | Answer::Seated) => continue,
                Ok(Answer::Rank0(hello, line)) => match hello.difference(&meeting.own) {
                    None if hello.rank == 0 => return await_welcome(meeting, line),
                    None => continue,
                    Some(failure) => (failure, true),
                },
                Ok(Answer::Version(version)) => {
                    (differ(VERSION_NAME, meeting.environment.rank, &VERSION, &version), false)
                }
                Ok(Answer::Token) => (Failure::Token { rank: meeting.environment.rank }, false),
                Err(error) => {
                    newest = Some(format!("{address}: {error}"));
                    continue;
                }
            };
            if is_known || elsewhere.as_ref().is_none_or(|(_, is_known)| !is_known) {
                elsewhere = Some((failure, is_known));
            }
        }
        if meeting.is_over() {
            break;
        }
        thread::sleep(TICK);
    }
    if let Some((failure, _)) = elsewhere {
        return Err(meeting.failed(failure));
    }
    if targets.is_empty() {
        let error = unknown.unwrap_or_else(|| io::ErrorKind::TimedOut.into());
        return Err(meeting.unknown_host(error));
    }
    let Some(newest) = newest else {
        return Err(meeting.failed(Failure::Deadline { missing: vec![0], waited: meeting.deadline }));
    };
    let what = format!(
        "looking for rank 0 at {}, ports {} to {}, for {:?}; at {newest}",
        meeting.environment.master_addr,
        meeting.environment.master_port,
        meeting.ports().last().unwrap_or_default(),
        meeting.deadline,
    );
    Err(meeting.network(what, io::Error::from(io::ErrorKind::TimedOut)))
}

impl Target {
    fn advance(&mut self, meeting: &Meeting<'_>) -> io::Result<Answer> {
        let call = match &mut self.call {
            Some(call) => call,
            None if Instant::now() < self.next => return Ok(Answer::None),
            None => {
                self.next = Instant::now() + RETRY;
                self.call.insert(Call::new(self.address, meeting.until)?)
            }
        };
        let answer = call.advance(&meeting.own, &meeting.environment.token);
        if !matches!(answer, Ok(Answer::None)) {
            let is_refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            let is_spoiled = answer.as_ref().is_err_and(|error| !is_refused(error));
            self.spoiled = if is_spoiled { (self.spoiled + 1).min(DOUBLINGS) } else { 0 };
            self.call = None;
            self.next = Instant::now() + RETRY * (1 << self.spoiled);
        }
        answer
    }
}

fn add(targets: &mut Vec<Target>, found: &[IpAddr], meeting: &Meeting<'_>) {
    for &ip in found {
        for address in meeting.ports().map(|port| SocketAddr::new(ip, port)) {
            if targets.iter().all(|target| target.address != address) {
                targets.push(Target { address, call: None, next: Instant::now(), spoiled: 0 });
            }
        }
    }
}

/// Returns the addresses of `MASTER_ADDR`. A name is looked up by a thread, because a lookup may take long and has no deadline.
fn look_up(meeting: &Meeting<'_>) -> Result<Receiver<io::Result<Vec<IpAddr>>>> {
    let (send, names) = mpsc::channel();
    let host = meeting.environment.master_addr.clone();
    if let Ok(ip) = host.parse() {
        let _ = send.send(Ok(vec![ip]));
        return Ok(names);
    }
    let ask = move || {
        loop {
            let found = (host.as_str(), 0).to_socket_addrs().map(|all| all.map(|one| one.ip()).collect());
            if send.send(found).is_err() {
                return; // the rank has joined, or has failed
            }
            thread::sleep(LOOKUP);
        }
    };
    let thread = thread::Builder::new().name("fp8-dist lookup".to_owned()).spawn(ask);
    thread.map_err(|error| meeting.network("starting a thread".to_owned(), error))?;
    Ok(names)
}

/// Waits for rank 0's welcome. Rank 0 enforces the deadline; the grace period lets its message arrive.
fn await_welcome(meeting: &Meeting<'_>, line: Line) -> Result<TcpStream> {
    let lost = |error: io::Error| {
        let reason = format!("its connection broke before all ranks had come: {error}");
        let failure = match is_late(&error) {
            true => Failure::Deadline { missing: vec![0], waited: meeting.deadline },
            false => Failure::Lost { rank: 0, reason },
        };
        meeting.failed(failure)
    };
    let stream = line.into_stream().map_err(lost)?;
    let _ = keep_alive(&stream);
    let mut stream = Timed::new(stream, meeting.until.plus(GRACE));
    match wire::receive(&mut stream).map_err(lost)? {
        Frame::Welcome => Ok(stream.stream),
        Frame::Fail(failure) => Err(meeting.failed(failure)),
        _ => Err(lost(io::Error::from(io::ErrorKind::InvalidData))),
    }
}
