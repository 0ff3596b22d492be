//! Gathers of shards: `all_gather`, where the hosts compare shapes in each call, and the quantized all-gather, where they compare
//! only the first calls of a name.
//!
//! Once a call has found the shapes of all shards and a committed scale that is equal on all ranks, later calls of the name do not
//! involve the hosts. Each rank quantizes its shard with the current scale of its cell. One group of NCCL calls gathers the codes,
//! the scale cells, and a number that identifies the call, so that a different call is detected even if its sizes and scales are
//! equal. A kernel compares scales and numbers
//! ([`compare_calls`](fp8_kernels::ops::compare_calls)), and the next call that waits for the device returns its error. All of
//! this is queued work, so it can be recorded.
//!
//! A committed scale remains committed unless the host writes its cell: kernels replace it by another committed one, and leaving a
//! scope resets only provisional ones. Each host knows what it has written ([`Committed`](interop::Committed)), so hosts that do the
//! same make the same decision. If they do not, some wait in an exchange and others for NCCL until the deadline.

use super::agreed::Agreed;
use super::api::{self, Api, Comm, Stream};
use super::communicator::Answer;
use super::group::{Group, address, call};
use crate::gather::exchange::agree;
use crate::gather::{blocks, shard as of_shard};
use crate::message::{Call, Operation};
use crate::{Error, ReduceOp, Result};
use fp8_kernels::{Cell, DType, Operand, Scale, Shape, Slot, Tensor, interop, ops};
use std::sync::Arc;

/// Bytes to gather: where this rank's are, where all go, and how many each rank has.
struct Parts {
    from: u64,
    to: u64,
    bytes: Vec<usize>,
}

impl Group {
    /// The shards of all ranks.
    pub(super) fn gather(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllGather, what);
        let shards = self.extents(&call, x)?;
        let out = self.joined(&call, x, &shards)?;
        if out.numel() > 0 {
            let parts = self.own(Parts::new(x, &out, &shards))?;
            self.count(&call, x);
            self.queue(&call, None, |api, comm, stream| {
                gather_all(api, comm, stream, self.control().rank(), &[parts])
            })?;
        }
        Ok(out)
    }

    /// The extents of all ranks' shards, which the hosts compare.
    fn extents(&self, call: &Call, x: &Tensor) -> Result<Vec<Shape>> {
        self.expect_alive(call)?;
        self.own(self.expect_device(call, x.device()))?;
        let all = self.compare(call, x)?;
        Ok(all.iter().filter_map(|message| Some(message.part.as_ref()?.shape)).collect())
    }

    /// Allocates the tensor for the shards of all ranks.
    fn joined(&self, call: &Call, x: &Tensor, shards: &[Shape]) -> Result<Tensor> {
        let mut dims = x.shape().to_vec();
        let scalar = || self.shape_error(call, *x.shape(), "a scalar has no dimension 0; reshape it to [1]");
        *dims.first_mut().ok_or_else(scalar)? = shards.iter().filter_map(|shape| shape.first()).sum();
        self.empty_like(x, Shape::from_slice(&dims).ok_or_else(scalar)?, x.dtype())
    }

    /// Gathers a quantized tensor, through the hosts or on the devices alone (see the header of this file).
    pub(super) fn gather_quantized(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        if let Scale::Blocks(rule) = slot.scale {
            let remedy = "run it outside of the recorded step: the hosts compare the shards of a tensor with scales for blocks";
            shard.device().expect_eager(&named(what), remedy)?;
            return blocks::gather(&|what, x| self.gather(what, x), what, shard, slot, rule);
        }
        let label = of_shard::label(what, shard, slot);
        if let Some(agreed) = self.agreed(what, &label, shard, slot)? {
            return self.gather_agreed(what, &agreed, shard, slot);
        }
        let remedy = "call it once before recording, with this name, slot and shape and with scales that are committed";
        shard.device().expect_eager(&named(what), remedy)?;
        let agreement = agree(&|what, x| self.gather(what, x), what, shard, slot)?;
        if !agreement.is_lasting {
            let quantized = agreement.quantize(shard, slot)?;
            let elements = self.gather(what, &of_shard::elements(&quantized)?)?;
            return of_shard::join(&quantized, elements, slot);
        }
        let shards = {
            let _turn = self.turn.lock();
            self.extents(&call(Operation::AllGather, what), shard)?
        };
        let committed = match slot.scale {
            Scale::Cell { cell, .. } => Some(interop::Committed::new(cell)?),
            Scale::Off | Scale::FromTensor(_) | Scale::FromAmax { .. } | Scale::Blocks(_) => None,
        };
        let number = Tensor::from_vec(vec![number(&label, &shards)], [1], shard.device())?;
        let call = self.number_of(&format!("quantized_all_gather `{label}`"));
        let agreed = Arc::new(Agreed { label, committed, shards, number, call });
        // Like all later ones, so that what a recorded call needs is there: kernels, and NCCL's connections.
        let whole = self.gather_agreed(what, &agreed, shard, slot)?;
        self.agreed.lock().insert(what.to_owned(), agreed);
        Ok(whole)
    }

    /// Returns the earlier agreement on `what` if this is the same call again: it has the same label, and its cell
    /// still holds the committed scale. A shard of another shape is an error.
    fn agreed(
        &self,
        what: &str,
        label: &str,
        shard: &Tensor,
        slot: &Slot<'_>,
    ) -> Result<Option<Arc<Agreed>>> {
        let Some(agreed) = self.agreed.lock().get(what).cloned() else { return Ok(None) };
        let is_committed = match (slot.scale, &agreed.committed) {
            (Scale::Cell { cell, .. }, Some(committed)) => committed.holds(cell),
            (Scale::Cell { .. }, None) | (_, Some(_)) => false,
            (_, None) => true,
        };
        if agreed.label != label || !is_committed {
            return Ok(None);
        }
        match agreed.shards.get(self.control().rank()) {
            Some(expected) if expected != shard.shape() => {
                let (found, expected) = (*shard.shape(), *expected);
                Err(Error::Extents { call: named(what), found, expected })
            }
            _ => Ok(Some(agreed)),
        }
    }

    /// Without the hosts.
    fn gather_agreed(&self, what: &str, agreed: &Agreed, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllGather, what);
        self.expect_alive(&call)?;
        self.expect_device(&call, shard.device())?;
        let scale = match (slot.scale, of_shard::rule(slot)) {
            (Scale::Cell { cell, .. }, _) => Some(cell.clone()),
            (Scale::FromAmax { amax, rule }, _) => Some(Cell::new(rule.scale(amax, 1.0)?, shard.device())?),
            (Scale::FromTensor(_), Some(rule)) => {
                let mut amax = ops::amax(shard)?;
                let place = interop::address_mut(&mut amax, what)?;
                self.reduce(&call, None, &amax, ReduceOp::Max, [place, place])?;
                Some(ops::scale_from_amax(&amax, rule)?)
            }
            (Scale::FromTensor(_) | Scale::Off | Scale::Blocks(_), _) => None,
        };
        let shard = match (&scale, of_shard::rule(slot)) {
            (Some(cell), Some(rule)) => of_shard::quantize(shard, slot, cell, rule)?,
            _ => ops::quantize(shard, slot)?,
        };
        let elements = of_shard::elements(&shard)?;
        let out = self.joined(&call, &elements, &agreed.shards)?;
        let ranks = agreed.shards.len();
        let each = vec![4; ranks];
        let numbers = self.empty_like(&elements, [ranks].into(), DType::I32)?;
        let mut parts =
            vec![Parts { from: address(&agreed.number)?, to: address(&numbers)?, bytes: each.clone() }];
        let mut scales = None;
        if let Some(cell) = &scale {
            let all = self.empty_like(&elements, [ranks].into(), DType::F32)?;
            parts.push(Parts { from: interop::cell_address(cell)?, to: address(&all)?, bytes: each });
            scales = Some(all);
        }
        if out.numel() > 0 {
            parts.push(Parts::new(&elements, &out, &agreed.shards)?);
            self.count(&call, &elements);
        }
        let number = Some(agreed.call);
        self.queue(&call, number, |api, comm, stream| {
            gather_all(api, comm, stream, self.control().rank(), &parts)
        })?;
        ops::compare_calls(&named(what), &numbers, scales.as_ref())?;
        of_shard::join(&shard, out, slot)
    }
}

impl Parts {
    /// Describes the gather of `x` into `out`, for shards with these extents.
    fn new(x: &Tensor, out: &Tensor, shards: &[Shape]) -> Result<Self> {
        let bytes = shards.iter().map(|shape| shape.numel() * x.dtype().size()).collect();
        Ok(Self { from: address(x)?, to: address(out)?, bytes })
    }
}

/// As errors name the call.
fn named(what: &str) -> String {
    format!("quantized_all_gather `{what}`")
}

/// A number that another call has by chance only: FNV-1a of what the ranks agreed on.
fn number(label: &str, shards: &[Shape]) -> i32 {
    let extents = shards.iter().flat_map(|shape| shape.iter().flat_map(|extent| extent.to_le_bytes()));
    let hash = label.bytes().chain(extents);
    let hash = hash.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash.cast_signed()
}

/// Gathers all parts, several as one group of calls. Parts of different lengths are broadcast by each rank into its place.
fn gather_all(api: &Api, comm: Comm, stream: Stream, own: usize, all: &[Parts]) -> Answer {
    let even = |parts: &Parts| {
        let first = parts.bytes.first().copied().unwrap_or_default();
        parts.bytes.iter().all(|&bytes| bytes == first).then_some(first)
    };
    if let [parts] = all
        && let Some(bytes) = even(parts)
    {
        return gather_even(api, comm, stream, parts, bytes);
    }
    // SAFETY: a group may be begun at any time.
    let started = unsafe { (api.group_start)() };
    if started != api::SUCCESS {
        return ("ncclGroupStart", started);
    }
    let mut failed = None;
    let mut heed = |answer: Answer| {
        if answer.1 != api::SUCCESS && answer.1 != api::IN_PROGRESS {
            failed.get_or_insert(answer);
        }
    };
    for parts in all {
        if let Some(bytes) = even(parts) {
            heed(gather_even(api, comm, stream, parts, bytes));
            continue;
        }
        let mut to = parts.to;
        for (root, &bytes) in parts.bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
            let from = if root == own { parts.from } else { to };
            // SAFETY: `to` is where this part is in a buffer that holds all of them, `from` there or this rank's own of as
            // many bytes; both live until the stream has passed the collective.
            let status = unsafe { (api.broadcast)(from, to, bytes, api::UINT8, root as i32, comm, stream) };
            heed(("ncclBroadcast", status));
            to += bytes as u64;
        }
    }
    // SAFETY: ends the group begun above, whatever became of its calls.
    let ended = unsafe { (api.group_end)() };
    failed.unwrap_or(("ncclGroupEnd", ended))
}

/// Gathers parts of `bytes` bytes each.
fn gather_even(api: &Api, comm: Comm, stream: Stream, parts: &Parts, bytes: usize) -> Answer {
    // SAFETY: `from` names `bytes` bytes of this device and `to` as many for each rank; both live until the stream has
    // passed the collective: memory is reused in stream order.
    ("ncclAllGather", unsafe { (api.all_gather)(parts.from, parts.to, bytes, api::UINT8, comm, stream) })
}
