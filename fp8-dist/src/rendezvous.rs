//! Forms a group: its processes find each other and connect to rank 0.
//!
//! Until its group is complete, rank 0 listens on the first free one of the [`PORTS`] ports that begin at `MASTER_PORT`. The
//! other ranks repeatedly call all of these ports at once until a rank 0 of their group answers. Therefore `torchrun` may occupy
//! `MASTER_PORT`, and several groups of one job, or of jobs with neighbouring ports, may form at the same time. Connections that
//! do not speak the protocol are ignored.
//!
//! The process that connects (the guest) speaks first:
//!
//! | from | bytes |
//! |---|---|
//! | guest | 8 bytes of magic, the version (u32), its rank (u64), a nonce (32 bytes) |
//! | rank 0 | magic, version, a nonce |
//! | guest | the length of its hello (u32), the hello, and the proof of it ([`proof`]) |
//! | rank 0 | one byte ([`Verdict`]); if the guest's proof is correct, rank 0's hello and its proof |
//!
//! A hello contains the group's id, the world size and the rank (u64 each), `MASTER_PORT` (u16), the run id and the variable that
//! it was read from, and a random number for this attempt to join. Each text follows its length (u32). Both sides compare hellos.
//! If port, run id, group id or world size differ, they disconnect and keep looking, because the other side may belong to another
//! group or job. They report the difference only if no other process arrives. The same applies to another version or token: any
//! stranger can claim those, so they do not end the group.
//!
//! Rank 0 keeps the connection of each rank until all have arrived, and then welcomes them. If a rank does not arrive in time, or
//! two connected processes have the same rank, rank 0 tells all that have arrived. A rank whose connection has closed may connect
//! again.
//!
//! The ranks of two jobs with equal settings could mix. Therefore each rank 0 introduces itself on the other ports of its range as
//! soon as it listens on one of them. Of any two, at least one finds the other, and both jobs fail. A group is complete only after
//! these calls have ended and, if the job has no run id, one second after its last rank has arrived.
//!
//! Every conversation has one deadline, however slowly the other side sends. Those of rank 0 share one thread.

mod call;
mod guest;
mod hello;
mod host;
mod line;
mod proof;
mod search;
mod visit;

use crate::timed::Until;
use crate::{Environment, Error, Failure, Result};
use hello::Hello;
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// The number of ports that rank 0 may choose from.
const PORTS: u16 = 16;
const MAGIC: [u8; 8] = *b"fp8-dist";
/// The version of the protocol. Elements are sent in the sender's byte order, so machines of different byte order have different
/// versions.
const VERSION: u32 = if cfg!(target_endian = "little") { 3 } else { 3 | 1 << 16 };
const VERSION_NAME: &str = "the version of the protocol";
/// The time limit for two processes to introduce themselves.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time that a seated rank waits for rank 0's message after the deadline, which rank 0 enforces.
const GRACE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(2);
/// The longest group id or run id, in bytes.
const MAX_TEXT: usize = 4096;

/// Rank 0's answer to a guest's proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Verdict {
    /// The proof is wrong. Nothing follows.
    Token = 0,
    /// Rank 0's hello and proof follow.
    Hello = 1,
    /// This process is already connected. Nothing follows.
    Seated = 2,
}

impl Verdict {
    fn parse(bytes: &[u8]) -> Option<Self> {
        [Self::Token, Self::Hello, Self::Seated].into_iter().find(|verdict| bytes == [*verdict as u8])
    }
}

/// The connections of a complete group.
#[derive(Debug)]
pub(crate) enum Met {
    /// On rank 0: the connections to ranks 1, 2, ….
    Host(Vec<TcpStream>),
    /// On the other ranks: the connection to rank 0.
    Guest(TcpStream),
}

impl Met {
    /// Returns the port on which rank 0 has listened; `None` for a group of one.
    pub(crate) fn port(&self) -> Option<u16> {
        let address = match self {
            Self::Host(guests) => guests.first()?.local_addr(),
            Self::Guest(host) => host.peer_addr(),
        };
        address.ok().map(|address| address.port())
    }
}

/// Connects the ranks of group `id`.
pub(crate) fn meet(id: &str, environment: &Environment, deadline: Duration) -> Result<Met> {
    environment.check()?;
    if id.len() > MAX_TEXT {
        let remedy = "expected at most 4096 bytes";
        return Err(Error::Option { id: id.to_owned(), option: "id", value: id.to_owned(), remedy });
    }
    if environment.run_id.len() > MAX_TEXT {
        let (value, remedy) = (Some(environment.run_id.clone()), "expected at most 4096 bytes".to_owned());
        return Err(Error::Environment { name: environment.run_id_variable, value, remedy });
    }
    let until = Until::after(deadline);
    let attempt = proof::random().map_err(|source| {
        let what = "asking the system for random bytes".to_owned();
        Error::Network { id: id.to_owned(), what, source }
    })?;
    let own = Hello::new(id, environment, attempt);
    let meeting = Meeting { id, environment, deadline, until, own };
    match environment.rank {
        0 if environment.world_size == 1 => Ok(Met::Host(Vec::new())),
        0 => host::host(&meeting).map(Met::Host),
        _ => guest::guest(&meeting).map(Met::Guest),
    }
}

struct Meeting<'a> {
    id: &'a str,
    environment: &'a Environment,
    deadline: Duration,
    until: Until,
    own: Hello,
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

    fn unknown_host(&self, source: io::Error) -> Error {
        self.network(format!("looking up MASTER_ADDR={}", self.environment.master_addr), source)
    }

    fn failed(&self, failure: Failure) -> Error {
        Error::Rendezvous { id: self.id.to_owned(), failure }
    }
}
