//! Exchanges, and elements that go directly, for one collective at a time.

use super::results::{not_reducible, reduced};
use crate::counter::{Counter, Entry};
use crate::direct::{Direct, LARGE, Reduce};
use crate::division::{Divide, End};
use crate::exchange::Exchange;
use crate::message::{Message, Operation, Part, call_of};
use crate::output::{self, expect_own};
use crate::{Error, ReduceOp, Result, host};
use fp8_kernels::{DType, Device, Shape, Tensor, bf16, f16};
use parking_lot::Mutex;
use std::sync::Arc;

/// A rank's end of a group, which its handle shares with the thread that does pending work.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) exchange: Box<dyn Exchange>,
    pub(super) divide: Box<dyn Divide>,
    pub(super) direct: Option<Box<dyn Direct>>,
    /// Serializes threads that share a handle: an exchange, and the bytes that it announces.
    pub(super) turn: Mutex<()>,
    pub(super) traffic: Counter,
}

impl Core {
    pub(super) fn new(End { exchange, divide, direct }: End) -> Self {
        Self { exchange, divide, direct, turn: Mutex::new(()), traffic: Counter::default() }
    }

    /// Exchanges messages with the other ranks.
    pub(super) fn compare(&self, message: Message) -> Result<Arc<Vec<Message>>> {
        self.traffic.add_exchange();
        self.exchange.exchange(message)
    }

    /// If an operation of this rank alone fails, tells the other ranks, which would wait for it otherwise.
    pub(super) fn own<V>(&self, result: Result<V>) -> Result<V> {
        result.inspect_err(|error| self.exchange.poison(&error.to_string()))
    }

    pub(super) fn call(&self, operation: Operation, what: &str, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        let part = self.own(Part::copy(x))?;
        self.count(operation, x);
        self.compare(Message::new(operation, what).with(part))
    }

    /// Like [`call`](Self::call), without the elements, which go directly.
    pub(super) fn announce(&self, operation: Operation, what: &str, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        self.count(operation, x);
        self.compare(Message::new(operation, what).with(Part::expected(x)))
    }

    /// Counts a call with `x`.
    pub(super) fn count(&self, operation: Operation, x: &Tensor) {
        let (rank, ranks) = (self.exchange.rank(), self.exchange.world_size());
        self.traffic.add(Entry::of(operation, x, rank, ranks));
    }

    /// Returns the connections over which the elements of `x` go directly, if they do.
    pub(super) fn direct(&self, x: &Tensor) -> Option<&dyn Direct> {
        self.direct.as_deref().filter(|_| x.numel() * x.dtype().size() > LARGE)
    }

    /// Like [`direct`](Self::direct), for a reduction. Sums of integers may not fit, which all ranks must know before one has
    /// its result.
    pub(super) fn direct_reduction(&self, x: &Tensor) -> Option<&dyn Direct> {
        self.direct(x).filter(|_| x.dtype() != DType::I32)
    }

    /// Reduces `x`, which is in host memory and shared with nothing, directly between the ranks that have announced the call. If
    /// not `to_all`, each rank has the result in its own part only.
    pub(super) fn reduce_directly(
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

    /// Reduces `x` in place.
    pub(super) fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        // Checked before the exchange: if this rank fails, the others must not compute the sum.
        self.own(expect_own(x, what))?;
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

    /// Reduces all of `tensors` in place, by one call if they have one dtype.
    pub(super) fn all_reduce_coalesced(
        &self,
        what: &str,
        tensors: &mut [Tensor],
        op: ReduceOp,
    ) -> Result<()> {
        let (first, others) = match tensors {
            [] => return Ok(()),
            [x] => return self.all_reduce_in_place(what, x, op),
            [first, others @ ..] => (&*first, &*others),
        };
        let dtype = first.dtype();
        let is_together = |x: &Tensor| *x.device() == Device::cpu() && x.dtype() == dtype;
        if dtype == DType::I32 || !is_together(first) || !others.iter().all(is_together) {
            let each = tensors.iter_mut().enumerate();
            return each.into_iter().try_for_each(|(index, x)| {
                self.all_reduce_in_place(&format!("{what}, tensor {index}"), x, op)
            });
        }
        tensors.iter().try_for_each(|x| self.own(expect_own(x, what)))?;
        let (rank, ranks) = (self.exchange.rank(), self.exchange.world_size());
        self.traffic.add(Entry::of_all(op, tensors, rank, ranks));
        // Their sizes are compared by name, since together they may have as many elements on another rank.
        let names = tensors.iter().map(|x| x.shape().to_string().into()).collect();
        let shape = [tensors.iter().map(Tensor::numel).sum::<usize>()].into();
        let small = self.direct.is_none() || tensors.iter().map(bytes).sum::<usize>() <= LARGE;
        let together = |tensors: &[&Tensor]| {
            let shape = [tensors.iter().map(|x| x.numel()).sum::<usize>()].into();
            host::concatenate(tensors, shape, &Device::cpu())
        };
        let data = match small {
            true => Some(self.own(together(&tensors.iter().collect::<Vec<_>>()))?),
            false => None,
        };
        let part = Part { dtype, shape, data };
        let message = Message { names, ..Message::new(Operation::AllReduce(op), what).with(part) };
        let all = self.compare(message)?;
        if small {
            let result = reduced(&all, dtype, op)?;
            return self.own(distribute(&result, tensors.iter_mut(), what));
        }
        // The small ones together, the large ones in place.
        let Some(direct) = self.direct.as_deref() else { return Ok(()) };
        let (mut large, few): (Vec<_>, Vec<_>) = tensors.iter_mut().partition(|x| bytes(x) > LARGE);
        let mut joined = self.own(together(&few.iter().map(|x| &**x).collect::<Vec<_>>()))?;
        self.reduce_directly(direct, &all, &mut joined, op, true)?;
        for x in &mut large {
            self.reduce_directly(direct, &all, x, op, true)?;
        }
        self.own(distribute(&joined, few.into_iter(), what))
    }

    /// Compares the shards of all ranks for a gather, into `out` if memory is given. Returns the messages and the shape of the result.
    pub(super) fn compare_shards(
        &self,
        what: &str,
        x: &Tensor,
        out: Option<&Tensor>,
    ) -> Result<(Arc<Vec<Message>>, Shape)> {
        let is_brought = self.direct(x).is_none();
        let all = self.compare_with_output(Operation::AllGather, what, x, is_brought, out)?;
        let mut dims = x.shape().to_vec();
        let scalar = || self.shape_error(&all, *x.shape(), "a scalar has no dimension 0; reshape it to [1]");
        // Shards without elements may have any number of rows.
        let mut rows = all.iter().filter_map(|message| message.part.as_ref()?.shape.first());
        let rows = rows.try_fold(0, |sum: usize, &rows| sum.checked_add(rows));
        let too_many = || self.shape_error(&all, *x.shape(), "the rows of all ranks together exceed usize");
        *dims.first_mut().ok_or_else(scalar)? = rows.ok_or_else(too_many)?;
        let shape = Shape::from_slice(&dims).ok_or_else(scalar)?;
        Ok((all, shape))
    }

    fn compare_with_output(
        &self,
        operation: Operation,
        what: &str,
        x: &Tensor,
        is_brought: bool,
        out: Option<&Tensor>,
    ) -> Result<Arc<Vec<Message>>> {
        let part = if is_brought { self.own(Part::copy(x))? } else { Part::expected(x) };
        let names = out.into_iter().map(|out| output::of(*out.shape(), out.dtype()).into()).collect();
        self.count(operation, x);
        self.compare(Message { names, ..Message::new(operation, what).with(part) })
    }

    /// Returns this rank's part of a reduction, in host memory if it is for `out`, else on the device of `x`.
    pub(super) fn reduce_scatter(
        &self,
        what: &str,
        x: &Tensor,
        op: ReduceOp,
        out: Option<&Tensor>,
    ) -> Result<Tensor> {
        let direct = self.direct_reduction(x);
        let all = self.compare_with_output(Operation::ReduceScatter(op), what, x, direct.is_none(), out)?;
        let (mut dims, parts) = (x.shape().to_vec(), self.exchange.world_size());
        let uneven =
            || self.shape_error(&all, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(parts)).ok_or_else(uneven)?;
        *rows /= parts;
        let shape = Shape::from_slice(&dims).ok_or_else(uneven)?;
        if let Some(out) = out {
            output::expect(out, shape, x.dtype(), || call_of(&all))?;
        }
        let result = match direct {
            Some(direct) => {
                let mut result = self.own(host::copy(x))?;
                self.reduce_directly(direct, &all, &mut result, op, false)?;
                result
            }
            None => reduced(&all, x.dtype(), op)?,
        };
        let start = self.exchange.rank() * shape.numel();
        let cpu = Device::cpu();
        host::cut(&result, start..start + shape.numel(), shape, if out.is_some() { &cpu } else { x.device() })
    }

    pub(super) fn shape_error(&self, all: &[Message], shape: Shape, remedy: &'static str) -> Error {
        Error::Shape { call: call_of(all), shape, world_size: self.exchange.world_size(), remedy }
    }
}

fn bytes(x: &Tensor) -> usize {
    x.numel() * x.dtype().size()
}

/// Stores the elements of `result` in `tensors`, one after the other.
fn distribute<'a>(result: &Tensor, tensors: impl Iterator<Item = &'a mut Tensor>, what: &str) -> Result<()> {
    let mut start = 0;
    for x in tensors {
        let part = host::cut(result, start..start + x.numel(), *x.shape(), &Device::cpu())?;
        start += x.numel();
        host::store(&part, x, what)?;
    }
    Ok(())
}
