//! All-gather of a tensor in NVFP4: 4.5 bits a value of each copy.
//!
//! 1. Each rank finds the amaxes of its shard, one for each copy. The largest of all ranks are those of the whole tensor.
//! 2. Each rank quantizes its shard with them, and records the amax of the whole. Random numbers are those that the shard's blocks have
//!    in the whole.
//! 3. Codes and scales are gathered (`codes.rs`).
//!
//! Blocks of 16 rows, which the columnwise copy and 16 × 16 tiles have, must not be in two shards, and random numbers are counted from a
//! multiple of 16: each shard except the last needs a multiple of 16 rows. If not, the shards are gathered in high precision, and each
//! rank quantizes the whole tensor.

use super::codes;
use super::gatherer::Gatherer;
use crate::Result;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{Nvfp4Rule, Operand, Scale, Slot, StochasticRounding, Tensor, ops};

/// Gathers a tensor that `slot` quantizes by `rule`. This is rank `rank`.
pub(crate) fn gather(
    group: &dyn Gatherer,
    rank: usize,
    what: &str,
    shard: &Tensor,
    slot: &Slot<'_>,
    rule: Nvfp4Rule<'_>,
) -> Result<Operand> {
    let (label, device, [rows, cols]) =
        (label(what, shard, slot, &rule), shard.device(), shard.shape().matrix());
    let is_tiled = rule.blocks == Blocks::B16x16;
    let all = group.rows(&label, rows, device)?;
    // A shard without rows has no factors.
    let joins = if slot.columnwise || is_tiled || rule.random.is_some() {
        all.split_last().is_none_or(|(_, others)| others.iter().all(|rows| rows.is_multiple_of(16)))
    } else {
        true
    } && all.iter().all(|rows| *rows > 0);
    // A vector is one row: its shards lie along the blocks.
    if !joins || shard.shape().len() < 2 {
        let whole = group.all_gather(&label, shard)?;
        if slot.amax.is_some() || slot.counters.is_some() {
            ops::quantize(shard, &slot.rowwise_only())?; // records this rank's shard
        }
        return Ok(ops::quantize(&whole, &Slot { amax: None, counters: None, ..*slot })?);
    }
    let own;
    let amax = match rule.amax {
        Some(amax) => amax,
        None => {
            let of_shard = ops::nvfp4_amax(shard, rule.hadamard && slot.columnwise)?;
            own = group.largest(&format!("{label}: amaxes"), of_shard)?;
            &own
        }
    };
    let random = rule.random.map(|random| StochasticRounding {
        origin: [random.origin[0] + all.iter().take(rank).sum::<usize>(), random.origin[1]],
        whole: Some(random.whole.unwrap_or([all.iter().sum(), cols])),
        ..random
    });
    let rule = Nvfp4Rule { amax: Some(amax), random, ..rule };
    // Tiles are turned after the gather.
    let of_shard = Slot { scale: Scale::Nvfp4(rule), columnwise: slot.columnwise && !is_tiled, ..*slot };
    let part = match ops::quantize(shard, &of_shard)? {
        Operand::Fp8(part) => part,
        Operand::High(values) => return Ok(Operand::High(group.all_gather(&label, &values)?)),
    };
    let whole = codes::join(group, what, &label, &format!("quantized_all_gather `{what}`"), &part)?;
    Ok(Operand::Fp8(if slot.columnwise && is_tiled { whole.with_columnwise()? } else { whole }))
}

/// Describes what must be equal on all ranks besides the amaxes.
pub(crate) fn label(what: &str, shard: &Tensor, slot: &Slot<'_>, rule: &Nvfp4Rule<'_>) -> String {
    let said = |is_so: bool, text| if is_so { text } else { "" };
    format!(
        "{what}: {} in NVFP4 by {}{}{}{}",
        shard.dtype(),
        rule.blocks,
        said(slot.columnwise, ", columnwise"),
        said(slot.columnwise && rule.hadamard, " of a Hadamard transform"),
        said(rule.random.is_some(), ", rounded stochastically"),
    )
}
