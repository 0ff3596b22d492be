//! How ranks in processes find each other.
//!
//! Rank 0 listens at the first free port of the [`PORTS`] that begin at `MASTER_PORT`, as long as its group is not
//! complete; the others try these ports in turn until one greets them in this protocol, for this group. So `torchrun` may
//! hold `MASTER_PORT`, and groups of one job, or of jobs whose ports are neighbours, may form one after the other or at
//! once. Whoever connects and does not speak the protocol is ignored.
//!
//! Rank 0 says hello: 8 bytes of magic, the version (u32), the group's id, its world size and rank (u64 each),
//! `MASTER_PORT` (u16) and `TORCHELASTIC_RUN_ID`; texts behind their lengths (u32). A rank answers with the same of its
//! own. Both compare: where the port, the run, the id or the world size differ they part and go on looking, for that may be
//! a rank of another group or job; the difference is what they report if nobody else comes. When all have come rank 0
//! welcomes them, and when one does not come in time, or comes twice, tells all that have come.

use crate::wire::{self, Frame};
use crate::{Environment, Error, Failure, Result};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// How many ports rank 0 may choose from.
const PORTS: u16 = 16;
const MAGIC: [u8; 8] = *b"fp8-dist";
/// Of the protocol. Elements travel in the sender's byte order: machines of different order speak different versions.
const VERSION: u32 = if cfg!(target_endian = "little") { 2 } else { 2 | 1 << 16 };
/// How long one that connects may take for its first words; more is only waited for from rank 0.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many strangers are heard at once.
const STRANGERS: usize = 64;
const TICK: Duration = Duration::from_millis(2);
/// Of the id and of the run's.
const MAX_TEXT: usize = 4096;

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
    if id.len() > MAX_TEXT {
        let remedy = "expected at most 4096 bytes";
        return Err(Error::Option { id: id.to_owned(), option: "id", value: id.to_owned(), remedy });
    }
    if environment.run_id.len() > MAX_TEXT {
        let (value, remedy) = (Some(environment.run_id.clone()), "expected at most 4096 bytes".to_owned());
        return Err(Error::Environment { name: "TORCHELASTIC_RUN_ID", value, remedy });
    }
    let own = Hello {
        version: VERSION,
        id: id.to_owned(),
        world_size: environment.world_size as u64,
        rank: environment.rank as u64,
        port: environment.master_port,
        run_id: environment.run_id.clone(),
    };
    let meeting = Meeting { id, environment, deadline, until: Until::after(deadline), own };
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
    own: Hello,
}

/// What a rank says of itself.
#[derive(Debug, Clone)]
struct Hello {
    version: u32,
    id: String,
    world_size: u64,
    rank: u64,
    port: u16,
    run_id: String,
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

    /// Rank 0's part.
    fn host(&self) -> Result<Vec<TcpStream>> {
        let listener = self.listen()?;
        let (come, coming) = mpsc::channel();
        let strangers = Arc::new(AtomicUsize::new(0));
        let mut guests: Vec<Option<TcpStream>> = (1..self.environment.world_size).map(|_| None).collect();
        let mut elsewhere: Option<(usize, Failure)> = None;
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
                let missing: Vec<usize> =
                    (1..).zip(&guests).filter(|(_, guest)| guest.is_none()).map(|(rank, _)| rank).collect();
                // One whose place is taken was not on its way to this group.
                let elsewhere = elsewhere.filter(|(rank, _)| missing.contains(rank));
                let late = Failure::Deadline { missing, waited: self.deadline };
                break elsewhere.map_or(late, |(_, failure)| failure);
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
            let ours = |hello: &Hello| hello.version != VERSION || self.own.difference(hello).is_none();
            for (hello, mut stream) in coming.try_iter().filter(|(hello, _)| ours(hello)) {
                let _ = wire::send(&mut stream, &Frame::Fail(failure.clone()));
                missing.retain(|&rank| rank as u64 != hello.rank);
            }
            thread::sleep(TICK);
        }
        Err(self.failed(failure))
    }

    /// At `MASTER_ADDR` if that is an address of this machine, else at all of its addresses: of its own name a machine may
    /// believe that it is a loopback address, where the others would not find it.
    fn listen(&self) -> Result<TcpListener> {
        let host = self.environment.master_addr.as_str();
        let mut newest = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for port in self.ports() {
            let is_address = host == "localhost" || host.parse::<IpAddr>().is_ok();
            let mut addresses = if is_address { self.resolve(port)? } else { Vec::new() };
            addresses.extend([SocketAddr::from(([0; 16], port)), SocketAddr::from(([0; 4], port))]);
            for address in addresses {
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
            let (come, strangers, own) = (come.clone(), strangers.clone(), self.own.clone());
            let patience = self.until.left(PATIENCE);
            let talk = move || {
                if let Ok(hello) = greet(&mut stream, &own, patience) {
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
        elsewhere: &mut Option<(usize, Failure)>,
    ) -> Option<Failure> {
        while let Ok((hello, mut stream)) = coming.try_recv() {
            let rank = usize::try_from(hello.rank).unwrap_or(usize::MAX);
            let failure = if hello.version != VERSION {
                differ(VERSION_NAME, rank, &hello.version, &VERSION)
            } else if let Some(failure) = self.own.difference(&hello) {
                // Perhaps on its way to another group, of this job or another: known if nobody else comes.
                *elsewhere = Some((rank, failure));
                continue;
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
                    Some(failure) => self.failed(failure),
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
        elsewhere: &mut Option<Failure>,
    ) -> Result<Option<TcpStream>, Result<Failure, io::Error>> {
        let mut stream = TcpStream::connect_timeout(&address, self.until.left(PATIENCE)).map_err(Err)?;
        let patience = self.until.left(PATIENCE / 4);
        let mut talk = || {
            stream.set_read_timeout(Some(patience))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let hello = Hello::read(&mut stream)?;
            stream.write_all(&self.own.bytes())?;
            io::Result::Ok(hello)
        };
        let hello = talk().map_err(Err)?;
        if hello.version != VERSION {
            return Err(Ok(differ(VERSION_NAME, self.environment.rank, &VERSION, &hello.version)));
        }
        if let Some(failure) = hello.difference(&self.own) {
            *elsewhere = Some(failure);
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

const VERSION_NAME: &str = "the version of the protocol";

fn differ(property: &str, rank: usize, value: &dyn ToString, other_value: &dyn ToString) -> Failure {
    let (value, other_value) = (value.to_string(), other_value.to_string());
    Failure::Settings { property: property.to_owned(), rank, value, other: 0, other_value }
}

impl Hello {
    /// Why `guest` is no rank of the group whose rank 0 this is.
    fn difference(&self, guest: &Self) -> Option<Failure> {
        let rank = usize::try_from(guest.rank).unwrap_or(usize::MAX);
        let differ = |property, value: &dyn ToString, other: &dyn ToString| {
            (value.to_string() != other.to_string()).then(|| differ(property, rank, value, other))
        };
        differ("the group's id", &guest.id, &self.id)
            .or_else(|| differ("the port of the job", &guest.port, &self.port))
            .or_else(|| {
                let quoted = |hello: &Self| format!("{:?}", hello.run_id);
                differ("TORCHELASTIC_RUN_ID", &quoted(guest), &quoted(self))
            })
            .or_else(|| differ("the world size", &guest.world_size, &self.world_size))
    }

    fn bytes(&self) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(text(&self.id));
        bytes.extend(self.world_size.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(text(&self.run_id));
        bytes
    }

    /// Of another version only what stands before the port.
    fn read(stream: &mut TcpStream) -> io::Result<Self> {
        if array(stream)? != MAGIC {
            return Err(stranger());
        }
        let version = u32::from_le_bytes(array(stream)?);
        let id = read_text(stream)?;
        let world_size = u64::from_le_bytes(array(stream)?);
        let rank = u64::from_le_bytes(array(stream)?);
        let (port, run_id) = match version {
            VERSION => (u16::from_le_bytes(array(stream)?), read_text(stream)?),
            _ => (0, String::new()),
        };
        Ok(Self { version, id, world_size, rank, port, run_id })
    }
}

fn stranger() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "something else than a rank listens there")
}

fn array<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_text(stream: &mut TcpStream) -> io::Result<String> {
    let len = u32::from_le_bytes(array(stream)?) as usize;
    if len > MAX_TEXT {
        return Err(stranger());
    }
    let mut text = vec![0; len];
    stream.read_exact(&mut text)?;
    String::from_utf8(text).map_err(|_| stranger())
}

/// Rank 0's first words to one that has connected, and the answer.
fn greet(stream: &mut TcpStream, own: &Hello, patience: Duration) -> io::Result<Hello> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(&own.bytes())?;
    Hello::read(stream)
}
