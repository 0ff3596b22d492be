//! The gather in which the hosts exchange scales, for any backend.

use super::shard::{AllGather, elements, join, label, quantize, rule};
use super::{blocks, nvfp4};
use crate::{Error, Result};
use fp8_kernels::{Cell, Operand, Scale, Slot, Tensor, UNSET, ops};

/// The implementation in which the hosts exchange scales, for any backend.
pub(crate) fn by_exchange(
    all_gather: AllGather<'_>,
    rank: usize,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Operand> {
    if let Scale::Blocks(rule) = slot.scale {
        return blocks::gather(&all_gather, what, shard, slot, rule);
    }
    if let Scale::Nvfp4(rule) = slot.scale {
        return nvfp4::gather(&all_gather, rank, what, shard, slot, rule);
    }
    let agreement = agree(all_gather, what, shard, slot)?;
    let shard = agreement.quantize(shard, slot)?;
    join(&shard, all_gather(what, &elements(&shard)?)?, slot)
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

/// Agrees with the other ranks on the scale: the one that all hold, or one computed from the amax of the whole tensor.
pub(crate) fn agree(
    all_gather: AllGather<'_>,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
) -> Result<Agreement> {
    let Some(rule) = rule(slot) else { return Ok(Agreement { scale: None, is_lasting: true }) };
    let held = match slot.scale {
        Scale::Cell { cell, .. } => Some(cell.read()?).filter(|&scale| scale != UNSET),
        Scale::FromAmax { amax, rule } => Some(rule.scale(amax, 1.0)?),
        Scale::FromTensor(_) | Scale::Off | Scale::Blocks(_) | Scale::Nvfp4(_) => None,
    };
    let amax = if held.is_none() { ops::amax(shard)?.item()? } else { 0.0 };
    let mine = Tensor::from_vec(vec![held.unwrap_or(UNSET), amax], [1, 2], shard.device())?;
    let all = all_gather(&label(what, shard, slot), &mine)?.to_vec::<f32>()?;
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
