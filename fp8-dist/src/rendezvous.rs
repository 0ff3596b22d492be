//! How ranks in processes find each other.
//!
//! Rank 0 listens at the first free port of the [`PORTS`] that begin at `MASTER_PORT`, as long as its group is not
//! complete; the others try these ports in turn until one greets them in this protocol, for this group. So `torchrun` may
//! hold `MASTER_PORT`, and groups of one job may form one after the other or at once. Whoever connects and does not speak
//! the protocol is ignored.
//!
//! Rank 0 sends a greeting: 8 bytes of magic, the version (u32), the group's id. A rank answers with the same, the world
//! size and its rank (u64 each). Rank 0 compares; when all have come it welcomes them, and when one differs, or does not
//! come in time, tells all that have come.

use crate::wire::{self, Frame};
use crate::{Environment, Error, Failure, Result};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// How many ports rank 0 may choose from.
const PORTS: u16 = 16;
const MAGIC: [u8; 8] = *b"fp8-dist";
/// Of the protocol. Elements travel in the sender's byte order: machines of different order speak different versions.
const VERSION: u32 = if cfg!(target_endian = "little") { 1 } else { 1 | 1 << 16 };
/// How long one that connects may take for its first words; more is only waited for from rank 0.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many strangers are heard at once.
const STRANGERS: usize = 64;
const TICK: Duration = Duration::from_millis(2);
const MAX_ID: usize = 4096;

/// A point in time, or none where the clocks do not reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Until(Option<Instant>);

impl Until {
    pub(crate) fn after(deadline: Duration) -> Self {
        Self(Instant::now().checked_add(deadline))
    }

    fn is_past(self) -> bool {
        self.0.is_some_and(|until| until <= Instant::now())
    }

    /// What is left, at most `most` and, as sockets want it, more than nothing.
    fn left(self, most: Duration) -> Duration {
        let left = self.0.map_or(most, |until| until.saturating_duration_since(Instant::now()));
        left.clamp(Duration::from_millis(1), most)
    }
}

/// The connections of a group that is complete.
#[derive(Debug)]
pub(crate) enum Met {
    /// This is rank 0: to ranks 1, 2, ….
    Host(Vec<TcpStream>),
    /// To rank 0.
    Guest(TcpStream),
}

/// Brings the ranks of group `id` together.
pub(crate) fn meet(id: &str, environment: &Environment, deadline: Duration) -> Result<Met> {
    environment.check()?;
    if id.len() > MAX_ID {
        let remedy = "expected at most 4096 bytes";
        return Err(Error::Option { id: id.to_owned(), option: "id", value: id.to_owned(), remedy });
    }
    let meeting = Meeting { id, environment, deadline, until: Until::after(deadline) };
    match environment.rank {
        0 if environment.world_size == 1 => Ok(Met::Host(Vec::new())),
        0 => meeting.host().map(Met::Host),
        _ => meeting.guest().map(Met::Guest),
    }
}

struct Meeting<'a> {
    id: &'a str,
    environment: &'a Environment,
    deadline: Duration,
    until: Until,
}

/// What a rank says of itself.
#[derive(Debug)]
struct Hello {
    version: u32,
    id: String,
    world_size: u64,
    rank: u64,
}

impl Meeting<'_> {
    fn ports(&self) -> impl Iterator<Item = u16> + use<> {
        let first = self.environment.master_port;
        let count = if self.environment.exact_port { 1 } else { PORTS };
        (0..count).filter_map(move |offset| first.checked_add(offset))
    }

    fn network(&self, what: String, source: io::Error) -> Error {
        Error::Network { id: self.id.to_owned(), what, source }
    }

    fn failed(&self, failure: Failure) -> Error {
        Error::Rendezvous { id: self.id.to_owned(), failure }
    }

    fn differ(
        &self,
        property: &str,
        rank: usize,
        value: &dyn ToString,
        other_value: &dyn ToString,
    ) -> Failure {
        let (value, other_value) = (value.to_string(), other_value.to_string());
        Failure::Settings { property: property.to_owned(), rank, value, other: 0, other_value }
    }

    /// Rank 0's part.
    fn host(&self) -> Result<Vec<TcpStream>> {
        let listener = self.listen()?;
        let (come, coming) = mpsc::channel();
        let strangers = Arc::new(AtomicUsize::new(0));
        let mut guests: Vec<Option<TcpStream>> = (1..self.environment.world_size).map(|_| None).collect();
        let mut elsewhere = None;
        let failure = loop {
            self.hear(&listener, &come, &strangers)?;
            if let Some(failure) = self.seat(&coming, &mut guests, &mut elsewhere) {
                break failure;
            }
            if guests.iter().all(Option::is_some) {
                let mut all: Vec<TcpStream> = guests.into_iter().flatten().collect();
                // One that has gone meanwhile is found by the first exchange.
                all.iter_mut().for_each(|guest| drop(wire::send(guest, &Frame::Welcome)));
                return Ok(all);
            }
            if self.until.is_past() {
                let missing = (1..).zip(&guests).filter(|(_, guest)| guest.is_none()).map(|(rank, _)| rank);
                let late = Failure::Deadline { missing: missing.collect(), waited: self.deadline };
                break elsewhere.unwrap_or(late);
            }
            thread::sleep(TICK);
        };
        for guest in guests.iter_mut().flatten() {
            let _ = wire::send(guest, &Frame::Fail(failure.clone()));
        }
        // Those on their way shall hear of it, too.
        let linger = Until::after(self.until.left(PATIENCE / 2));
        let mut missing: Vec<usize> =
            (1..).zip(&guests).filter(|(_, guest)| guest.is_none()).map(|(rank, _)| rank).collect();
        while !missing.is_empty() && !linger.is_past() {
            self.hear(&listener, &come, &strangers)?;
            for (hello, mut stream) in coming.try_iter() {
                let _ = wire::send(&mut stream, &Frame::Fail(failure.clone()));
                missing.retain(|&rank| rank as u64 != hello.rank);
            }
            thread::sleep(TICK);
        }
        Err(self.failed(failure))
    }

    /// At `MASTER_ADDR` if that is an address of this machine, else at all of its addresses.
    fn listen(&self) -> Result<TcpListener> {
        let host = self.environment.master_addr.as_str();
        let mut newest = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for port in self.ports() {
            let mut named: Vec<SocketAddr> = self.resolve(port)?;
            named.extend([SocketAddr::from(([0; 16], port)), SocketAddr::from(([0; 4], port))]);
            for address in named {
                match TcpListener::bind(address) {
                    Ok(listener) => {
                        return match listener.set_nonblocking(true) {
                            Ok(()) => Ok(listener),
                            Err(error) => Err(self.network(format!("listening at {address}"), error)),
                        };
                    }
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
        let first = self.environment.master_port;
        let last = self.ports().last().unwrap_or(first);
        Err(self.network(format!("listening at {host}, ports {first} to {last}"), newest))
    }

    fn resolve(&self, port: u16) -> Result<Vec<SocketAddr>> {
        let host = self.environment.master_addr.as_str();
        let found = (host, port).to_socket_addrs().map(Iterator::collect);
        found.map_err(|error| self.network(format!("looking up MASTER_ADDR={host}"), error))
    }

    /// Accepts who waits, and lets a thread talk to each.
    fn hear(
        &self,
        listener: &TcpListener,
        come: &Sender<(Hello, TcpStream)>,
        strangers: &Arc<AtomicUsize>,
    ) -> Result<()> {
        loop {
            let mut stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // One that has gone again, or too many open files for a moment.
                Err(_) => return Ok(()),
            };
            if strangers.fetch_add(1, Ordering::Relaxed) >= STRANGERS {
                strangers.fetch_sub(1, Ordering::Relaxed);
                continue; // closes it; a rank tries again
            }
            let (come, strangers, id) = (come.clone(), strangers.clone(), self.id.to_owned());
            let patience = self.until.left(PATIENCE);
            let talk = move || {
                if let Ok(hello) = greet(&mut stream, &id, patience) {
                    // Fails where the group is complete or has failed.
                    let _ = come.send((hello, stream));
                }
                strangers.fetch_sub(1, Ordering::Relaxed);
            };
            thread::Builder::new()
                .name("fp8-dist greeting".to_owned())
                .spawn(talk)
                .map_err(|error| self.network("starting a thread".to_owned(), error))?;
        }
    }

    /// Takes in the ranks that have introduced themselves; the first thing that is wrong.
    fn seat(
        &self,
        coming: &Receiver<(Hello, TcpStream)>,
        guests: &mut [Option<TcpStream>],
        elsewhere: &mut Option<Failure>,
    ) -> Option<Failure> {
        while let Ok((hello, mut stream)) = coming.try_recv() {
            let world_size = self.environment.world_size;
            let rank = usize::try_from(hello.rank).unwrap_or(usize::MAX);
            let failure = if hello.version != VERSION {
                self.differ("the version of the protocol", rank, &hello.version, &VERSION)
            } else if hello.id != self.id {
                // Perhaps on its way to another group of this job: known if nobody else comes.
                *elsewhere = Some(self.differ("the group's id", rank, &hello.id, &self.id));
                continue;
            } else if hello.world_size != world_size as u64 {
                self.differ("the world size", rank, &hello.world_size, &world_size)
            } else {
                match rank.checked_sub(1).and_then(|index| guests.get_mut(index)) {
                    Some(guest @ None) => {
                        *guest = Some(stream);
                        continue;
                    }
                    _ => Failure::Twice { rank },
                }
            };
            let _ = wire::send(&mut stream, &Frame::Fail(failure.clone()));
            return Some(failure);
        }
        None
    }

    /// Every other rank's part.
    fn guest(&self) -> Result<TcpStream> {
        let rank = self.environment.rank;
        let mut elsewhere = None;
        let mut newest = None;
        loop {
            for port in self.ports() {
                // Each time anew: names of machines that are just starting may not be known yet.
                let addresses = match self.resolve(port) {
                    Ok(addresses) => addresses,
                    Err(error) if self.until.is_past() => return Err(error),
                    Err(_) => break,
                };
                for address in addresses {
                    match self.introduce(address, &mut elsewhere) {
                        Ok(Some(stream)) => return self.await_welcome(stream),
                        Ok(None) => {}
                        Err(Ok(failure)) => return Err(self.failed(failure)),
                        Err(Err(error)) => newest = Some(format!("{address}: {error}")),
                    }
                }
            }
            if self.until.is_past() {
                let reason = newest.map(|newest| format!("; at {newest}")).unwrap_or_default();
                let late = Failure::Deadline { missing: vec![0], waited: self.deadline };
                return Err(match elsewhere {
                    Some(id) => self.failed(self.differ("the group's id", rank, &self.id, &id)),
                    None if reason.is_empty() => self.failed(late),
                    None => {
                        let what = format!(
                            "looking for rank 0 at {}, ports {} to {}, for {:?}{reason}",
                            self.environment.master_addr,
                            self.environment.master_port,
                            self.ports().last().unwrap_or_default(),
                            self.deadline,
                        );
                        self.network(what, io::Error::from(io::ErrorKind::TimedOut))
                    }
                });
            }
            thread::sleep(TICK * 5);
        }
    }

    /// Speaks to whoever listens there. `None`: not this group's rank 0.
    fn introduce(
        &self,
        address: SocketAddr,
        elsewhere: &mut Option<String>,
    ) -> Result<Option<TcpStream>, Result<Failure, io::Error>> {
        let mut stream = TcpStream::connect_timeout(&address, self.until.left(PATIENCE)).map_err(Err)?;
        let patience = self.until.left(PATIENCE / 4);
        let mut talk = || {
            stream.set_read_timeout(Some(patience))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let greeting = read_greeting(&mut stream)?;
            let mut hello = introduction(self.id);
            hello.extend((self.environment.world_size as u64).to_le_bytes());
            hello.extend((self.environment.rank as u64).to_le_bytes());
            stream.write_all(&hello)?;
            io::Result::Ok(greeting)
        };
        let (version, id) = talk().map_err(Err)?;
        if version != VERSION {
            let failure =
                self.differ("the version of the protocol", self.environment.rank, &VERSION, &version);
            return Err(Ok(failure));
        }
        if id != self.id {
            *elsewhere = Some(id);
            return Ok(None);
        }
        Ok(Some(stream))
    }

    /// Rank 0 keeps the deadline, too; a little more is for its word to arrive.
    fn await_welcome(&self, mut stream: TcpStream) -> Result<TcpStream> {
        let patience = self.until.left(Duration::from_secs(86_400)).saturating_add(PATIENCE);
        let lost = |error: io::Error| {
            let reason = format!("its connection broke before all ranks had come: {error}");
            self.failed(Failure::Lost { rank: 0, reason })
        };
        stream.set_read_timeout(Some(patience)).map_err(lost)?;
        match wire::receive(&mut stream).map_err(lost)? {
            Frame::Welcome => Ok(stream),
            Frame::Fail(failure) => Err(self.failed(failure)),
            _ => Err(lost(io::Error::from(io::ErrorKind::InvalidData))),
        }
    }
}

/// Magic, version, id.
fn introduction(id: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((id.len() as u32).to_le_bytes());
    bytes.extend(id.as_bytes());
    bytes
}

fn read_greeting(stream: &mut TcpStream) -> io::Result<(u32, String)> {
    let stranger = || io::Error::new(io::ErrorKind::InvalidData, "something else than a rank listens there");
    let mut magic = [0; 8];
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(stranger());
    }
    let (mut version, mut len) = ([0; 4], [0; 4]);
    stream.read_exact(&mut version)?;
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_ID {
        return Err(stranger());
    }
    let mut id = vec![0; len];
    stream.read_exact(&mut id)?;
    Ok((u32::from_le_bytes(version), String::from_utf8(id).map_err(|_| stranger())?))
}

/// Rank 0's first words to one that has connected, and the answer.
fn greet(stream: &mut TcpStream, id: &str, patience: Duration) -> io::Result<Hello> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(&introduction(id))?;
    let (version, id) = read_greeting(stream)?;
    let mut numbers = [[0; 8]; 2];
    for number in &mut numbers {
        stream.read_exact(number)?;
    }
    let [world_size, rank] = numbers.map(u64::from_le_bytes);
    Ok(Hello { version, id, world_size, rank })
}
