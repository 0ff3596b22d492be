//! Joining a group, and forming groups of some of its ranks: the first rank of a new group listens, and the others learn its address
//! from the group that is divided.

use super::guest::Guest;
use super::host::host;
use super::mesh::Mesh;
use super::network::Network;
use crate::direct::Direct;
use crate::division::{Divide, Division, End, Ranks, Request};
use crate::exchange::Exchange;
use crate::local::check_options;
use crate::rendezvous::{self, Met};
use crate::{Environment, Error, Result};
use std::net::TcpListener;
use std::time::Duration;

/// Joins a group and returns this process's end of it. If this is rank 0 and there is a `listener`, that is where it waits for the
/// others. As soon as `gives_up` returns true, it waits no longer.
pub(crate) fn connect(
    id: &str,
    environment: &Environment,
    listener: Option<TcpListener>,
    deadline: Duration,
    gives_up: &dyn Fn() -> bool,
) -> Result<End> {
    check_options(id, environment.world_size, deadline)?;
    let network =
        |source| Error::Network { id: id.to_owned(), what: "using a connection".to_owned(), source };
    let met = rendezvous::meet(id, environment, listener, deadline, gives_up)?;
    let Environment { rank, world_size, master_addr, .. } = environment;
    let port = met.port().unwrap_or(environment.master_port);
    let address = format_args!("{master_addr}:{port}");
    tracing::info!(target: "fp8_dist::tcp", group = id, rank, world_size, %address, "group formed");
    let end = |exchange: Box<dyn Exchange>, ip| {
        let network = Network { ip, environment: environment.clone(), deadline };
        let mesh = (*world_size > 1).then(|| Box::new(Mesh::new(network.clone())) as Box<dyn Direct>);
        End { exchange, divide: Box::new(network), direct: mesh }
    };
    let ip = met.ip().map_err(network)?;
    Ok(match met {
        Met::Host(guests) => end(Box::new(host(id, guests, deadline).map_err(network)?), ip),
        Met::Guest(stream) => {
            end(Box::new(Guest::new(id, environment, deadline, stream).map_err(network)?), ip)
        }
    })
}

impl Divide for Network {
    fn divide(&self, exchange: &dyn Exchange, division: &Division<'_>) -> Result<Option<(End, Ranks)>> {
        // Any rank may become the first of its group, which is known only after the exchange.
        let (color, key) = division.color_and_key();
        let (listener, request) = match color {
            Some(_) => {
                let (listener, request) = self.request(division.id, exchange, color, key)?;
                (Some(listener), request)
            }
            None => (None, Request { color, key, address: None, secret: [0; 16] }),
        };
        let Some(place) = division.agree(exchange, &request)? else { return Ok(None) };
        let first = place.first.address.unwrap_or_else(|| self.nowhere());
        let environment = self.environment_of(place.rank, place.ranks.len(), first, place.first.secret);
        let listener = listener.filter(|_| place.rank == 0);
        let gives_up = || exchange.failure().is_some();
        let end = connect(division.id, &environment, listener, self.deadline, &gives_up)?;
        Ok(Some((end, place.ranks)))
    }
}
