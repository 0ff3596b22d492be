//! Reductions in place: in order with the device's other work, or on a second queue beside it.

use super::api::{self, Api, Comm, Stream};
use super::communicator::Answer;
use super::group::{Group, call, float_number, op_number};
use crate::member::results::not_reducible;
use crate::message::{Call, Operation};
use crate::pending::OnDevice;
use crate::{Error, Pending, ReduceOp, Result, host};
use fp8_kernels::interop::SideQueue;
use fp8_kernels::{DType, Tensor, interop};
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
        self.queue_on(&call, Some(number), queue.as_deref(), |api, comm, stream| {
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

/// A tensor's memory.
struct Part {
    place: u64,
    len: usize,
    dtype: DType,
}

fn reduce_all(api: &Api, comm: Comm, stream: Stream, parts: &[Part], op: ReduceOp) -> Answer {
    // SAFETY: a group may be begun at any time.
    let started = unsafe { (api.group_start)() };
    if started != api::SUCCESS {
        return ("ncclGroupStart", started);
    }
    let mut failed = None;
    for &Part { place, len, dtype } in parts {
        let dtype = float_number(dtype);
        // SAFETY: `place` names `len` elements of this device, which nothing else uses until the device's stream has passed the
        // collective or waits for it. The communicator is alive while it is called.
        let status = unsafe { (api.all_reduce)(place, place, len, dtype, op_number(op), comm, stream) };
        if status != api::SUCCESS && status != api::IN_PROGRESS {
            failed.get_or_insert(("ncclAllReduce", status));
        }
    }
    // SAFETY: ends the group begun above, whatever became of its calls.
    let ended = unsafe { (api.group_end)() };
    failed.unwrap_or(("ncclGroupEnd", ended))
}
