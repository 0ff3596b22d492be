//! The collectives of all backends in which each rank receives the messages of all ranks: one exchange per collective.
//!
//! Arguments such as the root or the dtype are checked after the exchange. They are known to be equal on all ranks then, so all
//! ranks return the same error.

use crate::direct::{Direct, Gather, LARGE, Reduce};
use crate::division::{self, Divide, Division, End};
use crate::exchange::Exchange;
use crate::group::next_handle_number;
use crate::message::{Message, Operation, Part, call_of};
use crate::{Error, ProcessGroup, ReduceOp, Result, StateDigest, agreement, host};
use fp8_kernels::{Arena, DType, Device, Shape, Tensor, bf16, f16};
use fp8_recipe::AmaxGroup;
use parking_lot::Mutex;
use std::fmt::Debug;
use std::sync::Arc;

/// A rank, over some way to exchange messages.
#[derive(Debug)]
pub(crate) struct Member {
    exchange: Box<dyn Exchange>,
    divide: Box<dyn Divide>,
    direct: Option<Box<dyn Direct>>,
    /// Serializes threads that share a handle: an exchange, and the bytes that it announces.
    turn: Mutex<()>,
    members: Vec<usize>,
    number: u64,
}

impl Member {
    /// A rank of a job's first group.
    pub(crate) fn new(End { exchange, divide, direct }: End) -> Self {
        let members = (0..exchange.world_size()).collect();
        Self { exchange, divide, direct, turn: Mutex::new(()), members, number: next_handle_number() }
    }

    /// If an operation of this rank alone fails, tells the other ranks, which would wait for it otherwise.
    fn own<V>(&self, result: Result<V>) -> Result<V> {
        result.inspect_err(|error| self.exchange.poison(&error.to_string()))
    }

    fn call(&self, operation: Operation, what: &str, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        let part = self.own(Part::copy(x))?;
        self.exchange.exchange(Message::new(operation, what).with(part))
    }

    /// Like [`call`](Self::call), without the elements, which go directly.
    fn announce(&self, operation: Operation, what: &str, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        self.exchange.exchange(Message::new(operation, what).with(Part::expected(x)))
    }

    /// Returns the connections over which the elements of `x` go directly, if they do.
    fn direct(&self, x: &Tensor) -> Option<&dyn Direct> {
        self.direct.as_deref().filter(|_| x.numel() * x.dtype().size() > LARGE)
    }

    /// Like [`direct`](Self::direct), for a reduction. Sums of integers may not fit, which all ranks must know before one has
    /// its result.
    fn direct_reduction(&self, x: &Tensor) -> Option<&dyn Direct> {
        self.direct(x).filter(|_| x.dtype() != DType::I32)
    }

    /// Reduces `x`, which is in host memory and shared with nothing, directly between the ranks that have announced the call. If
    /// not `to_all`, each rank has the result in its own part only.
    fn reduce_directly(
        &self,
        direct: &dyn Direct,
        all: &[Message],
        x: &mut Tensor,
        op: ReduceOp,
        to_all: bool,
    ) -> Result<()> {
        let call = call_of(all);
        let (exchange, dtype) = (&*self.exchange, x.dtype());
        if !host::is_reducible(dtype, op) {
            return Err(not_reducible(&call, dtype, op));
        }
        let (rank, ranks) = (exchange.rank(), exchange.world_size());
        let what = all.first().map_or("", |message| &message.call.what);
        macro_rules! reduce {
            ($t:ty) => {{
                let data = self.own(x.as_mut_slice::<$t>(what).map_err(Error::from))?;
                let mut job = match to_all {
                    true => Reduce::to_all(rank, ranks, data, op),
                    false => Reduce::to_owners(rank, ranks, data, op),
                };
                direct.run(exchange, &call, &mut job)
            }};
        }
        match dtype {
            DType::F32 => reduce!(f32),
            DType::BF16 => reduce!(bf16),
            DType::F16 => reduce!(f16),
            DType::I32 | DType::U8 => Err(not_reducible(&call, dtype, op)),
        }
    }

    /// Joins what all ranks have announced or brought: the parts of a gather, of `shape` together. Those without elements come
    /// directly.
    fn gathered(&self, all: &[Message], x: &Tensor, shape: Shape, root: Option<usize>) -> Result<Tensor> {
        let dtype = x.dtype();
        let parts: Vec<_> = all.iter().filter_map(|message| message.part.as_ref()).collect();
        let Some(direct) = self.direct.as_deref().filter(|_| {
            let comes =
                |(rank, part): (usize, &&Part)| part.data.is_none() && root.is_none_or(|root| root == rank);
            parts.iter().enumerate().any(comes)
        }) else {
            return host::concatenate(&data(all), shape, x.device());
        };
        let mut start = 0;
        let mut places = Vec::with_capacity(parts.len());
        let mut out = self.own(host::zeros(dtype, shape))?;
        let bytes = self.own(host::bytes_mut(&mut out))?;
        for (rank, part) in parts.iter().enumerate() {
            let is_sender = root.is_none_or(|root| root == rank);
            let place = start..start + if is_sender { part.shape.numel() * dtype.size() } else { 0 };
            start = place.end;
            let own;
            let brought = match &part.data {
                None if rank == self.rank() && is_sender => {
                    own = self.own(host::copy(x))?;
                    Some(&own)
                }
                brought => brought.as_ref(),
            };
            if let (Some(brought), Some(room)) = (brought, bytes.get_mut(place.clone())) {
                self.own(host::store_bytes(brought, room))?;
            }
            places.push(if part.data.is_some() { 0..0 } else { place });
        }
        direct.run(&*self.exchange, &call_of(all), &mut Gather::new(self.rank(), bytes, places))?;
        host::placed(out, x.device())
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
        let _turn = self.turn.lock();
        let operation = Operation::AllReduce(op);
        if let Some(direct) = self.direct_reduction(x) {
            let all = self.announce(operation, what, x)?;
            let mut result = self.own(host::copy(x))?;
            self.reduce_directly(direct, &all, &mut result, op, true)?;
            return host::placed(result, x.device());
        }
        let all = self.call(operation, what, x)?;
        let result = reduced(&all, x.dtype(), op)?;
        host::cut(&result, 0..x.numel(), *x.shape(), x.device())
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        // Checked before the exchange: if this rank fails, the others must not compute the sum.
        self.own(expect_own(x, what))?;
        let _turn = self.turn.lock();
        let operation = Operation::AllReduce(op);
        if let Some(direct) = self.direct_reduction(x) {
            let all = self.announce(operation, what, x)?;
            if *x.device() == Device::cpu() {
                return self.reduce_directly(direct, &all, x, op, true);
            }
            let mut result = self.own(host::copy(x))?;
            self.reduce_directly(direct, &all, &mut result, op, true)?;
            return self.own(host::store(&result, x, what));
        }
        let all = self.call(operation, what, x)?;
        let result = reduced(&all, x.dtype(), op)?;
        self.own(host::store(&result, x, what))
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let all = match self.direct(x) {
            Some(_) => self.announce(Operation::AllGather, what, x)?,
            None => self.call(Operation::AllGather, what, x)?,
        };
        let shards = all.iter().filter_map(|message| message.part.as_ref());
        let mut dims = x.shape().to_vec();
        let scalar = || self.shape_error(&all, *x.shape(), "a scalar has no dimension 0; reshape it to [1]");
        // Shards without elements may have any number of rows.
        let mut rows = shards.filter_map(|shard| shard.shape.first());
        let rows = rows.try_fold(0, |sum: usize, &rows| sum.checked_add(rows));
        let too_many = || self.shape_error(&all, *x.shape(), "the rows of all ranks together exceed usize");
        *dims.first_mut().ok_or_else(scalar)? = rows.ok_or_else(too_many)?;
        let shape = Shape::from_slice(&dims).ok_or_else(scalar)?;
        self.gathered(&all, x, shape, None)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let operation = Operation::ReduceScatter(op);
        let direct = self.direct_reduction(x);
        let all = match direct {
            Some(_) => self.announce(operation, what, x)?,
            None => self.call(operation, what, x)?,
        };
        let (mut dims, parts) = (x.shape().to_vec(), self.exchange.world_size());
        let uneven =
            || self.shape_error(&all, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(parts)).ok_or_else(uneven)?;
        *rows /= parts;
        let shape = Shape::from_slice(&dims).ok_or_else(uneven)?;
        let start = self.exchange.rank() * shape.numel();
        let result = match direct {
            Some(direct) => {
                let mut result = self.own(host::copy(x))?;
                self.reduce_directly(direct, &all, &mut result, op, false)?;
                result
            }
            None => reduced(&all, x.dtype(), op)?,
        };
        host::cut(&result, start..start + shape.numel(), shape, x.device())
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let message = Message::new(Operation::Broadcast { root }, what);
        let is_brought = self.exchange.rank() == root && self.direct(x).is_none();
        let part = if is_brought { self.own(Part::copy(x))? } else { Part::expected(x) };
        let all = self.exchange.exchange(message.with(part))?;
        if root >= self.exchange.world_size() {
            return Err(Error::Root { call: call_of(&all), root, world_size: self.exchange.world_size() });
        }
        self.gathered(&all, x, *x.shape(), Some(root))
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
