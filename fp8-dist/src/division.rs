//! Dividing a group into smaller ones.
//!
//! The ranks exchange what each has asked for: a color and a key, and over TCP also the address where it would accept connections
//! as the first rank of its new group. Every rank then knows all new groups. A new group has connections of its own, so that it
//! outlives the group that was divided, and the failure of one does not end the other.

use crate::direct::Direct;
use crate::exchange::Exchange;
use crate::message::{Message, Operation, Part, call_of};
use crate::rendezvous::array;
use crate::{Error, Failure, Result};
use fp8_kernels::{DType, Device, Tensor};
use std::fmt::Debug;
use std::net::SocketAddr;

/// The part of a group that becomes a group: the ranks of the old one, in their new order.
pub(crate) type Ranks = Vec<usize>;

/// A rank's end of a group.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) exchange: Box<dyn Exchange>,
    pub(crate) divide: Box<dyn Divide>,
    /// Connections between all ranks; none where messages reach them in any case.
    pub(crate) direct: Option<Box<dyn Direct>>,
}

/// A way to form groups of some ranks of a group.
pub(crate) trait Divide: Debug + Send + Sync {
    /// Divides the group of `exchange`. Returns this rank's end of its new group, and that group's ranks in the old one; `None` if
    /// it joins none.
    fn divide(&self, exchange: &dyn Exchange, division: &Division<'_>) -> Result<Option<(End, Ranks)>>;
}

/// The members of a job that `ranks` of a group with these members are.
pub(crate) fn of(members: &[usize], ranks: &[usize]) -> Vec<usize> {
    ranks.iter().filter_map(|&rank| members.get(rank)).copied().collect()
}

/// A call that divides a group, and this rank's part in it.
#[derive(Debug)]
pub(crate) struct Division<'a> {
    /// The name of the new groups.
    pub(crate) id: &'a str,
    /// As the ranks compare it, and as errors name it.
    what: String,
    color: Option<u64>,
    key: u64,
    /// The list of ranks that is no group, if it is none. All ranks have the same list, or get an error that names both.
    wrong: Option<String>,
}

impl<'a> Division<'a> {
    pub(crate) fn of_color(id: &'a str, color: Option<usize>, key: usize) -> Self {
        Self { id, what: id.to_owned(), color: color.map(|color| color as u64), key: key as u64, wrong: None }
    }

    /// The group of some ranks of a group of `world_size`.
    pub(crate) fn of_ranks(id: &'a str, ranks: &[usize], rank: usize, world_size: usize) -> Self {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let is_wrong = sorted.len() != ranks.len() || sorted.last().is_none_or(|&last| last >= world_size);
        let place = ranks.iter().position(|&one| one == rank);
        Self {
            id,
            what: format!("{id} of ranks {ranks:?}"),
            color: place.map(|_| 0),
            key: place.unwrap_or_default() as u64,
            wrong: is_wrong.then(|| format!("{ranks:?}")),
        }
    }

    /// The color and the key of this rank.
    pub(crate) const fn color_and_key(&self) -> (Option<u64>, u64) {
        (self.color, self.key)
    }

    /// Exchanges the requests of all ranks. Returns this rank's place in its new group; `None` if it joins none.
    pub(crate) fn agree(&self, exchange: &dyn Exchange, request: &Request) -> Result<Option<Place>> {
        let all = exchange.exchange(Message::new(Operation::Split, &self.what).with(request.part()?))?;
        if let Some(value) = self.wrong.clone() {
            let remedy = "expected different ranks of the group, at least one";
            return Err(Error::Option { id: self.id.to_owned(), option: "ranks", value, remedy });
        }
        let requests = requests_of(exchange, &all)?;
        let Some(ranks) = ranks_of(&requests, exchange.rank()) else { return Ok(None) };
        let rank = ranks.iter().position(|&rank| rank == exchange.rank());
        let first = ranks.first().and_then(|&first| requests.get(first)).cloned();
        Ok(rank.zip(first).map(|(rank, first)| Place { rank, ranks, first }))
    }
}

/// A rank's place in a new group.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    /// The ranks of the new group in the old one.
    pub(crate) ranks: Ranks,
    /// The request of the first of them.
    pub(crate) first: Request,
}

/// A rank's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Ranks of one color form a group; `None` for a rank that joins none.
    pub(crate) color: Option<u64>,
    /// Determines the new rank; of equal keys, the lower old rank comes first.
    pub(crate) key: u64,
    /// The address at which the rank listens, if connections have to be made.
    pub(crate) address: Option<SocketAddr>,
    /// A name of the new group that no other group has.
    pub(crate) secret: [u8; 16],
}

impl Request {
    /// The request as a rank sends it.
    pub(crate) fn part(&self) -> Result<Part> {
        let bytes = self.to_bytes();
        let shape = [bytes.len()];
        let data = Tensor::from_vec(bytes, shape, &Device::cpu())?;
        Ok(Part { dtype: DType::U8, shape: shape.into(), data: Some(data) })
    }

    /// A flag for the color, color, key, secret, and the address as text.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.color.is_some())];
        bytes.extend(self.color.unwrap_or_default().to_le_bytes());
        bytes.extend(self.key.to_le_bytes());
        bytes.extend(self.secret);
        bytes.extend(self.address.map(|address| address.to_string()).unwrap_or_default().bytes());
        bytes
    }

    pub(crate) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let [has_color] = array(&mut bytes)?;
        let color = u64::from_le_bytes(array(&mut bytes)?);
        let (key, secret) = (u64::from_le_bytes(array(&mut bytes)?), array(&mut bytes)?);
        let address = match bytes {
            [] => None,
            text => Some(std::str::from_utf8(text).ok()?.parse().ok()?),
        };
        Some(Self { color: (has_color == 1).then_some(color), key, address, secret })
    }
}

/// Returns the requests of all ranks, with addresses that reach them from other machines.
pub(crate) fn requests_of(exchange: &dyn Exchange, all: &[Message]) -> Result<Vec<Request>> {
    let requests = all.iter().map(|message| {
        let data = message.part.as_ref()?.data.as_ref()?;
        Request::from_bytes(data.as_slice::<u8>().ok()?)
    });
    let Some(mut requests) = requests.collect::<Option<Vec<_>>>() else {
        let (call, reason) = (call_of(all), "a rank sent a request that is none".to_owned());
        let failure = Failure::GaveUp { rank: exchange.rank(), reason };
        exchange.fail(failure.clone());
        return Err(Error::Failed { call, failure });
    };
    // Who has reached rank 0 within a machine is on that of rank 0.
    let of_rank_0 = requests.first().and_then(|request| request.address);
    for address in requests.iter_mut().filter_map(|request| request.address.as_mut()) {
        if let Some(of_rank_0) = of_rank_0
            && address.ip().is_loopback()
        {
            address.set_ip(of_rank_0.ip());
        }
    }
    Ok(requests)
}

/// The new group of `rank`.
fn ranks_of(requests: &[Request], rank: usize) -> Option<Ranks> {
    let color = requests.get(rank)?.color?;
    let mut ranks: Ranks =
        (0..requests.len()).filter(|&other| requests[other].color == Some(color)).collect();
    ranks.sort_by_key(|&other| requests[other].key); // stable: of equal keys the lower rank first
    Some(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(color: Option<u64>, key: u64) -> Request {
        Request { color, key, address: None, secret: [0; 16] }
    }

    #[test]
    fn groups_are_those_of_one_color_in_order_of_key_and_rank() {
        let all = [(Some(1), 5), (None, 0), (Some(1), 2), (Some(0), 9), (Some(1), 5)];
        let all = all.map(|(color, key)| request(color, key));
        let found: Vec<_> = (0..6).map(|rank| ranks_of(&all, rank)).collect();
        let one = Some(vec![2, 0, 4]);
        assert_eq!(found, [one.clone(), None, one.clone(), Some(vec![3]), one, None]);
    }

    proptest! {
        #[test]
        fn requests_come_back(color: Option<u64>, key: u64, v6: bool, port: u16, is_remote: bool, secret: [u8; 16]) {
            let ip = if v6 { "fe80::1" } else { "10.0.0.1" };
            let address = is_remote.then(|| SocketAddr::new(ip.parse().unwrap(), port));
            let sent = Request { color, key, address, secret };
            prop_assert_eq!(Request::from_bytes(&sent.to_bytes()), Some(sent));
        }

        #[test]
        fn any_bytes_are_a_request_or_none(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Request::from_bytes(&bytes);
        }
    }
}
