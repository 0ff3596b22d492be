//! Gathers of shards: `all_gather`, where the hosts compare shapes in each call, and the quantized all-gather with one scale, where
//! they compare only the first calls of a name. `known.rs` has those of codes, and of scales for blocks.
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

use super::agreed::{self, Agreed};
use super::api::{self, Api, Comm, Stream};
use super::communicator::Answer;
use super::group::{Group, address, call};
use super::known::Known;
use crate::gather::exchange::agree;
use crate::gather::{blocks, codes, nvfp4, shard as of_shard};
use crate::message::{Call, Operation};
use crate::{Error, ReduceOp, Result, output};
use fp8_kernels::{Cell, DType, Fp8Tensor, Operand, Scale, Shape, Slot, Tensor, interop, ops};
use std::sync::Arc;

const FUNCTION: &str = "quantized_all_gather";

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
        let shards = self.extents(&call, x, None)?;
        let out = self.joined(&call, x, &shards)?;
        self.queue_gather(&call, x, &out, &shards)?;
        Ok(out)
    }

    /// The shards of all ranks, in `out`.
    pub(super) fn gather_in_place(&self, what: &str, x: &Tensor, out: &mut Tensor) -> Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllGather, what);
        self.expect_alive(&call)?;
        let own = interop::address_mut(out, what).map_err(Error::from);
        self.own(self.expect_device(&call, out.device()).and(own))?;
        let shards = self.extents(&call, x, Some(out))?;
        output::expect(out, self.shape_of_all(&call, x, &shards)?, x.dtype(), || call.to_string())?;
        self.queue_gather(&call, x, out, &shards)
    }

    fn queue_gather(&self, call: &Call, x: &Tensor, out: &Tensor, shards: &[Shape]) -> Result<()> {
        if out.numel() == 0 {
            return Ok(());
        }
        let parts = self.own(Parts::new(x, out, shards))?;
        self.count(call, x);
        self.queue(call, None, |api, comm, stream| {
            gather_all(api, comm, stream, self.control().rank(), &[parts])
        })
    }

    /// The extents of all ranks' shards, which the hosts compare. They gather into `out`, if it is given.
    fn extents(&self, call: &Call, x: &Tensor, out: Option<&Tensor>) -> Result<Vec<Shape>> {
        self.expect_alive(call)?;
        self.own(self.expect_device(call, x.device()))?;
        Ok(agreed::shapes(&self.compare(call, x, out)?))
    }

    /// The shape of the shards of all ranks together.
    fn shape_of_all(&self, call: &Call, x: &Tensor, shards: &[Shape]) -> Result<Shape> {
        let mut dims = x.shape().to_vec();
        let scalar = || self.shape_error(call, *x.shape(), "a scalar has no dimension 0; reshape it to [1]");
        let mut rows = shards.iter().filter_map(|shape| shape.first());
        let rows = rows.try_fold(0, |sum: usize, &rows| sum.checked_add(rows));
        let too_many = || self.shape_error(call, *x.shape(), "the rows of all ranks together exceed usize");
        *dims.first_mut().ok_or_else(scalar)? = rows.ok_or_else(too_many)?;
        Shape::from_slice(&dims).ok_or_else(scalar)
    }

    /// Allocates the tensor for the shards of all ranks.
    fn joined(&self, call: &Call, x: &Tensor, shards: &[Shape]) -> Result<Tensor> {
        self.empty_like(x, self.shape_of_all(call, x, shards)?, x.dtype())
    }

    /// Gathers a quantized tensor, through the hosts or on the devices alone (see the header of this file).
    pub(super) fn gather_quantized(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        let label = of_shard::label(what, shard, slot);
        if let Scale::Blocks(rule) = slot.scale {
            let layout = format!("{label}, columnwise {}", slot.columnwise);
            let known = Known::new(self, FUNCTION, what, &layout, *shard.shape());
            return blocks::gather(&known, what, shard, slot, rule);
        }
        if let Scale::Nvfp4(rule) = slot.scale {
            let known =
                Known::new(self, FUNCTION, what, &nvfp4::label(what, shard, slot, &rule), *shard.shape());
            return nvfp4::gather(&known, self.control().rank(), what, shard, slot, rule);
        }
        if let Some(agreed) = self.agreed(what, &label, *shard.shape(), slot.scale) {
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
            self.extents(&call(Operation::AllGather, what), shard, None)?
        };
        let committed = match slot.scale {
            Scale::Cell { cell, .. } => Some(interop::Committed::new(cell)?),
            Scale::Off
            | Scale::FromTensor(_)
            | Scale::FromAmax { .. }
            | Scale::Blocks(_)
            | Scale::Nvfp4(_) => None,
        };
        let number = Tensor::from_vec(vec![agreed::number(&label, &shards)], [1], shard.device())?;
        let call = self.number_of(&named(&label));
        let agreed = Arc::new(Agreed { label, committed, shards, number, call });
        // Like all later ones, so that what a recorded call needs is there: kernels, and NCCL's connections.
        let whole = self.gather_agreed(what, &agreed, shard, slot)?;
        self.agreed.lock().insert((what.to_owned(), *shard.shape()), agreed);
        Ok(whole)
    }

    /// Returns the earlier agreement on a shard of this shape if this is the same call again: it has the same label, and its cell
    /// still holds the committed scale.
    pub(super) fn agreed(
        &self,
        what: &str,
        label: &str,
        shape: Shape,
        scale: Scale<'_>,
    ) -> Option<Arc<Agreed>> {
        let agreed = self.agreed.lock().get(&(what.to_owned(), shape)).cloned()?;
        let is_committed = match (scale, &agreed.committed) {
            (Scale::Cell { cell, .. }, Some(committed)) => committed.holds(cell),
            (Scale::Cell { .. }, None) | (_, Some(_)) => false,
            (_, None) => true,
        };
        Some(agreed).filter(|agreed| agreed.label == label && is_committed)
    }

    /// Gathers a tensor that is in FP8, through the hosts or on the devices alone.
    pub(super) fn gather_fp8(&self, what: &str, shard: &Fp8Tensor) -> Result<Fp8Tensor> {
        let known = Known::new(self, "gather_codes", what, &codes::label(what, shard), *shard.shape());
        codes::gather(&known, what, shard)
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
            (Scale::FromTensor(_) | Scale::Off | Scale::Blocks(_) | Scale::Nvfp4(_), _) => None,
        };
        let shard = match (&scale, of_shard::rule(slot)) {
            (Some(cell), Some(rule)) => of_shard::quantize(shard, slot, cell, rule)?,
            _ => ops::quantize(shard, slot)?,
        };
        let elements = of_shard::elements(&shard)?;
        let scale = scale.as_ref().map(interop::cell_address).transpose()?;
        let out = self.gather_compared(&call, &named(what), agreed, &elements, scale)?;
        of_shard::join(&shard, out, slot)
    }

    /// Gathers codes or values and lets the device compare calls, and the f32 at `scale`.
    pub(super) fn gather_compared(
        &self,
        call: &Call,
        named: &str,
        agreed: &Agreed,
        elements: &Tensor,
        scale: Option<u64>,
    ) -> Result<Tensor> {
        let out = self.joined(call, elements, &agreed.shards)?;
        let ranks = agreed.shards.len();
        let each = vec![4; ranks];
        let numbers = self.empty_like(elements, [ranks].into(), DType::I32)?;
        let mut parts =
            vec![Parts { from: address(&agreed.number)?, to: address(&numbers)?, bytes: each.clone() }];
        let mut scales = None;
        if let Some(from) = scale {
            let all = self.empty_like(elements, [ranks].into(), DType::F32)?;
            parts.push(Parts { from, to: address(&all)?, bytes: each });
            scales = Some(all);
        }
        if out.numel() > 0 {
            parts.push(Parts::new(elements, &out, &agreed.shards)?);
            self.count(call, elements);
        }
        self.queue(call, Some(agreed.call), |api, comm, stream| {
            gather_all(api, comm, stream, self.control().rank(), &parts)
        })?;
        ops::compare_calls(named, &numbers, scales.as_ref())?;
        Ok(out)
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
    format!("{FUNCTION} `{what}`")
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
    let mut pieces = Vec::new();
    for parts in all {
        if let Some(bytes) = even(parts) {
            pieces.push(Piece::Even(parts, bytes));
            continue;
        }
        let mut to = parts.to;
        for (root, &bytes) in parts.bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
            let from = if root == own { parts.from } else { to };
            pieces.push(Piece::OfRank { root, from, to, bytes });
            to += bytes as u64;
        }
    }
    api.grouped(pieces.iter().map(|piece| match *piece {
        Piece::Even(parts, bytes) => gather_even(api, comm, stream, parts, bytes),
        // SAFETY: `to` is where this part is in a buffer that holds all of them, `from` there or this rank's own of as many
        // bytes; both live until the stream has passed the collective.
        Piece::OfRank { root, from, to, bytes } => ("ncclBroadcast", unsafe {
            (api.broadcast)(from, to, bytes, api::UINT8, root as i32, comm, stream)
        }),
    }))
}

/// A call of a group.
enum Piece<'a> {
    Even(&'a Parts, usize),
    /// The bytes of one rank.
    OfRank {
        root: usize,
        from: u64,
        to: u64,
        bytes: usize,
    },
}

/// Gathers parts of `bytes` bytes each.
fn gather_even(api: &Api, comm: Comm, stream: Stream, parts: &Parts, bytes: usize) -> Answer {
    // SAFETY: `from` names `bytes` bytes of this device and `to` as many for each rank; both live until the stream has
    // passed the collective: memory is reused in stream order.
    ("ncclAllGather", unsafe { (api.all_gather)(parts.from, parts.to, bytes, api::UINT8, comm, stream) })
}
