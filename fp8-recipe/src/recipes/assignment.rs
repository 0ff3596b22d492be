//! Assigns a recipe to each slot of a model and determines which GEMMs run in FP8.

use crate::names::by_direction::ByDirection;
use crate::names::pattern::nearest;
use crate::recipes::by_name::ByName;
use crate::recipes::gemm_pairs::{Gemm, Operand, pair_problem};
use crate::recipes::policy::Policy;
use crate::recipes::recipe::Choice;
use crate::{Direction, Error, Fp8Gemms, GemmAccumulation, Result, SlotName};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The recipes that a scope assigns to the slots of a model.
#[derive(Debug)]
pub(crate) enum Assignment {
    /// One recipe for all slots; `None` is high precision.
    All(Option<Arc<dyn Policy>>),
    BySlot(BySlot),
}

/// A recipe for each slot.
#[derive(Debug)]
pub(crate) struct BySlot {
    pub(crate) recipe: Arc<ByName>,
    /// For each slot the position of its pattern, or `None` for the default.
    pub(crate) positions: ByDirection<Vec<Option<usize>>>,
    /// Those positions that decide about a slot which their recipe uses.
    used: HashSet<Option<usize>>,
    /// By the path of the layer.
    gemms: HashMap<Arc<str>, (Fp8Gemms, GemmAccumulation)>,
}

impl Assignment {
    /// Assigns recipes to `slots`.
    ///
    /// # Errors
    /// A pattern that matches no slot; a GEMM whose operands cannot be multiplied.
    pub(crate) fn new(choice: &Choice<'_>, slots: &ByDirection<Vec<SlotName>>) -> Result<Self> {
        match choice {
            Choice::All(policy) => Ok(Self::All(policy.cloned())),
            Choice::ByName(recipe) => Ok(Self::BySlot(BySlot::new(recipe, slots)?)),
        }
    }

    /// Returns the recipe of a slot, or `None` if the slot stays in high precision. `slot` is its index in the slots that this
    /// was made from.
    pub(crate) fn policy(&self, direction: Direction, slot: usize) -> Option<&Arc<dyn Policy>> {
        match self {
            Self::All(policy) => policy.as_ref(),
            Self::BySlot(slots) => slots.recipe.policy(*slots.positions[direction].get(slot)?),
        }
    }

    /// Returns which GEMMs of the layer at `path` run in FP8.
    pub(crate) fn gemms(&self, path: &str) -> Fp8Gemms {
        match self {
            Self::All(Some(policy)) => Fp8Gemms::except(policy.override_linear_precision()),
            Self::All(None) => Fp8Gemms::NONE,
            Self::BySlot(slots) => slots.gemms.get(path).map_or(Fp8Gemms::NONE, |(gemms, _)| *gemms),
        }
    }

    /// Returns how the FP8 GEMMs of the layer at `path` accumulate.
    pub(crate) fn accumulation(&self, path: &str) -> GemmAccumulation {
        let of_layer = match self {
            Self::All(Some(policy)) => Some(GemmAccumulation::new(policy.use_split_accumulator())),
            Self::All(None) => None,
            Self::BySlot(slots) => slots.gemms.get(path).map(|(_, accumulation)| *accumulation),
        };
        of_layer.unwrap_or_default()
    }
}

impl BySlot {
    /// Returns whether some slot uses the recipe at this position.
    pub(crate) fn is_used(&self, position: Option<usize>) -> bool {
        self.used.contains(&position)
    }

    fn new(recipe: &Arc<ByName>, slots: &ByDirection<Vec<SlotName>>) -> Result<Self> {
        let all = || slots.each_ref().into_iter().flat_map(|(_, slots)| slots);
        if let Some(unused) = recipe.rules.iter().find(|rule| !all().any(|slot| rule.is_for(slot))) {
            let pattern = unused.pattern.clone();
            let nearest = nearest(&pattern, all().map(|slot| slot.name().clone()));
            return Err(Error::Pattern { pattern, nearest });
        }
        let positions = slots.each_ref().map(|slots| slots.iter().map(|slot| recipe.choose(slot)).collect());
        let uses = |slot: &&SlotName| {
            let policy = recipe.policy(recipe.choose(slot));
            policy.is_some_and(|policy| slot.used_by().is_by(policy.fp8_attention()))
        };
        let used = all().filter(uses).map(|slot| recipe.choose(slot)).collect();
        let mut layers: HashMap<Arc<str>, Vec<Operand<'_>>> = HashMap::new();
        for slot in all() {
            let policy = recipe.policy(recipe.choose(slot)).map(|policy| &**policy);
            layers.entry(slot.layer().clone()).or_default().push(Operand { role: slot.role(), policy });
        }
        let gemms = layers.into_iter().map(|(path, operands)| {
            let gemms = gemms(&path, &operands)?;
            Ok((path, (gemms, accumulation(&operands))))
        });
        Ok(Self { recipe: recipe.clone(), positions, used, gemms: gemms.collect::<Result<_>>()? })
    }
}

/// Returns which GEMMs of a layer with these slots run in FP8.
fn gemms(path: &Arc<str>, operands: &[Operand<'_>]) -> Result<Fp8Gemms> {
    let runs = |gemm: Gemm| -> Result<bool> {
        let found = gemm.roles().map(|role| operands.iter().find(|operand| operand.role == role));
        let [Some(a), Some(b)] = found else { return Ok(false) };
        if !(gemm.takes(a) && gemm.takes(b)) {
            return Ok(false);
        }
        match pair_problem(gemm, a, b) {
            None => Ok(true),
            Some(problem) => {
                let gemm = gemm.name();
                Err(Error::Operands { layer: path.clone(), gemm, problem })
            }
        }
    };
    Ok(Fp8Gemms { fprop: runs(Gemm::Fprop)?, dgrad: runs(Gemm::Dgrad)?, wgrad: runs(Gemm::Wgrad)? })
}

/// Returns how the FP8 GEMMs of a layer with these slots accumulate: split if the recipe of either operand asks for it.
fn accumulation(operands: &[Operand<'_>]) -> GemmAccumulation {
    let splits = |gemm: Gemm| {
        operands.iter().any(|operand| gemm.roles().contains(&operand.role) && gemm.splits(operand))
    };
    GemmAccumulation::new((splits(Gemm::Fprop), splits(Gemm::Dgrad), splits(Gemm::Wgrad)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::by_name::Rule;
    use crate::{CurrentScaling, Format, SlotRole};

    #[test]
    fn operands_that_cannot_be_multiplied_name_their_gemm() {
        // `validate`, which a scope calls first, refuses E5M2 for all tensors.
        let policy = |fp8_format| -> Option<Arc<dyn Policy>> {
            Some(Arc::new(CurrentScaling { fp8_format, ..Default::default() }))
        };
        let assign = |pattern: &str| {
            let rules = vec![Rule { pattern: pattern.into(), policy: policy(Format::E5M2) }];
            let recipe = ByName { rules, default: policy(Format::Hybrid), is_nested: false };
            let slots = ByDirection {
                forward: [SlotRole::Input, SlotRole::Weight].map(|role| SlotName::new("fc", role)).to_vec(),
                backward: vec![SlotName::new("fc", SlotRole::GradOutput)],
            };
            Assignment::new(&Choice::ByName(&Arc::new(recipe)), &slots).map(drop)
        };
        for (pattern, gemm, operand) in [("fc.weight", "dgrad", "weight"), ("fc.input", "wgrad", "input")] {
            assert_eq!(
                assign(pattern).unwrap_err().to_string(),
                format!(
                    "recipe by name: {gemm} of `fc`: grad_output and {operand} are both E5M2, which no FP8 GEMM \
                     multiplies: use E4M3 or HYBRID for one of them"
                )
            );
        }
        assert!(assign("fc.grad_output").is_ok());
        assert!(assign("fc").unwrap_err().to_string().starts_with("recipe by name: fprop of `fc`: "));
    }
}
