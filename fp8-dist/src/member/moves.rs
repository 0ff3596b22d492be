//! Tensors that move from rank to rank as they are: gathers, broadcasts, exchanges, and messages to one rank.

use super::core::Core;
use super::results::data;
use crate::all_to_all::{self, Plan};
use crate::counter::Entry;
use crate::direct::{Direct, LARGE, Moves};
use crate::message::{Call, Message, Operation, Part, call_of};
use crate::output::expect_own;
use crate::{Error, Failure, Result, host};
use fp8_kernels::{DType, Device, Shape, Tensor};
use std::ops::Range;

impl Core {
    /// Joins what all ranks have announced or brought: the parts of a gather, of `shape` together.
    pub(super) fn gathered(
        &self,
        all: &[Message],
        x: &Tensor,
        shape: Shape,
        root: Option<usize>,
    ) -> Result<Tensor> {
        if self.direct_gather(all, root).is_none() {
            return host::concatenate(&data(all), shape, x.device());
        }
        let mut out = self.own(host::zeros(x.dtype(), shape))?;
        let copy;
        let own = if *x.device() == Device::cpu() {
            x
        } else {
            copy = self.own(host::copy(x))?;
            &copy
        };
        let (own, room) = (self.own(host::bytes(own))?, self.own(host::bytes_mut(&mut out))?);
        self.gather_into(all, x.dtype(), own, root, room)?;
        host::placed(out, x.device())
    }

    /// Like [`gathered`](Self::gathered), into `out`, which has the shape and is shared with nothing.
    pub(super) fn gather_in_place(
        &self,
        all: &[Message],
        what: &str,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result<()> {
        if *x.device() == Device::cpu() && *out.device() == Device::cpu() {
            let own = self.own(host::bytes(x))?;
            let room = self.own(host::bytes_mut(out))?;
            return self.gather_into(all, x.dtype(), own, None, room);
        }
        let result = self.gathered(all, x, *out.shape(), None)?;
        let result = self.own(host::copy(&result))?;
        self.own(host::store(&result, out, what))
    }

    /// Returns the connections over which parts of a gather come, if some have been announced only.
    fn direct_gather(&self, all: &[Message], root: Option<usize>) -> Option<&dyn Direct> {
        let parts = all.iter().enumerate().filter_map(|(rank, message)| Some((rank, message.part.as_ref()?)));
        let mut parts = parts.filter(|(rank, _)| root.is_none_or(|root| root == *rank));
        self.direct.as_deref().filter(|_| parts.any(|(_, part)| part.data.is_none()))
    }

    /// Fills `out` with the parts of a gather, or with the part of `root`. `own` are the bytes of this rank's.
    pub(super) fn gather_into(
        &self,
        all: &[Message],
        dtype: DType,
        own: &[u8],
        root: Option<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let this = self.exchange.rank();
        let (mut start, mut sent) = (0, 0..0);
        let mut received = Vec::with_capacity(all.len());
        for (rank, message) in all.iter().enumerate() {
            let part = message.part.as_ref().filter(|_| root.is_none_or(|root| root == rank));
            let place = start..start + part.map_or(0, |part| part.shape.numel() * dtype.size());
            start = place.end;
            let mut comes = 0..0;
            match part.map(|part| &part.data) {
                Some(Some(brought)) => {
                    if let Some(room) = out.get_mut(place) {
                        self.own(host::store_bytes(brought, room))?;
                    }
                }
                Some(None) if rank == this => {
                    sent = 0..own.len();
                    if let Some(room) = out.get_mut(place).filter(|room| room.len() == own.len()) {
                        room.copy_from_slice(own);
                    }
                }
                Some(None) => comes = place,
                None => {}
            }
            received.push(comes);
        }
        let Some(direct) = self.direct_gather(all, root) else { return Ok(()) };
        let mut job = Moves::new(own, out, vec![sent; all.len()], received);
        direct.run(&*self.exchange, &call_of(all), &mut job)
    }

    /// Replaces `x` by that of rank `root`, in place.
    pub(super) fn broadcast_in_place(&self, what: &str, x: &mut Tensor, root: usize) -> Result<()> {
        self.own(expect_own(x, what))?;
        let (this, operation) = (self.exchange.rank(), Operation::Broadcast { root });
        let is_brought = this == root && self.direct(x).is_none();
        let part = if is_brought { self.own(Part::copy(x))? } else { Part::expected(x) };
        self.count(operation, x);
        let all = self.compare(Message::new(operation, what).with(part))?;
        if root >= self.exchange.world_size() {
            return Err(Error::Root { call: call_of(&all), root, world_size: self.exchange.world_size() });
        }
        if *x.device() != Device::cpu() {
            let result = self.gathered(&all, x, *x.shape(), Some(root))?;
            if this == root {
                return Ok(());
            }
            let result = self.own(host::copy(&result))?;
            return self.own(host::store(&result, x, what));
        }
        let dtype = x.dtype();
        if this == root {
            return self.gather_into(&all, dtype, self.own(host::bytes(x))?, Some(root), &mut []);
        }
        let room = self.own(host::bytes_mut(x))?;
        self.gather_into(&all, dtype, &[], Some(root), room)
    }

    /// Sends each rank its rows of `x`. Returns the rows that come from all ranks, in rank order, and how many come from each.
    pub(super) fn all_to_all(
        &self,
        what: &str,
        x: &Tensor,
        counts: &[usize],
    ) -> Result<(Tensor, Vec<usize>)> {
        let message = self.own(all_to_all::message(what, x, counts))?;
        let all = self.compare(message)?;
        let (this, device) = (self.exchange.rank(), x.device());
        let plan = Plan::new(&all, x, this)?;
        let row = plan.row_bytes(x.dtype());
        self.traffic.add(Entry::of_all_to_all(plan.rows_to_others(this).saturating_mul(row)));
        let direct = self.direct.as_deref().filter(|_| plan.rows_of_all.saturating_mul(row) > LARGE);
        let Some(direct) = direct else {
            let part = self.own(Part::copy(x))?;
            let all = self.compare(Message::new(Operation::AllToAll, what).with(part))?;
            let cut = |(x, rows): (&Tensor, &Range<usize>)| {
                let elements = rows.start * plan.row..rows.end * plan.row;
                host::cut(x, elements.clone(), [elements.len()].into(), &Device::cpu())
            };
            let parts = data(&all).into_iter().zip(&plan.taken).map(cut).collect::<Result<Vec<_>>>();
            let parts = self.own(parts)?;
            let joined = host::concatenate(&parts.iter().collect::<Vec<_>>(), plan.shape, device);
            return Ok((self.own(joined)?, plan.counts()));
        };
        let bytes = |rows: &Range<usize>| rows.start * row..rows.end * row;
        let of = |places: &[Range<usize>]| places.iter().map(bytes).collect::<Vec<_>>();
        let (sent, received) = (of(&plan.sent), of(&plan.received));
        let copy;
        let own = if *device == Device::cpu() {
            x
        } else {
            copy = self.own(host::copy(x))?;
            &copy
        };
        let own = self.own(host::bytes(own))?;
        let mut out = self.own(host::zeros(x.dtype(), plan.shape))?;
        let room = self.own(host::bytes_mut(&mut out))?;
        keep(own, &sent, room, &received, this);
        direct.run(&*self.exchange, &call_of(&all), &mut Moves::new(own, room, sent, received))?;
        Ok((host::placed(out, device)?, plan.counts()))
    }

    /// Sends `x` to rank `to`.
    pub(super) fn send(&self, what: &str, x: &Tensor, to: usize) -> Result<()> {
        let operation = Operation::Send { to };
        self.expect_peer(operation, what, to)?;
        let part = self.own(Part::copy(x))?;
        self.exchange.send_to(to, Message::new(operation, what).with(part))?;
        self.count(operation, x);
        Ok(())
    }

    /// Stores what rank `from` sends in `x`.
    pub(super) fn recv(&self, what: &str, x: &mut Tensor, from: usize) -> Result<()> {
        let expected = Message::new(Operation::Receive { from }, what).with(Part::expected(x));
        self.expect_peer(expected.call.operation, what, from)?;
        self.own(expect_own(x, what))?;
        let message = self.exchange.receive_from(from, &expected.call)?;
        let this = self.exchange.rank();
        let data = message.part.as_ref().and_then(|part| part.data.as_ref());
        let difference = message.difference_in_mail(from, &expected, this);
        match (difference, data) {
            (None, Some(data)) => self.own(host::store(data, x, what)),
            (difference, _) => {
                let empty =
                    || Failure::Lost { rank: from, reason: "it sent a tensor without elements".to_owned() };
                let failure = difference.unwrap_or_else(empty);
                self.exchange.fail(failure.clone());
                let failure = self.exchange.failure().unwrap_or(failure);
                Err(Error::Failed { call: expected.call.to_string(), failure })
            }
        }
    }

    fn expect_peer(&self, operation: Operation, what: &str, peer: usize) -> Result<()> {
        let (rank, world_size) = (self.exchange.rank(), self.exchange.world_size());
        if peer < world_size && peer != rank {
            return Ok(());
        }
        let call = Call { operation, what: what.to_owned() }.to_string();
        Err(Error::Peer { call, rank, world_size })
    }
}

/// Copies the bytes that a rank has for itself.
fn keep(own: &[u8], sent: &[Range<usize>], out: &mut [u8], received: &[Range<usize>], rank: usize) {
    if let (Some(from), Some(to)) = (sent.get(rank), received.get(rank))
        && let (Some(bytes), Some(room)) = (own.get(from.clone()), out.get_mut(to.clone()))
    {
        room.copy_from_slice(bytes);
    }
}
