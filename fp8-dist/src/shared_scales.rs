//! One scale for the shards of a tensor that ranks quantize each on its own.

use crate::{Error, ProcessGroup, ReduceOp, Result};
#[cfg(feature = "cuda")]
use fp8_kernels::interop::Committed;
use fp8_kernels::{
    Cell, DType, Device, Nvfp4Rule, Operand, REST, Scale, ScaleRule, Slot, Tensor, UNSET, ops,
};
#[cfg(feature = "cuda")]
use parking_lot::Mutex;
#[cfg(feature = "cuda")]
use std::collections::HashMap;
use std::fmt::Display;

/// Quantizes the shards of tensors with the scales of the whole tensors, by operations of the caller such as a fused norm.
/// [`gather_codes`](crate::gather_codes()) then joins the shards. Each rank of a group has one, for all tensors.
///
/// [`quantized_all_gather`](crate::quantized_all_gather()) does both for a shard that is there in high precision.
///
/// ```
/// use fp8_dist::{Error, ProcessGroup, SharedScales, gather_codes, local};
/// use fp8_kernels::{Device, Encoding, Operand, Scale, ScaleRule, Slot, Tensor, ops};
/// use std::{thread, time::Duration};
///
/// let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
/// let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
/// let run = |group: &dyn ProcessGroup| -> fp8_dist::Result<()> {
///     let scales = SharedScales::default();
///     let shard = Tensor::from_vec(vec![[1.0f32, 448.0][group.rank()]], [1, 1], &Device::cpu())?;
///     let quantize = |slot: &Slot<'_>| Ok::<_, Error>((ops::quantize(&shard, slot)?, ()));
///     let (shard, ()) = scales.quantize(group, "x", &slot, &Device::cpu(), false, quantize)?;
///     if let Operand::Fp8(shard) = shard {
///         assert_eq!(gather_codes(group, "x", &shard)?.codes()?, [0x38, 0x7E]); // the scale is 1 on both ranks
///     }
///     Ok(())
/// };
/// thread::scope(|scope| {
///     for group in local("tp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || run(&*group).unwrap());
///     }
/// });
/// ```
#[derive(Debug, Default)]
pub struct SharedScales {
    /// The scales that the host has found committed, by the tensor's name: it need not read them again.
    #[cfg(feature = "cuda")]
    committed: Mutex<HashMap<String, Committed>>,
}

/// Gives scale 1 for every amax.
const ONE: ScaleRule = ScaleRule::Current { fp8_max: 1.0, epsilon: f32::INFINITY, power_2_scales: false };

impl SharedScales {
    /// Calls `quantize` with a slot that has the scale of the whole tensor, and returns what it returns.
    ///
    /// - A scale in a cell (delayed scaling) is used as it is: one pass. While it is unset, the ranks reduce their amaxes first, and
    ///   keep the first scale if the slot does.
    /// - A scale from the tensor (current scaling): `quantize` is called with a slot that is off and records the amax, the amaxes are
    ///   reduced, and it is called again. Nothing is read to the host.
    /// - NVFP4: `quantize` is called with a slot that is off. The amaxes of the values that it returns, one for each copy, are reduced in one
    ///   call, and `quantize` is called again. Random numbers are those of the slot: give it the place of the shard in the whole.
    /// - Slots with scales for rows or blocks are passed on: they need no other rank. So are those that are off, and those whose scale comes
    ///   from an amax that the caller has found (`Scale::FromAmax`, [`Nvfp4Rule::amax`]), which must be that of the whole.
    ///
    /// On a GPU, the host reads an unset cell in each call, until a scale is committed there. A slot whose amax stays 0 or infinite is read
    /// in each step, and cannot be recorded.
    ///
    /// Every rank of the group calls it for its shard on `device`, with the same `what`, the tensor's name, and slots of equal scales. `in_replay` says
    /// that a backward pass computes an activation again: a scale that is unset then has no amax that could set it, and counts as 1.
    ///
    /// # Errors
    /// Those of `quantize`, which the other ranks are told, so that they do not wait for this one; a failure of the group. An unset scale in a
    /// step that is being recorded leaves the group usable.
    pub fn quantize<T, E: From<Error> + Display>(
        &self,
        group: &dyn ProcessGroup,
        what: &str,
        slot: &Slot<'_>,
        device: &Device,
        in_replay: bool,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T), E>,
    ) -> Result<(Operand, T), E> {
        let mut quantize = |slot: &Slot<'_>| {
            let quantized = quantize(slot);
            // What is being recorded has sent nothing, and the other ranks wait for nothing.
            quantized.inspect_err(|error| {
                if device.capture_number().is_none() {
                    group.poison(&format!("{what}: {error}"));
                }
            })
        };
        let (cell, rule) = match slot.scale {
            Scale::Nvfp4(rule) if rule.amax.is_none() => {
                let (values, _) = quantize(&Slot::off(slot.encoding))?;
                let hadamard = rule.hadamard && slot.columnwise;
                let amax = whole_amaxes(group, what, &values, hadamard)?;
                let scale = Scale::Nvfp4(Nvfp4Rule { amax: Some(&amax), ..rule });
                return quantize(&Slot { scale, ..*slot });
            }
            Scale::Off | Scale::Blocks(_) | Scale::Nvfp4(_) | Scale::FromAmax { .. } => {
                return quantize(slot);
            }
            Scale::Cell { cell, .. } if self.is_set(what, cell)? => return quantize(slot),
            Scale::Cell { .. } if in_replay => {
                return quantize(&Slot { scale: Scale::FromTensor(&ONE), ..*slot });
            }
            Scale::Cell { cell, first, keep } => (Some((cell, keep)), first),
            Scale::FromTensor(rule) => (None, rule),
        };
        let amax = Cell::new(REST, device).map_err(Error::from)?;
        quantize(&Slot { amax: Some(&amax), ..Slot::off(slot.encoding) })?;
        let scale = whole_scale(group, what, &amax, cell, rule)?;
        quantize(&Slot { scale: Scale::Cell { cell: &scale, first: rule, keep: false }, ..*slot })
    }

    /// Returns whether a scale cell is set. On a GPU, the host reads it until it has found a committed scale there.
    fn is_set(&self, what: &str, cell: &Cell) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if !cell.device().is_same(&Device::cpu()) {
            return self.is_set_on_gpu(what, cell);
        }
        let _ = what;
        Ok(cell.read()? != UNSET)
    }

    #[cfg(feature = "cuda")]
    fn is_set_on_gpu(&self, what: &str, cell: &Cell) -> Result<bool> {
        if self.committed.lock().get(what).is_some_and(|committed| committed.holds(cell)) {
            return Ok(true);
        }
        let remedy = "the scale of a tensor that ranks share is not committed yet: run and commit steps before one is recorded";
        cell.device().expect_eager(what, remedy)?;
        let scale = cell.read()?;
        if scale.is_finite() && scale > 0.0 {
            self.committed.lock().insert(what.to_owned(), Committed::new(cell)?);
        }
        Ok(scale != UNSET)
    }
}

/// Returns the largest of the ranks' amaxes of both copies in NVFP4. `values` are this rank's.
fn whole_amaxes(group: &dyn ProcessGroup, what: &str, values: &Operand, hadamard: bool) -> Result<Tensor> {
    let mut amaxes = match values {
        Operand::High(values) => ops::nvfp4_amax(values, hadamard)?,
        Operand::Fp8(codes) => ops::nvfp4_amax(&codes.dequantize(DType::F32)?, hadamard)?,
    };
    group.all_reduce_in_place(&format!("{what}: amaxes"), &mut amaxes, ReduceOp::Max)?;
    Ok(amaxes)
}

/// Returns the scale that `rule` gives for the largest of the ranks' amaxes. Where the slot has a cell, which is unset, the scale is
/// kept there, and an amax that is 0 or infinite gives none.
fn whole_scale(
    group: &dyn ProcessGroup,
    what: &str,
    amax: &Cell,
    cell: Option<(&Cell, bool)>,
    rule: &ScaleRule,
) -> Result<Cell> {
    let mut amax = amax.to_tensor()?;
    group.all_reduce_in_place(&format!("{what}: amax"), &mut amax, ReduceOp::Max)?;
    let Some((cell, keep)) = cell else { return Ok(ops::scale_from_amax(&amax, rule)?) };
    let amax = amax.item()?;
    if !(amax.is_finite() && amax > 0.0) {
        return Ok(Cell::new(1.0, cell.device())?);
    }
    let scale = rule.scale(amax, 1.0)?;
    if keep {
        cell.write(-scale)?; // provisional, as on one device
    }
    Ok(Cell::new(scale, cell.device())?)
}
