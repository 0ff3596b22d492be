//! The shard of a rank: how it is quantized, what of it is gathered, and how the whole is built.

use crate::Result;
use fp8_kernels::{Cell, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor, TransposePolicy, ops};

/// The [`all_gather`](crate::ProcessGroup::all_gather) of a group.
pub(crate) type AllGather<'a> = &'a dyn Fn(&str, &Tensor) -> Result<Tensor>;

/// Returns the rule of a slot that has one scale.
pub(crate) const fn rule<'a>(slot: &Slot<'a>) -> Option<&'a ScaleRule> {
    match slot.scale {
        Scale::Off | Scale::Blocks(_) | Scale::Nvfp4(_) => None,
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
