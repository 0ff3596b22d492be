//! The collectives of all backends in which each rank receives the messages of all ranks: one exchange per collective.
//!
//! Arguments such as the root or the dtype are checked after the exchange. They are known to be equal on all ranks then, so all
//! ranks return the same error.

use crate::group::next_handle_number;
use crate::message::{Message, Operation, Part};
use crate::{Error, Failure, ProcessGroup, ReduceOp, Result, StateDigest, agreement, host};
use fp8_kernels::{Arena, DType, Device, Shape, Tensor};
use fp8_recipe::AmaxGroup;
use std::fmt::Debug;
use std::sync::Arc;

/// A way to exchange messages with the other ranks.
pub(crate) trait Exchange: Debug + Send + Sync {
    fn id(&self) -> &str;

    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Sends `message` and returns the messages of all ranks, in rank order, once they have been compared.
    fn exchange(&self, message: Message) -> Result<Arc<Vec<Message>>>;

    /// Ends the group for all ranks. The first failure is the one that counts.
    fn fail(&self, failure: Failure);

    /// Returns why the group has failed, as far as this rank knows.
    fn failure(&self) -> Option<Failure>;

    /// Returns the ranks that have left, as far as this rank knows. For collectives that do not exchange messages.
    #[cfg(feature = "cuda")]
    fn left(&self) -> Vec<usize>;

    fn poison(&self, reason: &str) {
        self.fail(Failure::GaveUp { rank: self.rank(), reason: reason.to_owned() });
    }
}

/// A rank, over some way to exchange messages.
#[derive(Debug)]
pub(crate) struct Member<T> {
    exchange: T,
    number: u64,
}

impl<T: Exchange> Member<T> {
    pub(crate) fn new(exchange: T) -> Self {
        Self { exchange, number: next_handle_number() }
    }

    /// If an operation of this rank alone fails, tells the other ranks, which would wait for it otherwise.
    fn own<V>(&self, result: Result<V>) -> Result<V> {
        result.inspect_err(|error| self.exchange.poison(&error.to_string()))
    }

    fn call(&self, operation: Operation, what: &str, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        let part = self.own(Part::copy(x))?;
        self.exchange.exchange(Message::new(operation, what).with(part))
    }

    fn shape_error(&self, all: &[Message], shape: Shape, remedy: &'static str) -> Error {
        Error::Shape { call: call_of(all), shape, world_size: self.exchange.world_size(), remedy }
    }
}

impl<T: Exchange> AmaxGroup for Member<T> {
    fn id(&self) -> &str {
        self.exchange.id()
    }

    fn world_size(&self) -> usize {
        self.exchange.world_size()
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

impl<T: Exchange> ProcessGroup for Member<T> {
    fn rank(&self) -> usize {
        self.exchange.rank()
    }

    fn handle_number(&self) -> u64 {
        self.number
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let all = self.call(Operation::AllReduce(op), what, x)?;
        expect_f32(&all, x)?;
        let mut out = vec![0.0; x.numel()];
        host::reduce(&mut out, &data(&all), 0..x.numel(), op)?;
        Ok(Tensor::from_vec(out, *x.shape(), x.device())?)
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        // Checked before the exchange: if this rank fails, the others must not compute the sum.
        self.own(expect_own(x, what))?;
        let all = self.call(Operation::AllReduce(op), what, x)?;
        expect_f32(&all, x)?;
        let range = 0..x.numel();
        if let Ok(out) = x.as_mut_slice(what) {
            return host::reduce(out, &data(&all), range, op);
        }
        let mut out = vec![0.0; x.numel()];
        host::reduce(&mut out, &data(&all), range, op)?;
        self.own(x.write(&out, what).map_err(Error::from))
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
        expect_f32(&all, x)?;
        let (mut dims, parts) = (x.shape().to_vec(), self.exchange.world_size());
        let uneven =
            || self.shape_error(&all, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(parts)).ok_or_else(uneven)?;
        *rows /= parts;
        let shape = Shape::from_slice(&dims).ok_or_else(uneven)?;
        let mut out = vec![0.0; shape.numel()];
        let start = self.exchange.rank() * out.len();
        let range = start..start + out.len();
        host::reduce(&mut out, &data(&all), range, op)?;
        Ok(Tensor::from_vec(out, shape, x.device())?)
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

/// Returns the call, which is equal on all ranks.
fn call_of(all: &[Message]) -> String {
    all.first().map(|message| message.call.to_string()).unwrap_or_default()
}

fn expect_f32(all: &[Message], x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 => Ok(()),
        found => Err(Error::DType { call: call_of(all), found, expected: "f32" }),
    }
}
