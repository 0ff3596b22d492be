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
/// scale policy that returns no usable scale; a rank that is away, failed or elsewhere. The group is poisoned then.
pub fn quantized_all_gather(
    group: &dyn ProcessGroup,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    let gathered = gather(group, what, shard, slot);
    // Where the group has failed, the others know; else they must not wait for this rank.
    if let Err(error) = gathered.as_ref()
        && error.failure().is_none()
    {
        group.poison(&error.to_string());
    }
    gathered
}

fn gather(group: &dyn ProcessGroup, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    let (held, rule) = match slot.scale {
        Scale::Off => (None, None),
        Scale::Cell { cell, first, .. } => (Some(cell.read()?).filter(|&scale| scale != UNSET), Some(first)),
        Scale::FromTensor(rule) => (None, Some(rule)),
        Scale::FromAmax { amax, rule } => (Some(rule.scale(amax, 1.0)?), Some(rule)),
    };
    let shard = match rule {
        None => ops::quantize(shard, slot)?,
        Some(rule) => {
            let scale = one_scale(group, what, shard, slot, held, rule)?;
            let cell = Cell::new(scale, shard.device())?; // greater than 0, so not unset
            let scale = Scale::Cell { cell: &cell, first: rule, keep: false };
            ops::quantize(shard, &Slot { scale, ..slot.rowwise_only() })?
        }
    };
    let (codes, shard) = match &shard {
        Operand::High(values) => return Ok(Operand::High(group.all_gather(what, values)?)),
        Operand::Fp8(shard) => {
            let codes = match shard.rowwise() {
                Some(codes) => codes.reshape(*shard.shape())?,
                None => Tensor::from_vec(shard.codes()?, *shard.shape(), shard.device())?,
            };
            (group.all_gather(what, &codes)?, shard)
        }
    };
    let shape = *codes.shape();
    let whole = Fp8Tensor::from_codes(codes, shape, slot.encoding, shard.scale_inv().clone())?;
    let with_cast = slot.columnwise && whole.device().transpose_policy() == TransposePolicy::WithCast;
    Ok(Operand::Fp8(if with_cast { whole.with_columnwise()? } else { whole }))
}

/// What every rank quantizes with: the scale that it holds, or one made of the whole tensor's amax.
fn one_scale(
    group: &dyn ProcessGroup,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
    held: Option<f32>,
    rule: &ScaleRule,
) -> Result<f32> {
    let amax = if held.is_none() { ops::amax(shard)?.item()? } else { 0.0 };
    let mine = Tensor::from_vec(vec![held.map_or(UNSET, f32::abs), amax], [1, 2], shard.device())?;
    // Rule and types travel in the name: ranks that differ in them get an error that shows both.
    let label = format!("{what}: a scale for {} as {} by {rule:?}", shard.dtype(), slot.encoding);
    let all = group.all_gather(&label, &mine)?.to_vec::<f32>()?;
    let (all, _) = all.as_chunks::<2>();
    if let [[first, _], others @ ..] = all
        && let Some((rank, [scale, _])) =
            (1..).zip(others).find(|(_, [scale, _])| scale.to_bits() != first.to_bits())
    {
        let [value, other_value] = [scale, first].map(|&scale| Some(scale).filter(|&scale| scale != UNSET));
        let call = format!("quantized_all_gather `{what}`");
        return Err(Error::Scales { call, rank, value, other: 0, other_value });
    }
    let amax = all.iter().map(|&[_, amax]| amax).fold(0.0, f32::max); // none is NaN
    match (held, slot.scale) {
        (Some(scale), _) => Ok(scale.abs()),
        // As on one device: zero and infinity say nothing, and the slot stays unset.
        (None, Scale::Cell { .. }) if !(amax.is_finite() && amax > 0.0) => Ok(1.0),
        (None, Scale::Cell { cell, keep, .. }) => {
            let scale = rule.scale(amax, 1.0)?;
            if keep {
                cell.write(-scale)?;
            }
            Ok(scale)
        }
        (None, _) => Ok(rule.scale(amax, 1.0)?),
    }
}
