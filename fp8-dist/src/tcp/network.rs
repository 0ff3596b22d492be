//! The listeners that a rank opens for others of its group, and the settings with which they come.

use crate::division::Request;
use crate::exchange::Exchange;
use crate::rendezvous::random;
use crate::{Environment, Error, Result};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

/// A rank's way to make more connections: to divide its group, and to reach all of its ranks directly.
#[derive(Debug, Clone)]
pub(super) struct Network {
    /// This machine's address in the network that connects the group; a loopback address if this rank has reached rank 0 within its
    /// machine.
    pub(super) ip: IpAddr,
    pub(super) environment: Environment,
    pub(super) deadline: Duration,
}

impl Network {
    /// A place to wait for other ranks, and the request that tells them of it. If there is none, the group of `exchange` ends.
    pub(super) fn request(
        &self,
        id: &str,
        exchange: &dyn Exchange,
        color: Option<u64>,
        key: u64,
    ) -> Result<(TcpListener, Request)> {
        let listens = self.listen().and_then(|(listener, secret)| {
            let address = SocketAddr::new(self.ip, listener.local_addr()?.port());
            Ok((listener, Request { color, key, address: Some(address), secret }))
        });
        listens.map_err(|source| {
            let what = format!("listening at {}", self.ip);
            let error = Error::Network { id: id.to_owned(), what, source };
            exchange.poison(&error.to_string());
            error
        })
    }

    /// The settings of a rank that meets others at the address of a request.
    pub(super) fn environment_of(
        &self,
        rank: usize,
        world_size: usize,
        address: SocketAddr,
        secret: [u8; 16],
    ) -> Environment {
        Environment {
            rank,
            world_size,
            master_addr: address.ip().to_string(),
            master_port: address.port(),
            exact_port: true,
            run_id_variable: "run id",
            run_id: format!("{:032x}", u128::from_le_bytes(secret)),
            ..self.environment.clone()
        }
    }

    /// An address where nobody listens.
    pub(super) fn nowhere(&self) -> SocketAddr {
        (self.ip, 0).into()
    }

    /// A place to wait for other ranks, and a name that no other group has.
    fn listen(&self) -> io::Result<(TcpListener, [u8; 16])> {
        // A machine may resolve its own name to a loopback address, and others its name to another one.
        let is_named = !matches!(self.environment.master_addr.as_str(), "localhost" | "127.0.0.1" | "::1");
        let listener = if self.ip.is_loopback() && is_named {
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?
        } else {
            TcpListener::bind((self.ip, 0))?
        };
        Ok((listener, random()?))
    }
}
