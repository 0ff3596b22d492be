//! All-gather of a sharded tensor in FP8: a quarter of f32's traffic, and the same bytes that one device would compute.
//!
//! 1. Each rank sends two floats: its scale and, if a scale has to be computed, the amax of its shard. Different scales are an
//!    error. The largest amax is that of the whole tensor, so an outlier on one rank determines the scale of all.
//! 2. Each rank quantizes its shard with that scale and records its own amax and counters as usual.
//! 3. The rowwise bytes are gathered along dimension 0 as u8. A transposed copy is computed from the gathered bytes, because the
//!    transposes of the shards are not contiguous in the transpose of the whole tensor.
//!
//! One exchange carries both amaxes and scales. With a reduction followed by a comparison, a rank with a calibrated slot and one
//! without would not get the error that names their scales.
//!
//! On GPUs the first calls of a name work this way. Once its scales are committed, `nccl/gather.rs` does all of it on the devices.

use crate::{Error, ProcessGroup, Result, gather_blocks};
use fp8_kernels::{Cell, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor, TransposePolicy, UNSET, ops};

/// Quantizes the shards of a tensor and gathers the codes: returns the whole tensor in FP8 on every rank. The result has the same
/// bytes as [`ops::quantize`] of the concatenated tensor.
///
/// Each rank passes some rows of the tensor, in rank order. Shards are f32, bf16 or f16, the same on all ranks. They may differ in
/// dimension 0, which may be 0, but not in the other dimensions. `slot` determines the format and the scale:
///
/// - from a cell (delayed scaling): the scale in the cell, which must be equal on all ranks. While it is unset, the scale is
///   computed from the amax of the whole tensor, and stored provisionally if the slot keeps it.
/// - from the tensor (current scaling): computed from the amax of the whole tensor.
/// - for rows or blocks: codes and scales are gathered where each block is within one shard. Otherwise the shards are gathered in
///   high precision and each rank quantizes the whole: for 128 × 128 blocks if a shard other than the last has no multiple of 128
///   rows; and for the columnwise copy of rows, of 16-bit shards, and of shards without a multiple of 128 rows (MX blocks: 32).
/// - off: the shards are gathered in high precision.
///
/// In a group of GPUs (`nccl`) only the first calls of a name involve the hosts, which compare the shapes of the shards and exchange
/// scales. Once a call has found a committed scale that is equal on all ranks, later calls with the same name, slot, dtype and shape
/// read nothing from the device and exchange nothing between hosts, so they can be recorded in a graph. The devices then compare
/// calls and scales (and reduce the amax of current scaling); if they differ, the next call that waits for the device returns the
/// error. Use a name of its own for each tensor: a name must keep its slot and shape. The hosts compare again when the slot has
/// another name or [`Cell`], or when the host has unset its scale, as loading a state may; this must happen on all ranks together.
///
/// ```
/// use fp8_dist::{local, quantized_all_gather};
/// use fp8_kernels::{Device, Encoding, Scale, ScaleRule, Slot, Tensor};
/// use std::{thread, time::Duration};
///
/// let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
/// let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
/// thread::scope(|scope| {
///     for group in local("tp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || {
///             let shard = [1.0f32, 448.0][group.rank()]; // amax 1 here, 448 there: the scale is 1
///             let shard = Tensor::from_vec(vec![shard], [1, 1], &Device::cpu()).unwrap();
///             let whole = quantized_all_gather(&*group, "x", &shard, &slot).unwrap();
///             assert_eq!(whole.as_fp8().unwrap().codes().unwrap(), [0x38, 0x7E]);
///         });
///     }
/// });
/// ```
///
/// # Errors
/// Scales, formats, rules, dtypes or shapes (apart from dimension 0) that differ between ranks; a dtype that is not a float; a
/// user's scale policy that returns no usable scale; on GPUs, another shape than in an earlier call of the name; any failure of the
/// group. After these errors the group has failed. Recording the first call of a name is an error too, which leaves the group
/// usable.
pub fn quantized_all_gather(
    group: &dyn ProcessGroup,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    let gathered = group.quantized_all_gather(what, shard, slot);
    // If the group has failed, the others know. Otherwise tell them, so that they do not wait for this rank. A call that cannot
    // be recorded has sent nothing yet.
    if let Err(error) = gathered.as_ref()
        && error.failure().is_none()
        && !matches!(error, Error::Kernels(error) if matches!(**error, fp8_kernels::Error::Capture { .. }))
    {
        group.poison(&error.to_string());
    }
    gathered
}

/// The implementation in which the hosts exchange scales, for any backend.
pub(crate) fn by_exchange<G: ProcessGroup + ?Sized>(
    group: &G,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    if let Scale::Blocks(rule) = slot.scale {
        return gather_blocks::gather(group, what, shard, slot, rule);
    }
    let agreement = agree(group, what, shard, slot)?;
    let shard = agreement.quantize(shard, slot)?;
    join(&shard, group.all_gather(what, &elements(&shard)?)?, slot)
}

/// The scale that the ranks have agreed on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Agreement {
    /// `None` in high precision.
    scale: Option<f32>,
    /// Whether later calls need no exchange: a scale that comes from a cell is committed on all ranks.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only GPUs compare scales without the hosts")
    )]
    pub(crate) is_lasting: bool,
}

impl Agreement {
    /// Quantizes this rank's shard.
    pub(crate) fn quantize(self, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        match (self.scale, rule(slot)) {
            (Some(scale), Some(rule)) => {
                let cell = Cell::new(scale, shard.device())?; // greater than 0, so not unset
                quantize(shard, slot, &cell, rule)
            }
            _ => Ok(ops::quantize(shard, slot)?),
        }
    }
}

/// Returns the rule of a slot that has one scale.
pub(crate) const fn rule<'a>(slot: &Slot<'a>) -> Option<&'a ScaleRule> {
    match slot.scale {
        Scale::Off | Scale::Blocks(_) => None,
        Scale::Cell { first: rule, .. } | Scale::FromTensor(rule) | Scale::FromAmax { rule, .. } => {
            Some(rule)
        }
    }
}

/// Quantizes a shard with the scale in `cell`, which is set.
pub(crate) fn quantize(shard: &Tensor, slot: &Slot<'_>, cell: &Cell, rule: &ScaleRule) -> Result<Operand> {
    let scale = Scale::Cell { cell, first: rule, keep: false };
    Ok(ops::quantize(shard, &Slot { scale, ..slot.rowwise_only() })?)
}

/// Returns what is gathered: the rowwise codes of a shard, or its values in high precision.
pub(crate) fn elements(shard: &Operand) -> Result<Tensor> {
    match shard {
        Operand::High(values) => Ok(values.clone()),
        Operand::Fp8(shard) => match shard.rowwise() {
            Some(codes) => Ok(codes.reshape(*shard.shape())?),
            None => Ok(Tensor::from_vec(shard.codes()?, *shard.shape(), shard.device())?),
        },
    }
}

/// Builds the whole tensor from the gathered elements and the factor of a shard.
pub(crate) fn join(shard: &Operand, gathered: Tensor, slot: &Slot<'_>) -> Result<Operand> {
    let Operand::Fp8(shard) = shard else { return Ok(Operand::High(gathered)) };
    let shape = *gathered.shape();
    let whole = Fp8Tensor::from_codes(gathered, shape, slot.encoding, shard.scale_inv().clone())?;
    let with_cast = slot.columnwise && whole.device().transpose_policy() == TransposePolicy::WithCast;
    Ok(Operand::Fp8(if with_cast { whole.with_columnwise()? } else { whole }))
}

/// Describes what must be equal on all ranks besides the scale: types and rule. If they differ, the error shows both labels.
pub(crate) fn label(what: &str, shard: &Tensor, slot: &Slot<'_>) -> String {
    match (rule(slot), slot.scale) {
        (Some(rule), _) => format!("{what}: a scale for {} as {} by {rule:?}", shard.dtype(), slot.encoding),
        (None, Scale::Blocks(rule)) => {
            format!("{what}: scales for {} as {} by {rule:?}", shard.dtype(), slot.encoding)
        }
        (None, _) => format!("{what}: {}", shard.dtype()),
    }
}

/// Agrees with the other ranks on the scale: the one that all hold, or one computed from the amax of the whole tensor.
pub(crate) fn agree<G: ProcessGroup + ?Sized>(
    group: &G,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Agreement> {
    let Some(rule) = rule(slot) else { return Ok(Agreement { scale: None, is_lasting: true }) };
    let held = match slot.scale {
        Scale::Cell { cell, .. } => Some(cell.read()?).filter(|&scale| scale != UNSET),
        Scale::FromAmax { amax, rule } => Some(rule.scale(amax, 1.0)?),
        Scale::FromTensor(_) | Scale::Off | Scale::Blocks(_) => None,
    };
    let amax = if held.is_none() { ops::amax(shard)?.item()? } else { 0.0 };
    let mine = Tensor::from_vec(vec![held.unwrap_or(UNSET), amax], [1, 2], shard.device())?;
    let all = group.all_gather(&label(what, shard, slot), &mine)?.to_vec::<f32>()?;
    let (all, _) = all.as_chunks::<2>();
    let magnitude = |scale: f32| Some(scale).filter(|&scale| scale != UNSET).map(f32::abs);
    if let [[first, _], others @ ..] = all
        && let Some((rank, [scale, _])) = (1..).zip(others).find(|(_, [scale, _])| {
            magnitude(*scale).map(f32::to_bits) != magnitude(*first).map(f32::to_bits)
        })
    {
        let [value, other_value] = [scale, first].map(|&scale| magnitude(scale));
        let call = format!("quantized_all_gather `{what}`");
        return Err(Error::Scales { call, rank, value, other: 0, other_value });
    }
    let is_committed = all.iter().all(|&[scale, _]| scale.is_finite() && scale > 0.0);
    let is_lasting = is_committed || matches!(slot.scale, Scale::FromTensor(_));
    let amax = all.iter().map(|&[_, amax]| amax).fold(0.0, f32::max); // none is NaN
    let scale = match (held, slot.scale) {
        (Some(scale), _) => scale.abs(),
        // As on one device, an amax of 0 or infinity gives no scale, and the slot stays unset.
        (None, Scale::Cell { .. }) if !(amax.is_finite() && amax > 0.0) => 1.0,
        (None, Scale::Cell { cell, keep, .. }) => {
            let scale = rule.scale(amax, 1.0)?;
            if keep {
                cell.write(-scale)?;
            }
            scale
        }
        (None, _) => rule.scale(amax, 1.0)?,
    };
    Ok(Agreement { scale: Some(scale), is_lasting })
}
