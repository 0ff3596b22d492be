//! Explains in words which recipe each slot gets.

use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::assignment::Assignment;
use crate::recipes::gemm_pairs::{Gemm, Operand};
use crate::reports::slot_report::STAYS_HIGH;
use crate::{Encoding, Fp8Gemms, Recipe, RecipeLabel, Result, Scaling, SlotRole};
use fp8_kernels::Device;
use fp8_kernels::ops::Emulation;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The text in explanations for an input or gradient in NVFP4: an operand's scales depend on all of its values, so that the operation
/// before cannot write its codes.
const QUANTIZED_AFTER: &str =
    "quantized from high precision, in which a norm or activation before it writes its output";

/// The recipe of each slot of a model, why the slot gets it, and the GEMMs that run in FP8: see [`Scaling::explain`].
///
/// `Display` writes a line for each layer, one for each of its slots, and one for each GEMM that the device emulates.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{CurrentScaling, DelayedScaling, ExplainedLayer, ExplainedSlot, GemmSlots, Recipe, Scaling};
///
/// let scaling = Scaling::new(&vec![GemmSlots::new("fc1"), GemmSlots::new("fc2")], &Device::cpu())?;
/// let recipe = Recipe::by_name(
///     [("fc1.grad_output", CurrentScaling::default().into()), ("fc2.weight", Recipe::off())],
///     DelayedScaling::default(),
/// );
/// let explanation = scaling.explain(&recipe)?;
/// assert_eq!(
///     explanation.to_string(),
///     "fc1: fprop, dgrad and wgrad run in FP8\n  \
///        input: delayed (default)\n  \
///        weight: delayed (default)\n  \
///        grad_output: current (pattern `fc1.grad_output`)\n\
///      fc2: wgrad runs in FP8\n  \
///        input: delayed (default)\n  \
///        weight: off (pattern `fc2.weight`)\n  \
///        grad_output: delayed (default)\n"
/// );
/// let ExplainedLayer { path, gemms, slots, .. } = &explanation.layers[1];
/// assert_eq!((&**path, gemms.fprop, gemms.wgrad), ("fc2", false, true));
/// let ExplainedSlot { pattern, recipe, .. } = &slots[1];
/// assert_eq!((pattern.as_deref(), recipe), (Some("fc2.weight"), &None));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The layers, sorted by path.
    pub layers: Vec<ExplainedLayer>,
    /// The patterns that match slots of which earlier patterns take all.
    pub shadowed: Vec<Arc<str>>,
}

/// A layer and its slots, as listed in an [`Explanation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedLayer {
    /// The path of the layer.
    pub path: Arc<str>,
    /// The GEMMs of the layer that run in FP8.
    pub gemms: Fp8Gemms,
    /// Its slots: input, weight, output, gradients.
    pub slots: Vec<ExplainedSlot>,
    /// The GEMMs in FP8, `fprop`, `dgrad` and `wgrad`, that the device or its cuBLAS does not have, with what takes their place.
    pub emulated: Vec<(&'static str, Emulation)>,
}

/// A slot and its recipe, as listed in an [`Explanation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedSlot {
    /// The slot's name.
    pub name: Arc<str>,
    /// The part that the tensor plays in its GEMM.
    pub role: SlotRole,
    /// Its recipe. `None` if it stays in high precision.
    pub recipe: Option<RecipeLabel>,
    /// The format of its codes. [`Encoding::E2M1`] means NVFP4, under which a norm or activation writes its output in high precision, and
    /// it is quantized after. `None` if it stays in high precision.
    pub encoding: Option<Encoding>,
    /// The pattern that chose the recipe. `None` for the default, and for a recipe that treats all slots alike.
    pub pattern: Option<Arc<str>>,
    /// Whether attention, which reads the tensor, leaves it in high precision because the recipe gives a tensor more than one
    /// scale.
    pub stays_in_high_precision: bool,
}

impl Scaling {
    /// Explains which recipe each slot would get in a scope under `recipe`, and which GEMMs would run in FP8. It opens no
    /// scope and creates no arenas. [`Explanation`] has an example.
    ///
    /// # Errors
    /// As [`autocast`](Self::autocast).
    pub fn explain(&self, recipe: &Recipe) -> Result<Explanation> {
        recipe.validate()?;
        let assignment = Assignment::new(&recipe.choice(), self.model_slots().all())?;
        let mut layers: BTreeMap<Arc<str>, (Vec<ExplainedSlot>, Vec<Operand<'_>>)> = BTreeMap::new();
        for (direction, slots) in self.model_slots().all().each_ref() {
            for (index, slot) in slots.iter().enumerate() {
                let (policy, pattern) = match &assignment {
                    Assignment::All(policy) => (policy.as_ref(), None),
                    Assignment::BySlot(all) => {
                        let position = all.positions[direction].get(index).copied().flatten();
                        let rule = position.and_then(|position| all.recipe.rules.get(position));
                        (all.recipe.policy(position), rule.map(|rule| rule.pattern.clone()))
                    }
                };
                let leaves_high = match policy {
                    Some(policy) => slot.is_of_attention() && !policy.has_one_scale(slot.role()),
                    None => false,
                };
                let attention = match policy {
                    // What would run in FP8 under a recipe of its kind with one scale for a tensor.
                    Some(policy) => policy.fp8_attention().max(least(leaves_high)),
                    None => Fp8Attention::Off,
                };
                if !slot.used_by().is_by(attention) {
                    continue;
                }
                let (slots, operands) = layers.entry(slot.layer().clone()).or_default();
                slots.push(ExplainedSlot {
                    name: slot.name().clone(),
                    role: slot.role(),
                    recipe: policy.map(|policy| RecipeLabel::new(&policy.key(), None)),
                    encoding: policy.map(|policy| policy.format().encoding(direction)),
                    pattern,
                    stays_in_high_precision: leaves_high,
                });
                operands.push(Operand { role: slot.role(), policy: policy.map(|policy| &**policy) });
            }
        }
        let layers = layers.into_iter().map(|(path, (mut slots, operands))| {
            slots.sort_by_key(|slot| slot.role);
            let gemms = of_operands(assignment.gemms(&path), &operands);
            let emulated = emulated(self.device(), gemms, &operands);
            ExplainedLayer { gemms, path, slots, emulated }
        });
        let shadowed = match &assignment {
            Assignment::All(_) => Vec::new(),
            Assignment::BySlot(all) => {
                let is_used = |position| {
                    all.positions.each_ref().into_iter().any(|(_, all)| all.contains(&Some(position)))
                };
                let rules = all.recipe.rules.iter().enumerate();
                rules
                    .filter(|(position, _)| !is_used(*position))
                    .map(|(_, rule)| rule.pattern.clone())
                    .collect()
            }
        };
        Ok(Explanation { layers: layers.collect(), shadowed })
    }
}

/// Those GEMMs whose two operands are slots of the layer: attention, for one, quantizes tensors that no GEMM of a Linear reads.
fn of_operands(gemms: Fp8Gemms, operands: &[Operand<'_>]) -> Fp8Gemms {
    let has =
        |gemm: Gemm| gemm.roles().iter().all(|role| operands.iter().any(|operand| operand.role == *role));
    Fp8Gemms {
        fprop: gemms.fprop && has(Gemm::Fprop),
        dgrad: gemms.dgrad && has(Gemm::Dgrad),
        wgrad: gemms.wgrad && has(Gemm::Wgrad),
    }
}

/// Returns the names of those FP8 GEMMs of a layer that the device emulates, each with the kind of emulation.
fn emulated(device: &Device, gemms: Fp8Gemms, operands: &[Operand<'_>]) -> Vec<(&'static str, Emulation)> {
    let all = [(Gemm::Fprop, gemms.fprop), (Gemm::Dgrad, gemms.dgrad), (Gemm::Wgrad, gemms.wgrad)];
    let of = |(gemm, runs): (Gemm, bool)| {
        let operand = |role| operands.iter().find(|operand| operand.role == role).copied();
        let [a, b] = gemm.roles().map(operand);
        let emulation = gemm.emulation(device, &[a?, b?]).filter(|_| runs)?;
        Some((gemm.name(), emulation))
    };
    all.into_iter().filter_map(of).collect()
}

/// Returns the minimum extent of FP8 attention that an explanation assumes for a slot. It is `Dpa` for a slot that
/// attention leaves in high precision, so that the slot is listed.
const fn least(leaves_high: bool) -> Fp8Attention {
    if leaves_high { Fp8Attention::Dpa } else { Fp8Attention::Off }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ExplainedLayer { path, gemms, slots, emulated } in &self.layers {
            let has_gemms = slots.iter().any(|slot| slot.role == SlotRole::Weight);
            let mut encodings = slots.iter().filter_map(|slot| slot.encoding);
            let format = if encodings.all(|encoding| encoding == Encoding::E2M1) { "NVFP4" } else { "FP8" };
            match has_gemms {
                true => writeln!(f, "{path}: {}", run_in(*gemms, format))?,
                false => writeln!(f, "{path}: tensors that no Linear reads")?,
            }
            for ExplainedSlot { role, recipe, encoding, pattern, stays_in_high_precision, .. } in slots {
                let recipe = recipe.as_ref().map_or("off".to_owned(), RecipeLabel::to_string);
                match pattern {
                    Some(pattern) => write!(f, "  {}: {recipe} (pattern `{pattern}`)", role.name())?,
                    None => write!(f, "  {}: {recipe} (default)", role.name())?,
                }
                if *stays_in_high_precision {
                    write!(f, ": {STAYS_HIGH}")?;
                } else if *encoding == Some(Encoding::E2M1) && *role != SlotRole::Weight {
                    write!(f, ": {QUANTIZED_AFTER}")?;
                }
                writeln!(f)?;
            }
            for (gemm, emulation) in emulated {
                writeln!(f, "  {gemm} is {emulation}")?;
            }
        }
        for pattern in &self.shadowed {
            writeln!(f, "pattern `{pattern}` decides nothing: earlier patterns match all of its slots")?;
        }
        Ok(())
    }
}

/// Returns which GEMMs run in a format.
fn run_in(gemms: Fp8Gemms, format: &str) -> String {
    let all = [(gemms.fprop, "fprop"), (gemms.dgrad, "dgrad"), (gemms.wgrad, "wgrad")];
    let names: Vec<&str> = all.iter().filter(|(runs, _)| *runs).map(|(_, name)| *name).collect();
    match names[..] {
        [] => "no GEMM runs in low precision".to_owned(),
        [one] => format!("{one} runs in {format}"),
        [one, other] => format!("{one} and {other} run in {format}"),
        _ => format!("fprop, dgrad and wgrad run in {format}"),
    }
}
