//! Forms a group: its processes find each other and connect to rank 0.
//!
//! Until its group is complete, rank 0 listens on the first free one of the [`PORTS`](protocol::PORTS) ports that begin at `MASTER_PORT`. The
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
//! | rank 0 | one byte ([`Verdict`](protocol::Verdict)); if the guest's proof is correct, rank 0's hello and its proof |
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
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod guest;
mod hello;
mod host;
mod line;
mod meeting;
mod proof;
mod protocol;
mod search;
mod visit;

use crate::timed::Until;
use crate::{Environment, Error, Result};
use hello::Hello;
pub(crate) use hello::array;
use meeting::Meeting;
pub(crate) use proof::random;
use protocol::MAX_TEXT;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// The connections of a complete group.
#[derive(Debug)]
pub(crate) enum Met {
    /// On rank 0: the connections to ranks 1, 2, ….
    Host(Vec<TcpStream>),
    /// On the other ranks: the connection to rank 0.
    Guest(TcpStream),
}

impl Met {
    /// Returns this machine's address in the network that connects the group; a loopback address if all that is known of it are
    /// connections within the machine.
    pub(crate) fn ip(&self) -> io::Result<IpAddr> {
        let streams = match self {
            Self::Host(guests) => guests.as_slice(),
            Self::Guest(host) => std::slice::from_ref(host),
        };
        let ips = streams.iter().map(|stream| Ok(stream.local_addr()?.ip().to_canonical()));
        let ips = ips.collect::<io::Result<Vec<IpAddr>>>()?;
        Ok(ips.into_iter().find(|ip| !ip.is_loopback()).unwrap_or(Ipv4Addr::LOCALHOST.into()))
    }

    /// Returns the port on which rank 0 has listened; `None` for a group of one.
    pub(crate) fn port(&self) -> Option<u16> {
        let address = match self {
            Self::Host(guests) => guests.first()?.local_addr(),
            Self::Guest(host) => host.peer_addr(),
        };
        address.ok().map(|address| address.port())
    }
}

/// Connects the ranks of group `id`. Rank 0 waits for the others at `listener`, if it has one already. As soon as `gives_up` returns
/// true, a rank waits no longer, as if the deadline had passed.
pub(crate) fn meet(
    id: &str,
    environment: &Environment,
    listener: Option<TcpListener>,
    deadline: Duration,
    gives_up: &dyn Fn() -> bool,
) -> Result<Met> {
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
    let attempt = random().map_err(|source| {
        let what = "asking the system for random bytes".to_owned();
        Error::Network { id: id.to_owned(), what, source }
    })?;
    let own = Hello::new(id, environment, attempt);
    let meeting = Meeting { id, environment, deadline, until, gives_up, own };
    match environment.rank {
        0 if environment.world_size == 1 => Ok(Met::Host(Vec::new())),
        0 => host::host(&meeting, listener).map(Met::Host),
        _ => guest::guest(&meeting).map(Met::Guest),
    }
}
