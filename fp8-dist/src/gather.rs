//! All-gather of a sharded tensor in FP8: a quarter of f32's traffic, and the bytes that one device would make.
//!
//! 1. The ranks exchange two floats each: the scale they hold and, where a scale has to be made, the shard's amax. Scales
//!    that differ are an error. The largest amax is the whole tensor's, so an outlier on one rank sets everyone's scale.
//! 2. Each rank quantizes its shard with that scale, recording its own amax and counters as always.
//! 3. The rowwise bytes are gathered along dimension 0 as u8. A transposed copy is made of the gathered bytes: the
//!    transposes of shards would not lie one after the other in the transpose of the whole.
//!
//! Gathering the amaxes and comparing scales in one exchange was preferred to a reduction followed by a comparison: a rank
//! whose slot is calibrated and one whose slot is not then get the error that names their scales.
//!
//! On GPUs this is how a name begins. Once its scales are committed, `nccl/gather.rs` does all of it on the devices.

use crate::{Error, ProcessGroup, Result};
use fp8_kernels::{Cell, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor, TransposePolicy, UNSET, ops};

/// The whole tensor, quantized as `slot` says, of which each rank has some rows. Byte for byte what
/// [`ops::quantize`] makes of the joined tensor.
///
/// Shards are f32, bf16 or f16, one dtype on all ranks, and may have different extents in dimension 0, also 0. The scale:
///
/// - of a cell (delayed scaling): that cell's, which must be equal on all ranks. While it is unset, the first scale comes
///   from the amax of the whole tensor and is stored provisionally if the slot keeps it.
/// - of the tensor (current scaling): from the amax of the whole tensor.
/// - off: the shards are gathered in high precision.
///
/// In a group of GPUs (`nccl`) the hosts take part in the first calls of a name only: they compare the shards'
/// extents and exchange scales. Once a call has found a committed scale that is equal on all ranks, later calls with the same
/// name, slot, dtype and extents read nothing from the device and exchange nothing between hosts, so the call can be recorded
/// in a graph. The devices then compare calls and scales, and the next call that waits for the device returns the error.
/// Current scaling reduces the amax on the devices, too. For this, `what` keeps its slot and extents: give each tensor a name
/// of its own. A slot of another name or [`Cell`] is compared by the hosts again, and so is one whose scale the host has unset,
/// as loading a state may; that has to happen on all ranks alike.
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
/// Scales, formats, rules, dtypes or trailing extents that differ between ranks; a dtype that is not a float; a user's
/// scale policy that returns no usable scale; a rank that is away, failed or elsewhere. On GPUs, other extents than a known
/// name had before. The group is poisoned then. A first call that would have to be recorded, which leaves the group alive.
pub fn quantized_all_gather(
    group: &dyn ProcessGroup,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    let gathered = group.quantized_all_gather(what, shard, slot);
    // Where the group has failed, the others know; else they must not wait for this rank. A call that cannot be recorded has
    // told nobody anything.
    if let Err(error) = gathered.as_ref()
        && error.failure().is_none()
        && !matches!(error, Error::Kernels(error) if matches!(**error, fp8_kernels::Error::Capture { .. }))
    {
        group.poison(&error.to_string());
    }
    gathered
}

/// With the hosts taking part: what every backend can do.
pub(crate) fn by_exchange<G: ProcessGroup + ?Sized>(
    group: &G,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    let agreement = agree(group, what, shard, slot)?;
    let shard = agreement.quantize(shard, slot)?;
    join(&shard, group.all_gather(what, &elements(&shard)?)?, slot)
}

/// What the ranks quantize with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Agreement {
    /// None in high precision.
    scale: Option<f32>,
    /// The next call need not exchange anything: where the scale comes from a cell, it is committed on all ranks.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only GPUs compare scales without the hosts")
    )]
    pub(crate) is_lasting: bool,
}

impl Agreement {
    /// This rank's shard.
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

/// The slot's rule, unless it is off.
pub(crate) const fn rule<'a>(slot: &Slot<'a>) -> Option<&'a ScaleRule> {
    match slot.scale {
        Scale::Off => None,
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

/// What is gathered of a shard: rowwise codes, or values in high precision.
pub(crate) fn elements(shard: &Operand) -> Result<Tensor> {
    match shard {
        Operand::High(values) => Ok(values.clone()),
        Operand::Fp8(shard) => match shard.rowwise() {
            Some(codes) => Ok(codes.reshape(*shard.shape())?),
            None => Ok(Tensor::from_vec(shard.codes()?, *shard.shape(), shard.device())?),
        },
    }
}

/// The whole tensor, of the gathered elements and a shard.
pub(crate) fn join(shard: &Operand, gathered: Tensor, slot: &Slot<'_>) -> Result<Operand> {
    let Operand::Fp8(shard) = shard else { return Ok(Operand::High(gathered)) };
    let shape = *gathered.shape();
    let whole = Fp8Tensor::from_codes(gathered, shape, slot.encoding, shard.scale_inv().clone())?;
    let with_cast = slot.columnwise && whole.device().transpose_policy() == TransposePolicy::WithCast;
    Ok(Operand::Fp8(if with_cast { whole.with_columnwise()? } else { whole }))
}

/// What must be equal on all ranks besides the scale: types and rule. Ranks that differ in them get an error that shows both.
pub(crate) fn label(what: &str, shard: &Tensor, slot: &Slot<'_>) -> String {
    match rule(slot) {
        Some(rule) => format!("{what}: a scale for {} as {} by {rule:?}", shard.dtype(), slot.encoding),
        None => format!("{what}: {}", shard.dtype()),
    }
}

/// Exchanges what every rank quantizes with: the scale that it holds, or one made of the whole tensor's amax.
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
        Scale::FromTensor(_) | Scale::Off => None,
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
        // As on one device: zero and infinity say nothing, and the slot stays unset.
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
