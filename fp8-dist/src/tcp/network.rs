//! Joining a group, and forming groups of some of its ranks: the first rank of a new group listens, and the others learn its address
//! from the group that is divided.

use super::guest::Guest;
use super::host::host;
use crate::division::{Divide, Division, End, Ranks};
use crate::exchange::Exchange;
use crate::local::check_options;
use crate::rendezvous::{self, Met, random};
use crate::{Environment, Error, Result};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

/// Joins a group and returns this process's end of it. If this is rank 0 and there is a `listener`, that is where it waits for the
/// others.
pub(crate) fn connect(
    id: &str,
    environment: &Environment,
    listener: Option<TcpListener>,
    deadline: Duration,
) -> Result<End> {
    check_options(id, environment.world_size, deadline)?;
    let network =
        |source| Error::Network { id: id.to_owned(), what: "using a connection".to_owned(), source };
    let met = rendezvous::meet(id, environment, listener, deadline)?;
    let Environment { rank, world_size, master_addr, .. } = environment;
    let port = met.port().unwrap_or(environment.master_port);
    let address = format_args!("{master_addr}:{port}");
    tracing::info!(target: "fp8_dist::tcp", group = id, rank, world_size, %address, "group formed");
    let end = |exchange: Box<dyn Exchange>, ip| {
        let network = Network { ip, environment: environment.clone(), deadline };
        End { exchange, divide: Box::new(network) }
    };
    let ip = met.ip().map_err(network)?;
    Ok(match met {
        Met::Host(guests) => end(Box::new(host(id, guests, deadline).map_err(network)?), ip),
        Met::Guest(stream) => {
            end(Box::new(Guest::new(id, environment, deadline, stream).map_err(network)?), ip)
        }
    })
}

/// A rank's way to divide its group.
#[derive(Debug)]
struct Network {
    /// This machine's address in the network that connects the group; a loopback address if this rank has reached rank 0 within its
    /// machine.
    ip: IpAddr,
    environment: Environment,
    deadline: Duration,
}

impl Network {
    /// A place to wait for the ranks of a new group, and a name for it.
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

impl Divide for Network {
    fn divide(&self, exchange: &dyn Exchange, division: &Division<'_>) -> Result<Option<(End, Ranks)>> {
        // Any rank may become the first of its group, which is known only after the exchange.
        let listens = match division.joins().then(|| self.listen()).transpose() {
            Ok(listens) => listens,
            Err(source) => {
                let what = format!("listening at {}", self.ip);
                let error = Error::Network { id: division.id.to_owned(), what, source };
                exchange.poison(&error.to_string());
                return Err(error);
            }
        };
        let (listener, secret) = listens.unzip();
        let port = listener.as_ref().and_then(|listener| Some(listener.local_addr().ok()?.port()));
        let address = port.map(|port| SocketAddr::new(self.ip, port));
        let request = division.request(address, secret.unwrap_or_default());
        let Some(place) = division.agree(exchange, &request)? else { return Ok(None) };
        let first = place.first.address.unwrap_or_else(|| (self.ip, 0).into());
        let environment = Environment {
            rank: place.rank,
            world_size: place.ranks.len(),
            master_addr: first.ip().to_string(),
            master_port: first.port(),
            exact_port: true,
            run_id_variable: "run id",
            run_id: format!("{:032x}", u128::from_le_bytes(place.first.secret)),
            ..self.environment.clone()
        };
        let listener = listener.filter(|_| place.rank == 0);
        let end = connect(division.id, &environment, listener, self.deadline)?;
        Ok(Some((end, place.ranks)))
    }
}
