//! Quantizes weights that are stored in FP8, as a recipe prescribes.
//!
//! Such a weight has no values in high precision from which a scope could quantize it. Its codes are written where its value
//! changes, in an optimizer's step or a checkpoint's load, and therefore outside of scopes. The scale comes from the new value
//! itself: under delayed scaling, too, whose window could only predict what is known there.

use crate::names::by_direction::ByDirection;
use crate::recipes::assignment::Assignment;
use crate::recipes::policy::Policy;
use crate::{Direction, Error, Forward, Recipe, Result, SlotName, SlotRole, Slots};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{DType, Encoding, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor, ops};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Quantizes one weight that a model stores in FP8, as a recipe says. [`Recipe::weight_quantizers`] returns it.
///
/// Format and granularity are the recipe's. A scale is computed from the elements that share it, by the recipe's formula with
/// its margin, epsilon and powers of two. A recipe with a history, such as delayed scaling, uses the formula of a first scale.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Encoding, Tensor, ops};
/// use fp8_recipe::{BlockScaling, GemmSlots, Recipe};
/// let recipe = Recipe::from(BlockScaling::default());
/// let quantizers = recipe.weight_quantizers(&GemmSlots::new("fc"))?;
/// let quantizer = &quantizers["fc.weight"];
/// assert_eq!(quantizer.encoding(), Encoding::E4M3);
/// let w = Tensor::from_vec(vec![1.0f32; 256 * 128], [256, 128], &Device::cpu())?;
/// let codes = quantizer.quantize(&w, false)?;
/// assert_eq!(**codes.scale_inv().shape(), [2, 1]); // a factor for each 128 × 128
/// assert_eq!(ops::quantize(&w, &quantizer.slot(false))?.dequantize(w.dtype())?.to_f32_vec()?, [1.0; 256 * 128]);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct WeightQuantizer {
    policy: Arc<dyn Policy>,
    rule: Arc<ScaleRule>,
}

impl WeightQuantizer {
    fn new(policy: &Arc<dyn Policy>) -> Self {
        Self { policy: policy.clone(), rule: Arc::new(policy.rule(SlotRole::Weight)) }
    }

    /// Returns the format of the codes.
    pub fn encoding(&self) -> Encoding {
        self.policy.format().encoding(Direction::Forward)
    }

    /// Returns the slot that an operation such as [`ops::adamw_groups`] quantizes the weight with. `columnwise` says whether a
    /// backward pass reads the weight.
    pub fn slot(&self, columnwise: bool) -> Slot<'_> {
        let scale = match self.policy.state() {
            Some(_) => Scale::FromTensor(&self.rule),
            None => self.policy.scale(SlotRole::Weight, &self.rule),
        };
        Slot { scale, columnwise, ..Slot::off(self.encoding()) }
    }

    /// Returns the codes of a weight.
    ///
    /// # Errors
    /// A tensor that is not a float; the device is out of memory or failed.
    pub fn quantize(&self, weight: &Tensor, columnwise: bool) -> Result<Fp8Tensor> {
        match ops::quantize(weight, &self.slot(columnwise))? {
            Operand::Fp8(codes) => Ok(codes),
            // The slot is not off, so there is no such operand.
            Operand::High(values) => {
                let (found, expected) = (values.dtype(), "FP8");
                Err(fp8_kernels::Error::DType { op: "quantize", what: "the codes", found, expected }.into())
            }
        }
    }
}

impl Recipe {
    /// Returns how this recipe quantizes the weights of `model` whose fprop and dgrad both run in FP8, by the name of their slot.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{DType, Device, Tensor};
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Recipe};
    /// let recipe = Recipe::from(DelayedScaling::default());
    /// let quantizers = recipe.weight_quantizers(&GemmSlots::new("fc"))?;
    /// let w = Tensor::from_vec(vec![1.0f32, -3.5], [1, 2], &Device::cpu())?;
    /// let codes = quantizers["fc.weight"].quantize(&w, false)?;
    /// assert_eq!(codes.scale_inv().item()?, 1.0 / 128.0); // 3.5 / 448
    /// assert_eq!(codes.dequantize(DType::F32)?.to_f32_vec()?, [1.0, -3.5]);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a recipe by name with a pattern that matches no slot of the model.
    pub fn weight_quantizers(
        &self,
        model: &(impl Slots + ?Sized),
    ) -> Result<BTreeMap<Arc<str>, WeightQuantizer>> {
        self.validate()?;
        let mut slots = ByDirection::<Vec<SlotName>>::default();
        model.slots(&mut |slot| slots[slot.direction()].push(slot.clone()));
        let assignment = Assignment::new(&self.choice(), &slots)?;
        let weights = slots[Direction::Forward].iter().enumerate();
        let quantizer = |(index, slot): (usize, &SlotName)| {
            let gemms = assignment.gemms(slot.layer());
            let policy = assignment.policy(Direction::Forward, index)?;
            let is_fp8 = slot.role() == SlotRole::Weight && gemms.fprop && gemms.dgrad;
            is_fp8.then(|| (slot.name().clone(), WeightQuantizer::new(policy)))
        };
        Ok(weights.filter_map(quantizer).collect())
    }
}

impl Forward<'_> {
    /// Returns a weight that is stored in FP8, as the GEMMs of this scope read it: its codes, or its values in `dtype` where the
    /// scope does not quantize weights.
    ///
    /// No amax is recorded, so under delayed scaling the slot did not run: the weight's scale was computed when its codes were
    /// written.
    ///
    /// dgrad reads the codes of the transpose. Codes with one factor, or with one for each 128 × 128 or 16 × 16, are transposed exactly. With
    /// rows, 1 × 128, 1 × 16 or MX blocks, other elements share a factor in the transpose. If the weight was quantized without these
    /// codes, as for inference, a scope that backward follows makes them from the dequantized values
    /// ([`Fp8Tensor::quantize_columnwise`]). They are rounded twice then, and last as long as the operand. A weight that was quantized
    /// with them, by [`WeightQuantizer::quantize`], is rounded once.
    ///
    /// # Errors
    /// As [`slot`](Self::slot). A scope that quantizes weights in another format or granularity than the codes have, because
    /// dequantized codes would be rounded twice.
    pub fn fp8_weight(&mut self, name: &SlotName, weight: &Fp8Tensor, dtype: DType) -> Result<Operand> {
        let slot = self.slot(name)?;
        if slot.is_off() {
            return Ok(Operand::High(weight.dequantize(dtype)?));
        }
        let blocks = slot.blocks();
        if (slot.encoding, blocks) == (weight.encoding(), weight.blocks()) {
            let weight = weight.clone();
            return Ok(Operand::Fp8(match blocks {
                None | Some(Blocks::B128x128 | Blocks::B16x16) => weight,
                Some(_) if slot.columnwise => weight.quantize_columnwise(&slot)?,
                Some(_) => weight,
            }));
        }
        Err(Error::WeightFormat {
            slot: name.name().clone(),
            stored: form(weight.encoding(), weight.blocks()),
            wanted: form(slot.encoding, blocks),
        })
    }
}

/// Describes format and granularity.
fn form(encoding: Encoding, blocks: Option<Blocks>) -> String {
    match blocks {
        None => format!("{encoding} with one scale"),
        Some(blocks) => format!("{encoding} with a scale for each {blocks}"),
    }
}
