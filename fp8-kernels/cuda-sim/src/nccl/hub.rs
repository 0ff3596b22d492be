//! The meeting point of a communicator's ranks, in the process that made the id.
//!
//! Ranks of this process use the table itself. Ranks of other processes use a TCP connection on the loopback, whose port is
//! part of the id. A round is one collective, identified by its number on the communicator. Ranks that come to it with
//! different arguments, for which NCCL's behaviour is undefined, get `ncclInvalidUsage` and a report. If a rank exits
//! without destroying its communicator, the others get `ncclRemoteError`, and their collectives wait until they abort, as on
//! hardware.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::shape::{Number, Shape};
use crate::code::Code;
use crate::report;

/// `ncclUniqueId`.
pub(crate) const ID_BYTES: usize = 128;
const MAGIC: [u8; 8] = *b"fp8-nccl";

#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) nonce: u64,
    port: u16,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// One entry per rank, once the first has come.
    members: Vec<Option<Member>>,
    rounds: BTreeMap<Number, Round>,
    /// Why the communicator is of no more use.
    error: Option<Code>,
}

#[derive(Debug)]
struct Member {
    /// Ranks with the same key are on the same GPU; none where that is allowed.
    gpu: Option<String>,
    /// To the process of a rank elsewhere.
    stream: Option<TcpStream>,
    has_left: bool,
}

#[derive(Debug)]
struct Round {
    /// The ranks that come to it. The lists below have a place for each.
    ranks: Vec<usize>,
    parts: Vec<Option<(Shape, Vec<u8>)>>,
    /// Once all have come; taken by each.
    results: Option<Vec<Option<Vec<u8>>>>,
}

/// A rank's introduction to the hub.
#[derive(Debug, Clone)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) gpu: Option<String>,
}

impl Hub {
    /// Listens, and hears ranks of other processes as long as the hub is used.
    pub(crate) fn open(nonce: u64) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let hub = Arc::new(Self { nonce, port, table: Mutex::default() });
        let weak = Arc::downgrade(&hub);
        thread::Builder::new().name("fp8-cuda-sim hub".into()).spawn(move || listen(&listener, &weak))?;
        Ok(hub)
    }

    pub(crate) fn id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        id[..8].copy_from_slice(&MAGIC);
        id[8..16].copy_from_slice(&self.nonce.to_le_bytes());
        id[16..18].copy_from_slice(&self.port.to_le_bytes());
        id
    }

    /// Whether a rank has come.
    pub(crate) fn has_members(&self) -> bool {
        !self.table.lock().members.is_empty()
    }

    pub(crate) fn join(&self, hello: &Hello, stream: Option<TcpStream>) {
        let mut table = self.table.lock();
        if table.members.is_empty() {
            table.members.resize_with(hello.ranks, || None);
        }
        let ranks = table.members.len();
        // NCCL User Guide, ncclCommInitRank: "rank must be between 0 and nranks-1 and unique within a communicator clique".
        let fits = hello.ranks == ranks && table.members.get(hello.rank).is_some_and(Option::is_none);
        if !fits {
            report::print(&format!(
                "ncclCommInitRankConfig: rank {} of {}, in a communicator of {ranks}, came twice or with another number of \
                 ranks",
                hello.rank, hello.ranks
            ));
            table.fail(Code::NCCL_INVALID_USAGE);
            if let Some(mut stream) = stream {
                let _ = send_state(&mut stream, Code::NCCL_INVALID_USAGE.0);
            }
            return;
        }
        table.members[hello.rank] = Some(Member { gpu: hello.gpu.clone(), stream, has_left: false });
        if table.is_complete() {
            table.begin();
        }
    }

    /// A rank's part of a round.
    pub(crate) fn arrive(&self, rank: usize, number: Number, shape: Shape, bytes: Vec<u8>) {
        self.table.lock().arrive(rank, number, shape, bytes);
    }

    /// Takes the result of a complete round for a rank of this process. Each result can be taken once.
    pub(crate) fn take(&self, rank: usize, number: Number) -> Option<Vec<u8>> {
        let (meeting, place) = number.meeting(rank);
        let mut table = self.table.lock();
        let results = table.rounds.get_mut(&meeting)?.results.as_mut()?;
        let result = results.get_mut(place)?.take();
        if results.iter().all(Option::is_none) {
            table.rounds.remove(&meeting);
        }
        result
    }

    pub(crate) fn has_result(&self, rank: usize, number: Number) -> bool {
        let (meeting, place) = number.meeting(rank);
        let table = self.table.lock();
        let results = table.rounds.get(&meeting).and_then(|round| round.results.as_ref());
        results.is_some_and(|results| results.get(place).is_some_and(Option::is_some))
    }

    /// `None` while ranks are missing.
    pub(crate) fn state(&self) -> Option<Result<(), Code>> {
        let table = self.table.lock();
        match table.error {
            Some(code) => Some(Err(code)),
            None => table.is_complete().then_some(Ok(())),
        }
    }

    /// A rank's handle is gone: destroyed, or with `abort` left in the lurch.
    pub(crate) fn leave(&self, rank: usize, abort: bool) {
        self.table.lock().leave(rank, abort);
    }
}

impl Table {
    fn is_complete(&self) -> bool {
        !self.members.is_empty() && self.members.iter().all(Option::is_some)
    }

    /// All have come.
    fn begin(&mut self) {
        let mut keys: Vec<&String> = self.members.iter().flatten().filter_map(|m| m.gpu.as_ref()).collect();
        let count = keys.len();
        keys.sort();
        keys.dedup();
        // NCCL User Guide, "Creating a Communicator": "Using the same CUDA device multiple times as different ranks of the
        // same NCCL communicator is not supported"; NCCL 2.28 answers ncclInvalidUsage, "Duplicate GPU detected".
        if keys.len() < count {
            report::print("ncclCommInitRankConfig: Duplicate GPU detected: two ranks are on one device");
            self.fail(Code::NCCL_INVALID_USAGE);
        } else if self.error.is_none() {
            self.tell(0);
        }
    }

    fn tell(&mut self, state: i32) {
        for stream in self.members.iter_mut().flatten().filter_map(|member| member.stream.as_mut()) {
            // A process that is gone is noticed where it is read from.
            let _ = send_state(stream, state);
        }
    }

    fn fail(&mut self, code: Code) {
        if self.error.is_none() {
            self.error = Some(code);
            self.tell(code.0);
        }
    }

    fn arrive(&mut self, rank: usize, number: Number, shape: Shape, bytes: Vec<u8>) {
        let (meeting, place) = number.meeting(rank);
        let ranks = meeting.ranks(self.members.len());
        let has_left =
            |&rank: &usize| self.members.get(rank).and_then(Option::as_ref).is_some_and(|m| m.has_left);
        let gone = ranks.iter().any(has_left);
        let round = self.rounds.entry(meeting).or_insert_with(|| Round {
            parts: vec![None; ranks.len()],
            results: None,
            ranks,
        });
        if let Some(part) = round.parts.get_mut(place) {
            *part = Some((shape, bytes));
        }
        if round.parts.iter().any(Option::is_none) {
            if gone {
                self.fail(Code::NCCL_REMOTE_ERROR);
            }
            return;
        }
        let all: Vec<(Shape, Vec<u8>)> = round.parts.iter_mut().filter_map(Option::take).collect();
        let odd = all.iter().position(|(shape, _)| !shape.is_same_call(all[0].0));
        if let Some(odd) = odd {
            report::print(&format!(
                "call {} of a communicator: {:?} on rank {} and {:?} on rank {}",
                meeting.0, all[0].0, round.ranks[0], all[odd].0, round.ranks[odd]
            ));
            round.results = Some(vec![Some(Vec::new()); all.len()]);
            self.fail(Code::NCCL_INVALID_USAGE);
        } else {
            let parts: Vec<Vec<u8>> = all.into_iter().map(|(_, bytes)| bytes).collect();
            let results = shape.results(&parts);
            round.results = Some(results.into_iter().map(Some).collect());
        }
        self.send_results(meeting);
    }

    /// To ranks of other processes.
    fn send_results(&mut self, meeting: Number) {
        let Some(Round { ranks, results: Some(results), .. }) = self.rounds.get_mut(&meeting) else { return };
        for (place, (rank, result)) in ranks.iter().zip(results.iter_mut()).enumerate() {
            let member = self.members.get_mut(*rank).and_then(Option::as_mut);
            if let Some(stream) = member.and_then(|member| member.stream.as_mut())
                && let Some(bytes) = result.take()
            {
                let _ = send_result(stream, meeting.at(place), &bytes);
            }
        }
        if results.iter().all(Option::is_none) {
            self.rounds.remove(&meeting);
        }
    }

    fn leave(&mut self, rank: usize, abort: bool) {
        let Some(Some(member)) = self.members.get_mut(rank) else { return };
        if member.has_left {
            return;
        }
        member.has_left = true;
        member.stream = None;
        let waited_for = self.rounds.values().any(|round| {
            let mut parts = round.ranks.iter().zip(&round.parts);
            round.results.is_none() && parts.any(|(&of, part)| of == rank && part.is_none())
        });
        if abort || waited_for {
            self.fail(Code::NCCL_REMOTE_ERROR);
        }
    }
}

/// Reads the nonce and port of an id; `None` for what `ncclGetUniqueId` has not made.
pub(crate) fn read_id(id: &[u8]) -> Option<(u64, u16)> {
    let nonce = id.get(8..16)?.try_into().ok()?;
    let port = id.get(16..18)?.try_into().ok()?;
    (id.get(..8)? == MAGIC).then_some((u64::from_le_bytes(nonce), u16::from_le_bytes(port)))
}

fn listen(listener: &TcpListener, hub: &Weak<Hub>) {
    while hub.strong_count() > 0 {
        match listener.accept() {
            Ok((stream, _)) => {
                let hub = hub.clone();
                // Without a thread the rank is not heard, and the communicator does not form.
                let _ = thread::Builder::new()
                    .name("fp8-cuda-sim rank".into())
                    .spawn(move || serve(stream, &hub));
            }
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Hears one rank of another process.
fn serve(mut stream: TcpStream, hub: &Weak<Hub>) {
    let Ok((hello, writer)) = greet(&mut stream, hub) else { return };
    if let Some(hub) = hub.upgrade() {
        hub.join(&hello, Some(writer));
    }
    loop {
        let heard = hear(&mut stream);
        let Some(hub) = hub.upgrade() else { return };
        match heard {
            Ok(Some((number, shape, bytes))) => hub.arrive(hello.rank, number, shape, bytes),
            Ok(None) => return hub.leave(hello.rank, false),
            Err(_) => return hub.leave(hello.rank, true),
        }
    }
}

fn greet(stream: &mut TcpStream, hub: &Weak<Hub>) -> io::Result<(Hello, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let nonce = number(stream)?;
    if hub.upgrade().is_none_or(|hub| hub.nonce != nonce) {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    let (rank, ranks) = (number(stream)? as usize, number(stream)? as usize);
    let len = number(stream)? as usize;
    if ranks == 0 || ranks > 4096 || len > 4096 {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    let mut gpu = vec![0; len];
    stream.read_exact(&mut gpu)?;
    let gpu = Some(String::from_utf8_lossy(&gpu).into_owned()).filter(|gpu| !gpu.is_empty());
    stream.set_read_timeout(None)?;
    Ok((Hello { rank, ranks, gpu }, stream.try_clone()?))
}

/// A rank's next part, or `None` when it leaves.
fn hear(stream: &mut TcpStream) -> io::Result<Option<(Number, Shape, Vec<u8>)>> {
    let round = number(stream)?;
    if round == u64::MAX {
        return Ok(None);
    }
    let mut words = [0; Shape::WORDS];
    for word in &mut words {
        *word = number(stream)? as u32;
    }
    let shape = Shape::from_words(words).ok_or(io::ErrorKind::InvalidData)?;
    let mut bytes = vec![0; usize::try_from(number(stream)?).map_err(io::Error::other)?];
    stream.read_exact(&mut bytes)?;
    Ok(Some((Number(round), shape, bytes)))
}

/// Introduces a rank to a hub in another process.
pub(crate) fn send_hello(stream: &mut TcpStream, nonce: u64, hello: &Hello) -> io::Result<()> {
    let gpu = hello.gpu.clone().unwrap_or_default();
    for value in [nonce, hello.rank as u64, hello.ranks as u64, gpu.len() as u64] {
        stream.write_all(&value.to_le_bytes())?;
    }
    stream.write_all(gpu.as_bytes())
}

/// Sends a rank's part of a round to a hub in another process.
pub(crate) fn send_part(
    stream: &mut TcpStream,
    number: Number,
    shape: Shape,
    bytes: &[u8],
) -> io::Result<()> {
    let mut head = number.0.to_le_bytes().to_vec();
    shape.words().iter().for_each(|&word| head.extend(u64::from(word).to_le_bytes()));
    head.extend((bytes.len() as u64).to_le_bytes());
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

pub(crate) fn send_leave(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(&u64::MAX.to_le_bytes())
}

/// A message from a hub to a rank of another process.
#[derive(Debug)]
pub(crate) enum Told {
    State(i32),
    Result(Number, Vec<u8>),
}

fn send_state(stream: &mut TcpStream, state: i32) -> io::Result<()> {
    stream.write_all(&u64::MAX.to_le_bytes())?;
    stream.write_all(&u64::from(state.unsigned_abs()).to_le_bytes())
}

fn send_result(stream: &mut TcpStream, number: Number, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&number.0.to_le_bytes())?;
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

pub(crate) fn receive(stream: &mut TcpStream) -> io::Result<Told> {
    let round = number(stream)?;
    let value = number(stream)?;
    if round == u64::MAX {
        return Ok(Told::State(i32::try_from(value).unwrap_or(Code::NCCL_INTERNAL_ERROR.0)));
    }
    let mut bytes = vec![0; usize::try_from(value).map_err(io::Error::other)?];
    stream.read_exact(&mut bytes)?;
    Ok(Told::Result(Number(round), bytes))
}

fn number(stream: &mut TcpStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
