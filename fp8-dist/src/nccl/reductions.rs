//! Reductions in place: in order with the device's other work, or on a second queue beside it.

use super::api::{Api, Comm, Stream};
use super::communicator::Answer;
use super::group::{Group, address, call, float_number, op_number};
use crate::member::results::not_reducible;
use crate::message::{Call, Operation};
use crate::pending::OnDevice;
use crate::{Error, Pending, ReduceOp, Result, host, output};
use fp8_kernels::interop::SideQueue;
use fp8_kernels::{DType, Device, Shape, Tensor, interop};
use std::ops::Range;
use std::sync::Arc;

/// Tensors that the queue reduces.
#[derive(Debug)]
struct Started {
    /// `None` once the device's stream waits for it.
    queue: Option<Arc<SideQueue>>,
    tensors: Vec<Tensor>,
}

impl OnDevice for Started {
    fn join(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        if let Some(queue) = self.queue.take() {
            queue.join()?;
        }
        Ok(std::mem::take(&mut self.tensors))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Their memory is used again in the order of the device's stream. A device that has failed is used no more.
        if let Some(queue) = self.queue.take() {
            let _ = queue.join();
        }
    }
}

impl Group {
    /// [`ProcessGroup::all_reduce_in_place`].
    pub(super) fn reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduce(op), what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        // Checked before the exchange: if this rank fails, the others must not compute the sum.
        let place = self.own(interop::address_mut(x, what).map_err(Error::from))?;
        if x.dtype() == DType::I32 {
            let result = self.reduce_on_hosts(&call, x, op)?;
            return self.own(host::store(&result, x, what));
        }
        let number = self.compare_once(&call, x.dtype(), *x.shape())?;
        expect_reducible(&call, x, op)?;
        self.reduce(&call, Some(number), x, op, [place, place])
    }

    /// [`ProcessGroup::reduce_scatter`](crate::ProcessGroup::reduce_scatter).
    pub(super) fn scatter_reduced(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::ReduceScatter(op), what);
        let shares = self.compare_shares(&call, &call, x, op)?;
        if let Some(sum) = shares.on_host {
            return host::cut(&sum, shares.range, shares.shape, x.device());
        }
        let out = self.empty_like(x, shares.shape, x.dtype())?;
        self.queue_shares(&call, shares.number, x, op, &out, self.own(address(&out))?)?;
        Ok(out)
    }

    /// [`ProcessGroup::reduce_scatter_into`](crate::ProcessGroup::reduce_scatter_into).
    pub(super) fn scatter_reduced_in_place(
        &self,
        what: &str,
        x: &Tensor,
        op: ReduceOp,
        out: &mut Tensor,
    ) -> Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::ReduceScatter(op), what);
        self.expect_alive(&call)?;
        let to = interop::address_mut(out, what).map_err(Error::from);
        let to = self.own(self.expect_device(&call, out.device()).and(to))?;
        // Compared with the call: all ranks give memory of one shape.
        let given = output::of(*out.shape(), out.dtype());
        let compared = Call { what: format!("{what} into {given}"), ..call };
        let shares = self.compare_shares(&call, &compared, x, op)?;
        output::expect(out, shares.shape, x.dtype(), || call.to_string())?;
        if let Some(sum) = shares.on_host {
            let part = host::cut(&sum, shares.range, shares.shape, &Device::cpu())?;
            return self.own(host::store(&part, out, what));
        }
        self.queue_shares(&call, shares.number, x, op, out, to)
    }

    /// Compares a `reduce_scatter` with the other ranks', as `compared` describes it, unless that has been done.
    fn compare_shares(&self, call: &Call, compared: &Call, x: &Tensor, op: ReduceOp) -> Result<Shares> {
        self.expect_alive(call)?;
        self.own(self.expect_device(call, x.device()))?;
        let (on_host, number) = match x.dtype() {
            DType::I32 => (Some(self.reduce_on_hosts(compared, x, op)?), None),
            dtype => (None, Some(self.compare_once(compared, dtype, *x.shape())?)),
        };
        expect_reducible(call, x, op)?;
        let (mut dims, ranks) = (x.shape().to_vec(), self.control().world_size());
        let uneven =
            || self.shape_error(call, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(ranks)).ok_or_else(uneven)?;
        *rows /= ranks;
        let shape = Shape::from_slice(&dims).ok_or_else(uneven)?;
        let start = self.control().rank() * shape.numel();
        Ok(Shares { shape, range: start..start + shape.numel(), on_host, number })
    }

    fn queue_shares(
        &self,
        call: &Call,
        number: Option<u64>,
        x: &Tensor,
        op: ReduceOp,
        out: &Tensor,
        to: u64,
    ) -> Result<()> {
        let each = out.numel();
        if each == 0 {
            return Ok(());
        }
        let (dtype, from) = (float_number(x.dtype()), self.own(address(x))?);
        self.count(call, x);
        self.queue(call, number, |api, comm, stream| {
            // SAFETY: `to` names `each` elements of this device, `from` as many for each rank; both live until the stream
            // has passed the collective.
            ("ncclReduceScatter", unsafe {
                (api.reduce_scatter)(from, to, each, dtype, op_number(op), comm, stream)
            })
        })
    }

    /// Starts to reduce all of `tensors`, as one group of NCCL's calls.
    pub(super) fn start(&self, what: &str, mut tensors: Vec<Tensor>, op: ReduceOp) -> Pending {
        match self.queue_all(what, &mut tensors, op, true) {
            Ok(queue) => Pending::on_device(Started { queue, tensors }),
            Err(error) => Pending::done(Err(error)),
        }
    }

    /// Queues the reduction of all of `tensors`, on a queue of its own if it is to go on beside other work. Returns this queue; `None`
    /// if what the device queues from now on follows in any case.
    pub(super) fn queue_all(
        &self,
        what: &str,
        tensors: &mut [Tensor],
        op: ReduceOp,
        is_beside: bool,
    ) -> Result<Option<Arc<SideQueue>>> {
        if tensors.iter().any(|x| x.dtype() == DType::I32) {
            // The hosts reduce them.
            let mut each = tensors.iter_mut().enumerate();
            each.try_for_each(|(index, x)| self.reduce_in_place(&format!("{what}, tensor {index}"), x, op))?;
            return Ok(None);
        }
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduce(op), what);
        self.expect_alive(&call)?;
        if is_beside {
            // Before anything is sent: a step that cannot be recorded leaves the group usable.
            self.expect_side_queue(&call)?;
        }
        let mut parts = Vec::with_capacity(tensors.len());
        for x in &mut *tensors {
            self.own(self.expect_device(&call, x.device()))?;
            let place = self.own(interop::address_mut(x, what).map_err(Error::from))?;
            parts.push(Part { place, len: x.numel(), dtype: x.dtype() });
        }
        let number = self.compare_all_once(&call, tensors)?;
        tensors.iter().try_for_each(|x| expect_reducible(&call, x, op))?;
        parts.retain(|part| part.len > 0);
        if parts.is_empty() {
            return Ok(None);
        }
        let queue = if is_beside { Some(self.own(self.side_queue())?) } else { None };
        if let Some(queue) = &queue {
            self.own(queue.follow().map_err(Error::from))?;
        }
        self.count_all(op, tensors);
        self.queue_on(&call, Some(number), queue.as_deref(), None, |api, comm, stream| {
            reduce_all(api, comm, stream, &parts, op)
        })?;
        Ok(queue)
    }
}

pub(super) fn expect_reducible(call: &Call, x: &Tensor, op: ReduceOp) -> Result<()> {
    match host::is_reducible(x.dtype(), op) {
        true => Ok(()),
        false => Err(not_reducible(&call.to_string(), x.dtype(), op)),
    }
}

/// A `reduce_scatter` that the ranks have compared.
struct Shares {
    /// The shape of each rank's part.
    shape: Shape,
    /// This rank's part of the elements.
    range: Range<usize>,
    /// The reduction, if the hosts compute it.
    on_host: Option<Tensor>,
    number: Option<u64>,
}

/// A tensor's memory.
struct Part {
    place: u64,
    len: usize,
    dtype: DType,
}

fn reduce_all(api: &Api, comm: Comm, stream: Stream, parts: &[Part], op: ReduceOp) -> Answer {
    api.grouped(parts.iter().map(|&Part { place, len, dtype }| {
        let dtype = float_number(dtype);
        // SAFETY: `place` names `len` elements of this device, which nothing else uses until the device's stream has passed the
        // collective or waits for it. The communicator is alive while it is called.
        ("ncclAllReduce", unsafe { (api.all_reduce)(place, place, len, dtype, op_number(op), comm, stream) })
    }))
}
