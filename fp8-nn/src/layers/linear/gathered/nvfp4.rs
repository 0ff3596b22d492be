//! Tokens in NVFP4: they are quantized by the amaxes of all ranks' tokens, and gradients with the random numbers of the whole.

use super::{Tokens, in_high_precision, unrecorded};
use crate::{Error, Result};
use fp8_dist::gather_codes;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{DType, Nvfp4Rule, Operand, Scale, Slot, StochasticRounding, ops};

impl Tokens<'_> {
    /// Quantizes the values of this rank's tokens as a part of the whole. Blocks of the columnwise copy have 16 tokens, and random numbers
    /// are counted from a multiple of 16: with another number of tokens, the result has neither.
    pub(super) fn quantize_nvfp4(
        &self,
        slot: &Slot<'_>,
        rule: Nvfp4Rule<'_>,
        values: &Operand,
        is_replay: bool,
    ) -> Result<Operand> {
        let Operand::High(values) = values else { return Ok(values.clone()) }; // cannot be: a slot that is off makes no codes
        let (ranks, name, [tokens, features]) = (self.ranks, self.name.name(), values.shape().matrix());
        let fits = tokens.is_multiple_of(16);
        let random = rule.random.filter(|_| fits).map(|random| StochasticRounding {
            origin: [ranks.rank() * tokens, 0],
            whole: Some([ranks.size() * tokens, features]),
            ..random
        });
        let slot = Slot {
            scale: Scale::Nvfp4(Nvfp4Rule { random, ..rule }),
            columnwise: slot.columnwise && fits && rule.blocks == Blocks::B1x16,
            ..*slot
        };
        let quantize = |slot: &Slot<'_>| Ok::<_, Error>((ops::quantize(values, slot)?, ()));
        let group = &**ranks.group();
        Ok(ranks.scales().quantize(group, name, &slot, self.device, is_replay, quantize)?.0)
    }

    /// Quantizes and gathers a gradient, given the values of this rank's tokens. Returns the whole and this rank's part.
    pub(super) fn gather_nvfp4(
        &self,
        slot: &Slot<'_>,
        rule: Nvfp4Rule<'_>,
        values: &Operand,
        dtype: DType,
    ) -> Result<(Operand, Operand)> {
        let (ranks, name) = (self.ranks, self.name);
        let is_plain = !slot.columnwise && rule.random.is_none() && rule.blocks == Blocks::B1x16;
        let joins = is_plain || values.shape().matrix()[0].is_multiple_of(16);
        let shard = self.quantize_nvfp4(slot, rule, values, false)?;
        let whole = match &shard {
            Operand::Fp8(codes) if joins => {
                let whole = gather_codes(&**ranks.group(), name.name(), codes)?;
                let is_tiled = slot.columnwise && rule.blocks == Blocks::B16x16;
                Operand::Fp8(if is_tiled { whole.with_columnwise()? } else { whole })
            }
            _ => {
                let values = values.dequantize(dtype)?;
                let whole = ranks.gather(&in_high_precision(name.name()), &values)?;
                ops::quantize(&whole, &unrecorded(*slot))?
            }
        };
        ranks.note_gather(name, false, joins);
        Ok((whole, shard))
    }
}
