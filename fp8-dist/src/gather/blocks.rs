//! All-gather of a tensor with a scale for each row or block.
//!
//! A block that is quantized from the elements of one shard alone has the codes and the scale that it has in the whole tensor. Codes
//! and factors of such shards, one after the other, are therefore those of the whole:
//!
//! | copy | rows | 1 × 128 | 128 × 128 | MX |
//! |---|---|---|---|---|
//! | rowwise | any shards | any shards | shards of 128 rows | any shards |
//! | columnwise | none | shards of 128 rows | as rowwise | shards of 32 rows |
//!
//! "Shards of 128 rows" means that each shard except the last has a multiple of 128. In all other cases the shards are gathered in
//! high precision, and each rank quantizes the whole tensor. That is also done for 16-bit shards whose columnwise copy is wanted:
//! rowwise and columnwise codes together have more bytes than the values. The columnwise copy of 128 × 128 blocks is not gathered
//! but made of the rowwise one.

use super::codes;
use super::gatherer::Gatherer;
use super::shard::label;
use crate::Result;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{BlockRule, DType, Operand, Slot, Tensor, ops};

/// Gathers a tensor that `slot` quantizes by `rule`.
pub(crate) fn gather(
    group: &dyn Gatherer,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
    rule: BlockRule,
) -> Result<Operand> {
    let label = label(what, shard, slot);
    let joins = match multiple(rule, slot.columnwise, shard.dtype()) {
        // A vector is one row: its shards lie along the blocks.
        _ if shard.shape().len() < 2 => false,
        None => false,
        Some(1) => true,
        Some(multiple) => {
            let [rows, _] = shard.shape().matrix();
            group.are_multiples(&label, rows, multiple, shard.device())?.0
        }
    };
    if !joins {
        let whole = group.all_gather(&label, shard)?;
        record(shard, slot)?;
        return Ok(ops::quantize(&whole, &Slot { amax: None, counters: None, ..*slot })?);
    }
    let turns = slot.columnwise && rule.blocks() == Blocks::B128x128;
    let slot = if turns { slot.rowwise_only() } else { *slot };
    let part = match ops::quantize(shard, &slot)? {
        Operand::Fp8(part) => part,
        Operand::High(values) => return Ok(Operand::High(group.all_gather(&label, &values)?)),
    };
    let call = format!("quantized_all_gather `{what}`");
    let whole = codes::join(group, what, &label, &call, &part)?;
    Ok(Operand::Fp8(if turns { whole.with_columnwise()? } else { whole }))
}

/// Returns the number of rows of which each shard except the last must have a multiple, so that codes and factors can be gathered.
/// `None` if they cannot, or if that would move more bytes than the values have.
fn multiple(rule: BlockRule, columnwise: bool, dtype: DType) -> Option<usize> {
    match (rule.blocks(), rule.columnwise_blocks()) {
        (Blocks::B128x128, _) => Some(128),
        _ if !columnwise => Some(1),
        _ if dtype.size() <= 2 => None,
        (Blocks::B1x128, Some(Blocks::B1x128)) => Some(128),
        (Blocks::Mx32, Some(Blocks::Mx32)) => Some(32),
        _ => None,
    }
}

/// Records amax and counts of this rank's shard, as in gathers of codes.
fn record(shard: &Tensor, slot: &Slot<'_>) -> Result<()> {
    if slot.amax.is_some() || slot.counters.is_some() {
        ops::quantize(shard, &slot.rowwise_only())?;
    }
    Ok(())
}
