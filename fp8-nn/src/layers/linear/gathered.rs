//! Inputs and gradients whose tokens ranks have parts of (sequence parallelism): they are quantized where they are, gathered in FP8,
//! and gathered again where wgrad reads the input.
//!
//! | scales | forward gathers | backward gathers for wgrad |
//! |---|---|---|
//! | one | rowwise codes, with the scale of the whole | the same codes, which are transposed then |
//! | 1 × 128, MX | rowwise codes and scales | columnwise ones, if each rank has a multiple of 128 (MX: 32) tokens, or else values |
//! | 1 × 16 (NVFP4) | rowwise codes and scales, by the amax of the whole | columnwise ones, if each rank has a multiple of 16 tokens, or else values |
//! | 128 × 128 | codes and scales, if each rank has a multiple of 128 tokens, or else values | the same |
//! | for rows | rowwise codes and scales | values: a columnwise scale spans the tokens of all ranks |
//! | none | values | values |
//!
//! Values are gathered in the dtype that the layer computes in, and each rank quantizes the whole.

use super::fused_operand::Fused;
use super::input::{Input, Kept};
use super::quantized::Quantized;
use crate::{Result, TensorParallel};
use fp8_dist::gather_codes;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{Device, Fp8Tensor, Operand, Scale, Slot, Tensor, TransposePolicy, ops};
use fp8_recipe::{Backward, Forward, Origin, SlotName};

/// An input of a column-parallel layer, or a gradient of a row-parallel layer's output, of which each rank has some tokens.
#[derive(Debug)]
pub(crate) struct Tokens<'a> {
    pub(crate) ranks: &'a TensorParallel,
    /// The name of the slot that quantizes it.
    pub(crate) name: &'a SlotName,
    pub(crate) device: &'a Device,
    /// Whether the layer's weight is trained, and so wgrad runs.
    pub(crate) is_trainable: bool,
    /// Whether the layer has low-rank adapters, which read values.
    pub(crate) has_adapters: bool,
}

impl Tokens<'_> {
    /// Quantizes this rank's tokens of the input by `quantize`, and gathers what fprop and adapters read.
    pub(crate) fn gather_input<T>(
        &self,
        cx: &mut Forward<'_>,
        fused: &Fused<'_>,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
        check: impl Fn(&Operand) -> Result<()>,
    ) -> Result<(Input, T)> {
        let (ranks, name) = (self.ranks, self.name);
        let (gemms, is_replay) = (cx.fp8_gemms(name), cx.is_replay());
        let slot = self.for_gemms(cx.slot(name)?);
        let mut run = |slot: &Slot<'_>| fused.raw(slot, &mut quantize, &check);
        let (shard, known, rest) = self.quantize_shard(&slot, is_replay, fused, &mut run)?;
        let in_fp8 = gemms.fprop && shard.is_fp8();
        let gathers_codes = in_fp8 && rows_fit(&shard);
        let gathers_values = !gathers_codes || self.has_adapters;
        let keeps_values = self.is_trainable && !(gemms.wgrad && columns_fit(&shard));
        let values = match &shard {
            Operand::High(values) => Some(values.clone()),
            Operand::Fp8(_) if gathers_values || keeps_values || fused.measures => Some(match known {
                Some(values) => values,
                None => run(&Slot::off(slot.encoding))?.0.dequantize(fused.dtype)?,
            }),
            Operand::Fp8(_) => None,
        };
        let high = match &values {
            Some(values) if gathers_values => Some(ranks.gather(&in_high_precision(name.name()), values)?),
            _ => None,
        };
        let operand = match (&shard, &high) {
            (Operand::Fp8(codes), _) if gathers_codes => {
                Operand::Fp8(gather_codes(&**ranks.group(), name.name(), &codes.without_columnwise())?)
            }
            (_, Some(high)) if in_fp8 => ops::quantize(high, &unrecorded(slot).rowwise_only())?,
            (_, Some(high)) => Operand::High(high.clone()),
            (shard, None) => shard.clone(), // cannot be: what is not gathered as codes is gathered as values
        };
        if in_fp8 {
            ranks.note_gather(name, false, gathers_codes);
        }
        if let Some(values) = values.as_ref().filter(|_| shard.is_fp8()) {
            cx.measure_sqnr(name, values, &shard)?;
        }
        let of_adapters = values.clone().filter(|_| self.has_adapters);
        let kept = self.keep(cx, gemms.wgrad, shard, values);
        Ok((Input { whole: Quantized::with_values(operand, high), shard: kept, values: of_adapters }, rest))
    }

    /// Quantizes this rank's tokens of the input again, as they are kept for wgrad. `cx` is a replay of the forward pass.
    pub(crate) fn keep_again(
        &self,
        cx: &mut Forward<'_>,
        fused: &Fused<'_>,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, ())>,
    ) -> Result<Option<Kept>> {
        let slot = self.for_gemms(cx.slot(self.name)?);
        let mut run = |slot: &Slot<'_>| fused.raw(slot, &mut quantize, &|_| Ok(()));
        let (shard, known, ()) = self.quantize_shard(&slot, true, fused, &mut run)?;
        let values = match &shard {
            Operand::Fp8(_) if !fused.needs_values && columns_fit(&shard) => None,
            Operand::Fp8(_) => Some(match known {
                Some(values) => values,
                None => run(&Slot::off(slot.encoding))?.0.dequantize(fused.dtype)?,
            }),
            Operand::High(values) => Some(values.clone()),
        };
        Ok(self.keep(cx, !fused.needs_values, shard, values))
    }

    /// A slot without a columnwise copy if the weight is frozen, because only wgrad reads it.
    fn for_gemms<'a>(&self, slot: Slot<'a>) -> Slot<'a> {
        Slot { columnwise: slot.columnwise && self.is_trainable, ..slot }
    }

    /// Quantizes this rank's tokens with the scale of the whole tensor. Returns their values, too, if they were computed.
    fn quantize_shard<T>(
        &self,
        slot: &Slot<'_>,
        is_replay: bool,
        fused: &Fused<'_>,
        run: &mut impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
    ) -> Result<(Operand, Option<Tensor>, T)> {
        if let Scale::Nvfp4(rule) = slot.scale {
            let (values, rest) = run(&Slot::off(slot.encoding))?;
            let shard = self.quantize_nvfp4(slot, rule, &values, is_replay)?;
            return Ok((shard, Some(values.dequantize(fused.dtype)?), rest));
        }
        // A columnwise copy is made of the gathered rows where one scale is for all, and is of no use where one is for all rows.
        let has_columnwise = match slot.scale {
            Scale::Blocks(rule) => {
                matches!(rule.columnwise_blocks(), Some(Blocks::B1x128 | Blocks::Mx32))
            }
            _ => false,
        };
        let slot = Slot { columnwise: slot.columnwise && has_columnwise, ..*slot };
        let (ranks, name) = (self.ranks, self.name.name());
        let (shard, rest) =
            ranks.scales().quantize(&**ranks.group(), name, &slot, self.device, is_replay, run)?;
        Ok((fused.in_dtype(shard)?, None, rest))
    }

    /// Returns what is kept of the shard; `None` if the weight is frozen. `values` are there if they are kept.
    fn keep(
        &self,
        cx: &mut Forward<'_>,
        in_fp8: bool,
        shard: Operand,
        values: Option<Tensor>,
    ) -> Option<Kept> {
        if !self.is_trainable {
            return None;
        }
        Some(match (shard, values) {
            (Operand::Fp8(codes), _) if in_fp8 && columns_fit_codes(&codes) => {
                let codes = if codes.columnwise().is_some() { codes.for_backward() } else { codes };
                Kept::Codes(codes)
            }
            (Operand::Fp8(_), Some(values)) if in_fp8 => Kept::Values(values, cx.snapshot()),
            (_, Some(values)) => Kept::High(values),
            (Operand::Fp8(codes), None) => Kept::Codes(codes), // cannot be: values are computed where they are kept
            (Operand::High(values), None) => Kept::High(values),
        })
    }

    /// Gathers the input as wgrad reads it.
    pub(crate) fn gather_again(&self, cx: &mut Backward<'_>, kept: Kept) -> Result<Operand> {
        let ranks = self.ranks;
        let name = format!("{}, again", self.name.name());
        Ok(match kept {
            Kept::Codes(codes) => {
                ranks.note_gather(self.name, true, true);
                let whole = gather_codes(&**ranks.group(), &name, &codes)?;
                let is_tiled = matches!(whole.blocks(), Some(Blocks::B128x128 | Blocks::B16x16));
                Operand::Fp8(if is_tiled { whole.with_columnwise()?.for_backward() } else { whole })
            }
            Kept::High(values) => Operand::High(ranks.gather(&in_high_precision(&name), &values)?),
            Kept::Values(values, snapshot) => {
                ranks.note_gather(self.name, true, false);
                let whole = ranks.gather(&in_high_precision(&name), &values)?;
                let mut cx = cx.replay(&snapshot)?;
                ops::quantize(&whole, &cx.slot(self.name)?)?.for_backward()
            }
        })
    }

    /// Quantizes this rank's tokens of `dy` by `quantize`, and gathers it for dgrad and wgrad. The second result is that of `quantize`, of
    /// this rank's tokens.
    pub(crate) fn gather_gradient(
        &self,
        cx: &mut Backward<'_>,
        origin: &Origin,
        fused: &Fused<'_>,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
        check: impl Fn(&Operand) -> Result<()>,
    ) -> Result<(Quantized, Option<Tensor>)> {
        let (ranks, name, device) = (self.ranks, self.name, self.device);
        let &Fused { dtype, needs_values, measures, .. } = fused;
        let mut run = |slot: &Slot<'_>| fused.raw(slot, &mut quantize, &check);
        let seed = cx.dropout_seed();
        let slot = self.for_gemms(cx.slot(origin, name)?);
        let group = &**ranks.group();
        let of_values = Slot::off(slot.encoding);
        let (whole, shard, values, rest) = if let Scale::Blocks(_) = slot.scale {
            let (shard, rest) = run(&slot)?;
            // Rowwise and columnwise codes together have more bytes than 16-bit values.
            let both_fit = !slot.columnwise || columns_fit(&shard) && dtype.size() > 2;
            let gathers_codes = rows_fit(&shard) && both_fit;
            let values = match needs_values || measures || !gathers_codes {
                true => Some(run(&of_values)?.0.dequantize(dtype)?),
                false => None,
            };
            let whole = match (&shard, &values) {
                (Operand::Fp8(codes), _) if gathers_codes => {
                    Operand::Fp8(gather_codes(group, name.name(), codes)?)
                }
                (_, Some(values)) => {
                    let whole = ranks.gather(&in_high_precision(name.name()), values)?;
                    ops::quantize(&whole, &unrecorded(slot))?
                }
                (shard, None) => shard.clone(), // cannot be: blocks make codes, and values are there where those do not fit
            };
            ranks.note_gather(name, false, gathers_codes);
            (whole, shard, values, rest)
        } else if let Scale::Nvfp4(rule) = slot.scale {
            if rule.random.is_some() {
                ranks.expect_one_seed(seed)?;
            }
            let (values, rest) = run(&of_values)?;
            let (whole, shard) = self.gather_nvfp4(&slot, rule, &values, dtype)?;
            (whole, shard, Some(values.dequantize(dtype)?), rest)
        } else {
            let one = slot.rowwise_only();
            let (shard, rest) = ranks.scales().quantize(group, name.name(), &one, device, false, &mut run)?;
            let shard = fused.in_dtype(shard)?;
            let values = match &shard {
                Operand::High(values) => Some(values.clone()),
                Operand::Fp8(_) if needs_values || measures => Some(run(&of_values)?.0.dequantize(dtype)?),
                Operand::Fp8(_) => None,
            };
            let whole = match &shard {
                Operand::Fp8(codes) => {
                    ranks.note_gather(name, false, true);
                    let whole = gather_codes(group, name.name(), codes)?;
                    let with_cast = slot.columnwise && device.transpose_policy() == TransposePolicy::WithCast;
                    Operand::Fp8(if with_cast { whole.with_columnwise()? } else { whole })
                }
                Operand::High(values) => {
                    Operand::High(ranks.gather(&in_high_precision(name.name()), values)?)
                }
            };
            (whole, shard, values, rest)
        };
        let high = match &values {
            Some(values) if needs_values && whole.is_fp8() => {
                Some(ranks.gather(&format!("{}, too", in_high_precision(name.name())), values)?)
            }
            _ => None,
        };
        if let Some(values) = &values {
            cx.measure_sqnr(origin, name, values, &shard)?;
        }
        Ok((Quantized::with_values(whole, high), rest))
    }
}

/// A name of its own for a tensor that is gathered as codes, too.
fn in_high_precision(name: &str) -> String {
    format!("{name}, in high precision")
}

fn unrecorded<'a>(slot: Slot<'a>) -> Slot<'a> {
    Slot { amax: None, counters: None, ..slot }
}

/// Returns whether rowwise codes of all shards are those of the whole. Shards have equal numbers of tokens.
fn rows_fit(shard: &Operand) -> bool {
    let Operand::Fp8(codes) = shard else { return false };
    match codes.blocks() {
        Some(Blocks::B128x128) => codes.matrix()[0].is_multiple_of(128),
        Some(Blocks::B16x16) => codes.matrix()[0].is_multiple_of(16),
        _ => true,
    }
}

/// Returns whether columnwise codes of all shards are those of the whole, or are made of its rows.
fn columns_fit(shard: &Operand) -> bool {
    matches!(shard, Operand::Fp8(codes) if columns_fit_codes(codes))
}

fn columns_fit_codes(codes: &Fp8Tensor) -> bool {
    let tokens = codes.matrix()[0];
    match (codes.blocks(), codes.columnwise_blocks()) {
        (None, None) => true,
        (Some(Blocks::B128x128), None) => tokens.is_multiple_of(128),
        (Some(Blocks::B16x16), None) | (_, Some(Blocks::B1x16)) => tokens.is_multiple_of(16),
        (_, Some(Blocks::B1x128)) => tokens.is_multiple_of(128),
        (_, Some(Blocks::Mx32)) => tokens.is_multiple_of(32),
        _ => false,
    }
}

mod nvfp4;
#[cfg(test)]
mod tests;
