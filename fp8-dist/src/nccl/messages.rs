//! Rows that all ranks exchange, and messages from one rank to another.
//!
//! The hosts of two ranks compare the first message with a name, dtype and shape. Later ones involve no host: a number that
//! identifies the call travels with the elements, and a kernel of the receiver compares it with the one that it expects.

use super::agreed;
use super::api::{self, Api, Comm, Stream};
use super::communicator::Answer;
use super::group::{Group, address, call};
use crate::all_to_all::{self, Plan};
use crate::counter::Entry;
use crate::message::{Call, Message, Operation, Part};
use crate::{Error, Result};
use fp8_kernels::{Tensor, interop, ops};
use std::sync::Arc;

/// Bytes that go to another rank or come from it.
struct Half {
    is_sent: bool,
    peer: usize,
    place: u64,
    bytes: usize,
}

impl Group {
    /// [`ProcessGroup::all_to_all`](crate::ProcessGroup::all_to_all).
    pub(super) fn exchange_rows(
        &self,
        what: &str,
        x: &Tensor,
        counts: &[usize],
    ) -> Result<(Tensor, Vec<usize>)> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllToAll, what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        let all = self.exchange(self.own(all_to_all::message(what, x, counts))?)?;
        let this = self.control().rank();
        let plan = Plan::new(&all, x, this)?;
        let row = plan.row_bytes(x.dtype());
        let out = self.empty_like(x, plan.shape, x.dtype())?;
        let mut halves = Vec::new();
        for (is_sent, tensor, places) in [(true, x, &plan.sent), (false, &out, &plan.received)] {
            for (peer, rows) in places.iter().enumerate().filter(|(_, rows)| rows.len() * row > 0) {
                let place = self.own(address(tensor))? + (rows.start * row) as u64;
                halves.push(Half { is_sent, peer, place, bytes: rows.len() * row });
            }
        }
        self.add(Entry::of_all_to_all(plan.rows_to_others(this).saturating_mul(row)));
        if !halves.is_empty() {
            let partners = halves.iter().map(|half| half.peer).filter(|&peer| peer != this).collect();
            self.queue_among(&call, partners, |api, comm, stream| move_all(api, comm, stream, &halves))?;
        }
        Ok((out, plan.counts()))
    }

    /// [`ProcessGroup::send`](crate::ProcessGroup::send).
    pub(super) fn send_to(&self, what: &str, x: &Tensor, to: usize) -> Result<()> {
        let call = call(Operation::Send { to }, what);
        let place = || self.own(address(x));
        self.message(&call, to, x, place)
    }

    /// [`ProcessGroup::recv`](crate::ProcessGroup::recv).
    pub(super) fn receive_from(&self, what: &str, x: &mut Tensor, from: usize) -> Result<()> {
        let call = call(Operation::Receive { from }, what);
        let place = interop::address_mut(x, what).map_err(Error::from);
        self.message(&call, from, x, || self.own(place))
    }

    fn message(
        &self,
        call: &Call,
        peer: usize,
        x: &Tensor,
        place: impl FnOnce() -> Result<u64>,
    ) -> Result<()> {
        let _turn = self.turn.lock();
        self.expect_alive(call)?;
        let (rank, world_size) = (self.control().rank(), self.control().world_size());
        if peer >= world_size || peer == rank {
            return Err(Error::Peer { call: call.to_string(), rank, world_size });
        }
        self.own(self.expect_device(call, x.device()))?;
        let place = place()?;
        let numbers = self.numbers(call, peer, x)?;
        let is_sent = matches!(call.operation, Operation::Send { .. });
        // The sender's number is the first; the receiver gets it behind its own.
        let number = self.own(address(&numbers))? + if is_sent { 0 } else { 4 };
        let mut halves = vec![Half { is_sent, peer, place: number, bytes: 4 }];
        let bytes = x.numel() * x.dtype().size();
        if bytes > 0 {
            halves.push(Half { is_sent, peer, place, bytes });
        }
        self.count(call, x);
        self.queue_among(call, vec![peer], |api, comm, stream| move_all(api, comm, stream, &halves))?;
        if !is_sent {
            let named = format!("{call}, as rank 0 beside the sender's as rank 1");
            self.own(ops::compare_calls(&named, &numbers, None).map_err(Error::from))?;
        }
        Ok(())
    }

    /// Returns the number of a message, twice. The hosts of both ranks compare the first message of a name, dtype and shape.
    fn numbers(&self, call: &Call, peer: usize, x: &Tensor) -> Result<Arc<Tensor>> {
        let key = (call.clone(), x.dtype(), *x.shape());
        if let Some(numbers) = self.messages.lock().get(&key) {
            return Ok(numbers.clone());
        }
        let remedy = "send and receive once before recording, with this name, dtype and shape";
        x.device().expect_eager(&call.to_string(), remedy)?;
        let own = Message::new(call.operation, &call.what).with(Part::expected(x));
        match call.operation {
            Operation::Receive { from } => {
                let message = self.control().receive_from(from, call)?;
                if let Some(failure) = message.difference_in_mail(from, &own, self.control().rank()) {
                    self.control().fail(failure.clone());
                    let failure = self.control().failure().unwrap_or(failure);
                    return Err(Error::Failed { call: call.to_string(), failure });
                }
            }
            _ => self.control().send_to(peer, own)?,
        }
        let number = agreed::number(&format!("{}: {}", call.what, x.dtype()), &[*x.shape()]);
        let numbers = Tensor::from_vec(vec![number; 2], [2], x.device()).map_err(Error::from);
        let numbers = Arc::new(self.own(numbers)?);
        self.messages.lock().insert(key, numbers.clone());
        Ok(numbers)
    }
}

/// Moves all halves at once: none waits for another.
fn move_all(api: &Api, comm: Comm, stream: Stream, halves: &[Half]) -> Answer {
    api.grouped(halves.iter().map(|&Half { is_sent, peer, place, bytes }| {
        let peer = peer as i32;
        if is_sent {
            // SAFETY: `place` names `bytes` bytes of this device, which live until the stream has passed the call: memory is
            // reused in stream order. The communicator is alive while it is called.
            return ("ncclSend", unsafe { (api.send)(place, bytes, api::UINT8, peer, comm, stream) });
        }
        // SAFETY: as above; nothing else uses the bytes until the stream has passed the call.
        ("ncclRecv", unsafe { (api.recv)(place, bytes, api::UINT8, peer, comm, stream) })
    }))
}
