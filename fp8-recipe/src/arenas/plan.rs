//! The recipe and group of a scope, as it applies to the slots of the model.

use crate::arenas::domain::Domain;
use crate::recipes::assignment::Assignment;
use crate::{AmaxGroup, Direction, Fp8Gemms, GemmAccumulation, RecipeLabel, Result, SlotName, SlotUse};
use std::sync::Arc;

/// The recipe and group of a scope, and the domain of each slot.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Recipe and group, which identify it.
    pub(crate) key: String,
    /// The domains of its recipes, each once.
    pub(crate) domains: Vec<usize>,
    assignment: Assignment,
    /// Under a recipe by name, the domain of each pattern, and at the end that of the default. `None` is high precision, and
    /// a recipe that no slot has.
    by_position: Vec<Option<usize>>,
    group: Option<Arc<dyn AmaxGroup>>,
    /// Whether the ranks of the group have compared which recipe each slot has.
    agreed: bool,
}

impl Plan {
    /// Creates a plan. `domain` returns the index of a policy's domain.
    pub(crate) fn new(
        key: String,
        assignment: Assignment,
        mut domain: impl FnMut(&Arc<dyn crate::recipes::policy::Policy>) -> usize,
    ) -> Self {
        let (mut domains, mut by_position) = (Vec::new(), Vec::new());
        match &assignment {
            Assignment::All(policy) => domains.extend(policy.as_ref().map(domain)),
            Assignment::BySlot(slots) => {
                let rules = slots.recipe.rules.len();
                for position in (0..rules).map(Some).chain([None]) {
                    let policy = slots.recipe.policy(position).filter(|_| slots.is_used(position));
                    by_position.push(policy.map(&mut domain));
                }
                domains.extend(by_position.iter().flatten());
                domains.sort_unstable();
                domains.dedup();
            }
        }
        Self { key, domains, assignment, by_position, group: None, agreed: false }
    }

    /// Returns the domain of a slot, or `None` if the slot stays in high precision.
    pub(crate) fn domain(&self, direction: Direction, slot: usize) -> Option<usize> {
        match &self.assignment {
            Assignment::All(_) => self.domains.first().copied(),
            Assignment::BySlot(slots) => {
                let position = slots.positions[direction].get(slot).copied()?;
                let default = self.by_position.len() - 1;
                self.by_position.get(position.unwrap_or(default)).copied()?
            }
        }
    }

    /// Returns which GEMMs of the layer at `path` run in FP8.
    pub(crate) fn gemms(&self, path: &str) -> Fp8Gemms {
        self.assignment.gemms(path)
    }

    /// Returns how the FP8 GEMMs of the layer at `path` accumulate.
    pub(crate) fn accumulation(&self, path: &str) -> GemmAccumulation {
        self.assignment.accumulation(path)
    }

    pub(crate) fn group(&self) -> Option<&Arc<dyn AmaxGroup>> {
        self.group.as_ref()
    }

    /// Sets the group, which may be a new one with the same id.
    pub(crate) fn set_group(&mut self, group: Option<Arc<dyn AmaxGroup>>) {
        let is_same = match (&self.group, &group) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if !is_same {
            self.agreed = false;
            self.group = group;
        }
    }

    /// Before the first reduction under a recipe by name, compares over the ranks which recipe each slot has: the slots of a
    /// rank that differed would never run in the arena that the others reduce.
    pub(crate) fn agree<'a>(
        &mut self,
        domains: &[Domain],
        slots: impl Iterator<Item = (Direction, usize, &'a SlotName)>,
    ) -> Result<()> {
        let reduces = || self.domains.iter().find_map(|&domain| domains[domain].reducing_group());
        if self.agreed || matches!(self.assignment, Assignment::All(_)) {
            return Ok(());
        }
        let Some(group) = reduces() else { return Ok(()) };
        let line = |(direction, index, slot): (Direction, usize, &SlotName)| {
            let domain = self.domain(direction, index).map(|domain| &domains[domain]);
            let is_used = match domain {
                Some(domain) => domain.used[direction].contains(&index),
                None => slot.used_by() == SlotUse::Always,
            };
            let recipe = domain.map(|domain| RecipeLabel::new(&domain.policy.key(), None).to_string());
            let recipe = recipe.unwrap_or_else(|| "off".to_owned());
            is_used.then(|| format!("{} under {recipe}", slot.name()).into())
        };
        group.agree_on_names("recipes by name", &slots.filter_map(line).collect::<Vec<Arc<str>>>())?;
        self.agreed = true;
        Ok(())
    }
}
