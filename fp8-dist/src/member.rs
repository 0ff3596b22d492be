//! The collectives of all backends in which each rank receives the messages of all ranks: one exchange per collective.
//!
//! Arguments such as the root or the dtype are checked after the exchange. They are known to be equal on all ranks then, so all
//! ranks return the same error.

use crate::division::{self, Divide, Division, End};
use crate::exchange::Exchange;
use crate::group::next_handle_number;
use crate::message::{Message, Operation, Part, call_of};
use crate::{Error, ProcessGroup, ReduceOp, Result, StateDigest, agreement, host};
use fp8_kernels::{Arena, DType, Device, Shape, Tensor};
use fp8_recipe::AmaxGroup;
use std::fmt::Debug;
use std::sync::Arc;

/// A rank, over some way to exchange messages.
#[derive(Debug)]
pub(crate) struct Member {
    exchange: Box<dyn Exchange>,
    divide: Box<dyn Divide>,
    members: Vec<usize>,
    number: u64,
}

impl Member {
    /// A rank of a job's first group.
    pub(crate) fn new(End { exchange, divide }: End) -> Self {
        let members = (0..exchange.world_size()).collect();
        Self { exchange, divide, members, number: next_handle_number() }
    }

    /// If an operation of this rank alone fails, tells the other ranks, which would wait for it otherwise.
    fn own<V>(&self, result: Result<V>) -> Result<V> {
        result.inspect_err(|error| self.exchange.poison(&error.to_string()))
    }

    fn call(&self, operation: Operation, what: &str, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        let part = self.own(Part::copy(x))?;
        self.exchange.exchange(Message::new(operation, what).with(part))
    }

    fn divided(&self, division: &Division<'_>) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let divided = self.divide.divide(&*self.exchange, division)?;
        Ok(divided.map(|(end, ranks)| {
            let members = division::of(&self.members, &ranks);
            Arc::new(Self { members, ..Self::new(end) }) as Arc<dyn ProcessGroup>
        }))
    }

    fn shape_error(&self, all: &[Message], shape: Shape, remedy: &'static str) -> Error {
        Error::Shape { call: call_of(all), shape, world_size: self.exchange.world_size(), remedy }
    }
}

impl AmaxGroup for Member {
    fn id(&self) -> &str {
        self.exchange.id()
    }

    fn world_size(&self) -> usize {
        self.exchange.world_size()
    }

    fn members(&self) -> Vec<usize> {
        self.members.clone()
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> fp8_recipe::Result<()> {
        let message = Message { names: names.to_vec(), ..Message::new(Operation::AgreeOnNames, key) };
        self.exchange.exchange(message)?;
        Ok(())
    }

    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> fp8_recipe::Result<()> {
        let message = self.own(agreement::message(what, state))?;
        Ok(agreement::expect_agreement(&self.exchange.exchange(message)?)?)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> fp8_recipe::Result<()> {
        let row = arena.staged().and_then(|row| Tensor::from_vec(row, [arena.staged_len()], &Device::cpu()));
        let row = self.own(row.map_err(Error::from))?;
        let all = self.call(Operation::AllReduceArena, key, &row)?;
        for row in data(&all) {
            arena.merge_staged(row.as_slice()?)?;
        }
        Ok(())
    }

    fn poison(&self, reason: &str) {
        self.exchange.poison(reason);
    }
}

impl ProcessGroup for Member {
    fn rank(&self) -> usize {
        self.exchange.rank()
    }

    fn handle_number(&self) -> u64 {
        self.number
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let all = self.call(Operation::AllReduce(op), what, x)?;
        let result = reduced(&all, x.dtype(), op)?;
        host::cut(&result, 0..x.numel(), *x.shape(), x.device())
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        // Checked before the exchange: if this rank fails, the others must not compute the sum.
        self.own(expect_own(x, what))?;
        let all = self.call(Operation::AllReduce(op), what, x)?;
        let result = reduced(&all, x.dtype(), op)?;
        self.own(host::store(&result, x, what))
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        let all = self.call(Operation::AllGather, what, x)?;
        let shards = data(&all);
        let mut dims = x.shape().to_vec();
        let scalar = || self.shape_error(&all, *x.shape(), "a scalar has no dimension 0; reshape it to [1]");
        *dims.first_mut().ok_or_else(scalar)? = shards.iter().filter_map(|shard| shard.shape().first()).sum();
        let shape = Shape::from_slice(&dims).ok_or_else(scalar)?;
        host::concatenate(&shards, shape, x.device())
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let all = self.call(Operation::ReduceScatter(op), what, x)?;
        let result = reduced(&all, x.dtype(), op)?;
        let (mut dims, parts) = (x.shape().to_vec(), self.exchange.world_size());
        let uneven =
            || self.shape_error(&all, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(parts)).ok_or_else(uneven)?;
        *rows /= parts;
        let shape = Shape::from_slice(&dims).ok_or_else(uneven)?;
        let start = self.exchange.rank() * shape.numel();
        host::cut(&result, start..start + shape.numel(), shape, x.device())
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor> {
        let message = Message::new(Operation::Broadcast { root }, what);
        let part = if self.exchange.rank() == root { self.own(Part::copy(x))? } else { Part::expected(x) };
        let all = self.exchange.exchange(message.with(part))?;
        if root >= self.exchange.world_size() {
            return Err(Error::Root { call: call_of(&all), root, world_size: self.exchange.world_size() });
        }
        host::concatenate(&data(&all), *x.shape(), x.device()) // only the root brought data
    }

    fn split(&self, id: &str, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.divided(&Division::of_color(id, color, key))
    }

    fn subgroup(&self, id: &str, ranks: &[usize]) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.divided(&Division::of_ranks(id, ranks, self.rank(), self.world_size()))
    }

    fn barrier(&self) -> Result<()> {
        self.exchange.exchange(Message::new(Operation::Barrier, ""))?;
        Ok(())
    }
}

/// Returns an error if the storage is shared.
fn expect_own(x: &Tensor, what: &str) -> Result<()> {
    match x.holders() {
        0 => Ok(()),
        holders => Err(fp8_kernels::Error::Shared { name: what.to_owned(), holders }.into()),
    }
}

fn data(all: &[Message]) -> Vec<&Tensor> {
    all.iter().filter_map(|message| message.part.as_ref()?.data.as_ref()).collect()
}

/// Returns the result of a reduction, or why there is none, which all ranks find alike.
pub(crate) fn reduced(all: &[Message], dtype: DType, op: ReduceOp) -> Result<Tensor> {
    if !host::is_reducible(dtype, op) {
        return Err(not_reducible(&call_of(all), dtype, op));
    }
    match data(all).as_slice() {
        [result] => Ok((*result).clone()),
        // There was no room for it, or no sum that fits.
        parts => host::reduce(parts, op)?.ok_or_else(|| Error::Overflow { call: call_of(all) }),
    }
}

/// The error for a dtype that does not have an operation.
pub(crate) fn not_reducible(call: &str, found: DType, op: ReduceOp) -> Error {
    let expected = match op {
        ReduceOp::Avg => "f32, bf16 or f16",
        ReduceOp::Sum | ReduceOp::Max => "f32, bf16, f16 or i32",
    };
    Error::DType { call: call.to_owned(), found, expected }
}
