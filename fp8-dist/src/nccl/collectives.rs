//! The collectives of groups of GPUs.

use super::api;
use super::group::{Group, address, call, float_number, op_number};
use super::reductions::expect_reducible;
use crate::counter::Entry;
use crate::division::Division;
use crate::message::{Message, Operation};
use crate::{Error, Pending, ProcessGroup, ReduceOp, Result, StateDigest, Traffic, agreement, host};
use fp8_kernels::{Arena, DType, Operand, Shape, Slot, Tensor, interop};
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

    fn quantized_all_gather(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        self.gather_quantized(what, shard, slot)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::ReduceScatter(op), what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        let (sum, number) = if x.dtype() == DType::I32 {
            (Some(self.reduce_on_hosts(&call, x, op)?), None)
        } else {
            (None, Some(self.compare_once(&call, x.dtype(), *x.shape())?))
        };
        expect_reducible(&call, x, op)?;
        let (mut dims, ranks) = (x.shape().to_vec(), self.world_size());
        let uneven =
            || self.shape_error(&call, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(ranks)).ok_or_else(uneven)?;
        *rows /= ranks;
        let shape = Shape::from_slice(&dims).ok_or_else(uneven)?;
        if let Some(sum) = sum {
            let start = self.rank() * shape.numel();
            return host::cut(&sum, start..start + shape.numel(), shape, x.device());
        }
        let out = self.empty_like(x, shape, x.dtype())?;
        if out.numel() > 0 {
            let dtype = float_number(x.dtype());
            let [from, to] = [self.own(address(x))?, self.own(address(&out))?];
            self.count(&call, x);
            self.queue(&call, number, |api, comm, stream| {
                let each = out.numel();
                // SAFETY: `to` names `each` elements of this device, `from` as many for each rank; both live until the stream
                // has passed the collective.
                ("ncclReduceScatter", unsafe {
                    (api.reduce_scatter)(from, to, each, dtype, op_number(op), comm, stream)
                })
            })?;
        }
        Ok(out)
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::Broadcast { root }, what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        let number = self.compare_once(&call, x.dtype(), *x.shape())?;
        if root >= self.world_size() {
            return Err(Error::Root { call: call.to_string(), root, world_size: self.world_size() });
        }
        let out = self.empty_like(x, *x.shape(), x.dtype())?;
        if out.numel() > 0 {
            let (to, bytes) = (self.own(address(&out))?, out.numel() * out.dtype().size());
            let from = if self.rank() == root { self.own(address(x))? } else { to };
            self.count(&call, x);
            self.queue(&call, Some(number), |api, comm, stream| {
                // SAFETY: both name `bytes` bytes of this device, equal or apart, that live until the stream has passed
                // the collective.
                ("ncclBroadcast", unsafe {
                    (api.broadcast)(from, to, bytes, api::UINT8, root as i32, comm, stream)
                })
            })?;
        }
        Ok(out)
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

impl Drop for Group {
    fn drop(&mut self) {
        if thread::panicking() {
            self.poison("its thread panicked");
        }
    }
}
