//! The collectives of groups of GPUs.

use super::api;
use super::group::{Group, address, call};
use super::reductions::expect_reducible;
use crate::counter::Entry;
use crate::division::Division;
use crate::message::{Call, Message, Operation};
use crate::{Error, Pending, ProcessGroup, ReduceOp, Result, StateDigest, Traffic, agreement, host};
use fp8_kernels::{Arena, DType, Fp8Tensor, Operand, Slot, Tensor, interop};
use fp8_recipe::AmaxGroup;
use std::sync::Arc;
use std::thread;

impl AmaxGroup for Group {
    fn id(&self) -> &str {
        self.control().id()
    }

    fn world_size(&self) -> usize {
        self.control().world_size()
    }

    fn members(&self) -> Vec<usize> {
        self.members.clone()
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> fp8_recipe::Result<()> {
        let _turn = self.turn.lock();
        let message = Message { names: names.to_vec(), ..Message::new(Operation::AgreeOnNames, key) };
        self.exchange(message)?;
        Ok(())
    }

    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> fp8_recipe::Result<()> {
        let _turn = self.turn.lock();
        let message = self.own(agreement::message(what, state))?;
        Ok(agreement::expect_agreement(&self.exchange(message)?)?)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> fp8_recipe::Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduceArena, key);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, arena.device()))?;
        let row = self.own(interop::staged_address(arena).map_err(Error::from))?;
        let len = arena.staged_len();
        let number = self.compare_once(&call, DType::F32, [len].into())?;
        if len > 0 {
            self.add(Entry::of_amaxes(len, self.world_size()));
            self.queue(&call, Some(number), |api, comm, stream| {
                // SAFETY: `row` is the address of `len` f32, reduced in place; the arena's memory is freed in stream order.
                ("ncclAllReduce", unsafe {
                    (api.all_reduce)(row, row, len, api::FLOAT32, api::MAX, comm, stream)
                })
            })?;
        }
        Ok(())
    }

    fn poison(&self, reason: &str) {
        self.control().poison(reason);
    }
}

impl ProcessGroup for Group {
    fn rank(&self) -> usize {
        self.control().rank()
    }

    fn handle_number(&self) -> u64 {
        self.number
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduce(op), what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        if x.dtype() == DType::I32 {
            let result = self.reduce_on_hosts(&call, x, op)?;
            return host::cut(&result, 0..x.numel(), *x.shape(), x.device());
        }
        let number = self.compare_once(&call, x.dtype(), *x.shape())?;
        expect_reducible(&call, x, op)?;
        let out = self.empty_like(x, *x.shape(), x.dtype())?;
        let buffers = [self.own(address(x))?, self.own(address(&out))?];
        self.reduce(&call, Some(number), x, op, buffers)?;
        Ok(out)
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        self.reduce_in_place(what, x, op)
    }

    fn all_reduce_coalesced(&self, what: &str, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
        self.queue_all(what, tensors, op, false).map(drop)
    }

    fn start_all_reduce(&self, what: &str, tensors: Vec<Tensor>, op: ReduceOp) -> Pending {
        self.start(what, tensors, op)
    }

    fn traffic(&self) -> Traffic {
        self.traffic.traffic()
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        self.gather(what, x)
    }

    fn all_gather_into(&self, what: &str, x: &Tensor, out: &mut Tensor) -> Result<()> {
        self.gather_in_place(what, x, out)
    }

    fn all_to_all(&self, what: &str, x: &Tensor, counts: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        self.exchange_rows(what, x, counts)
    }

    fn send(&self, what: &str, x: &Tensor, to: usize) -> Result<()> {
        self.send_to(what, x, to)
    }

    fn recv(&self, what: &str, x: &mut Tensor, from: usize) -> Result<()> {
        self.receive_from(what, x, from)
    }

    fn quantized_all_gather(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        self.gather_quantized(what, shard, slot)
    }

    fn gather_codes(&self, what: &str, shard: &Fp8Tensor) -> Result<Fp8Tensor> {
        self.gather_fp8(what, shard)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.scatter_reduced(what, x, op)
    }

    fn reduce_scatter_into(&self, what: &str, x: &Tensor, op: ReduceOp, out: &mut Tensor) -> Result<()> {
        self.scatter_reduced_in_place(what, x, op, out)
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::Broadcast { root }, what);
        let number = self.compare_root(&call, x, root)?;
        let out = self.empty_like(x, *x.shape(), x.dtype())?;
        if out.numel() > 0 {
            let to = self.own(address(&out))?;
            let from = if self.rank() == root { self.own(address(x))? } else { to };
            self.broadcast_bytes(&call, number, x, root, [from, to])?;
        }
        Ok(out)
    }

    fn broadcast_in_place(&self, what: &str, x: &mut Tensor, root: usize) -> Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::Broadcast { root }, what);
        self.expect_alive(&call)?;
        let place = interop::address_mut(x, what).map_err(Error::from);
        let place = self.own(self.expect_device(&call, x.device()).and(place))?;
        let number = self.compare_root(&call, x, root)?;
        match x.numel() {
            0 => Ok(()),
            _ => self.broadcast_bytes(&call, number, x, root, [place, place]),
        }
    }

    fn split(&self, id: &str, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.divided(&Division::of_color(id, color, key))
    }

    fn subgroup(&self, id: &str, ranks: &[usize]) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.divided(&Division::of_ranks(id, ranks, self.rank(), self.world_size()))
    }

    fn barrier(&self) -> Result<()> {
        let _turn = self.turn.lock();
        self.exchange(Message::new(Operation::Barrier, ""))?;
        Ok(())
    }
}

impl Group {
    /// Compares a broadcast with the other ranks', unless that has been done. Returns the call's number.
    fn compare_root(&self, call: &Call, x: &Tensor, root: usize) -> Result<u64> {
        self.expect_alive(call)?;
        self.own(self.expect_device(call, x.device()))?;
        let number = self.compare_once(call, x.dtype(), *x.shape())?;
        match root < self.world_size() {
            true => Ok(number),
            false => Err(Error::Root { call: call.to_string(), root, world_size: self.world_size() }),
        }
    }

    fn broadcast_bytes(
        &self,
        call: &Call,
        number: u64,
        x: &Tensor,
        root: usize,
        [from, to]: [u64; 2],
    ) -> Result<()> {
        let bytes = x.numel() * x.dtype().size();
        self.count(call, x);
        self.queue(call, Some(number), |api, comm, stream| {
            // SAFETY: both name `bytes` bytes of this device, equal or apart, that live until the stream has passed
            // the collective.
            ("ncclBroadcast", unsafe {
                (api.broadcast)(from, to, bytes, api::UINT8, root as i32, comm, stream)
            })
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if thread::panicking() {
            self.poison("its thread panicked");
        }
    }
}
