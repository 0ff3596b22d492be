//! How ranks in processes find each other.
//!
//! Rank 0 listens at the first free port of the [`PORTS`] that begin at `MASTER_PORT`, as long as its group is not
//! complete; the others call all of these ports at once, again and again, until a rank 0 of their group answers. So
//! `torchrun` may hold `MASTER_PORT`, and groups of one job, or of jobs whose ports are neighbours, may form one after the
//! other or at once. Connections that do not speak the protocol are ignored.
//!
//! The process that connects (the guest) speaks first:
//!
//! | from | words |
//! |---|---|
//! | guest | 8 bytes of magic, the version (u32), its rank (u64), a nonce (32 bytes) |
//! | rank 0 | magic, version, a nonce |
//! | guest | its hello behind its length (u32), and the proof of it ([`proof`]) |
//! | rank 0 | one byte ([`Verdict`]); if the guest's proof is right, its own hello and the proof of that |
//!
//! A hello is the group's id, its world size and the rank (u64 each), `MASTER_PORT` (u16), the id of the run and the
//! variable that it comes from, and a number for this attempt to join; texts are behind their lengths (u32). Both sides
//! compare: where the port, the run, the group's id or the world size differ they part and go on looking, for that may be a
//! rank of another group or job. They report the difference if no other process comes. The same holds for another version
//! and another token: any stranger can claim those, so they do not end the group.
//!
//! Rank 0 keeps the connection of each rank until all have come, then welcomes them. When one does not come in time, or
//! comes while another process that says it is the same rank is still connected, it tells all that have come. A rank whose
//! connection has closed may come again.
//!
//! Two jobs with equal settings would mix. So each rank 0 introduces itself at the other ports of its range, as soon as it
//! holds one of them: of any two, at least one finds the other, and both jobs fail. The group is not complete before these
//! calls have ended and, where the job has no name, one second after its last rank has come.
//!
//! Every conversation has one deadline, however slowly the other side sends; those of rank 0 share one thread.

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

/// How many ports rank 0 may choose from.
const PORTS: u16 = 16;
const MAGIC: [u8; 8] = *b"fp8-dist";
/// Of the protocol. Elements travel in the sender's byte order: machines of different order speak different versions.
const VERSION: u32 = if cfg!(target_endian = "little") { 3 } else { 3 | 1 << 16 };
const VERSION_NAME: &str = "the version of the protocol";
/// How long two that do not know each other may take to introduce themselves.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a rank that rank 0 knows waits for its word after the deadline, which rank 0 keeps.
const GRACE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(2);
/// Longest id of a group or a run, in bytes.
const MAX_TEXT: usize = 4096;

/// Rank 0's answer to a guest's proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Verdict {
    /// The proof is wrong. Nothing follows.
    Token = 0,
    /// Rank 0's hello and proof follow.
    Hello = 1,
    /// This very process is connected already. Nothing follows.
    Seated = 2,
}

impl Verdict {
    fn parse(bytes: &[u8]) -> Option<Self> {
        [Self::Token, Self::Hello, Self::Seated].into_iter().find(|verdict| bytes == [*verdict as u8])
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

/// Brings the ranks of group `id` together.
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
