//! The domains and plans of all recipes that a model has been used with.

use crate::arenas::domain::Domain;
use crate::arenas::plan::Plan;
use crate::names::model_slots::ModelSlots;
use crate::recipes::assignment::Assignment;
use crate::recipes::policy::Policy;
use crate::{AmaxGroup, Recipe, Result};
use std::ops::{Index, IndexMut};
use std::slice::{Iter, IterMut};
use std::sync::Arc;

/// All domains, by their indices, and the plans that assign them to slots.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    domains: Vec<Domain>,
    plans: Vec<Plan>,
    /// The group of scopes whose options name none.
    default_group: Option<Arc<dyn AmaxGroup>>,
}

impl Domains {
    pub(crate) fn set_default_group(&mut self, group: Arc<dyn AmaxGroup>) {
        self.default_group = Some(group);
    }

    pub(crate) const fn default_group(&self) -> Option<&Arc<dyn AmaxGroup>> {
        self.default_group.as_ref()
    }

    pub(crate) fn plan(&self, index: usize) -> &Plan {
        &self.plans[index]
    }

    /// Returns the index of the plan of a recipe and group, and makes the plan and its domains if they are new.
    pub(crate) fn find_or_add_plan(
        &mut self,
        recipe: &Recipe,
        group: Option<&Arc<dyn AmaxGroup>>,
        slots: &ModelSlots,
    ) -> Result<usize> {
        let group = group.or(self.default_group.as_ref()).cloned();
        let key = within(recipe.key(), group.as_ref());
        let index = match self.plans.iter().position(|plan| plan.key == key) {
            Some(index) => index,
            None => {
                let assignment = Assignment::new(&recipe.choice(), slots.all())?;
                let domains = &mut self.domains;
                let domain = |policy: &Arc<dyn Policy>| find_or_add(domains, policy, group.as_ref(), slots);
                self.plans.push(Plan::new(key, assignment, domain));
                self.plans.len() - 1
            }
        };
        self.plans[index].set_group(group.clone());
        for &domain in &self.plans[index].domains {
            self.domains[domain].set_group(group.clone());
        }
        Ok(index)
    }

    /// Sorts the domains and plans of a scope by their keys, so that their order is the same on all ranks.
    pub(crate) fn sort(&self, domains: &mut [usize], plans: &mut [usize]) {
        domains.sort_by(|&a, &b| self.domains[a].key.cmp(&self.domains[b].key));
        plans.sort_by(|&a, &b| self.plans[a].key.cmp(&self.plans[b].key));
    }

    /// Compares over the ranks which recipe each slot has under these plans.
    pub(crate) fn agree(&mut self, plans: &[usize], slots: &ModelSlots) -> Result<()> {
        plans.iter().try_for_each(|&plan| self.plans[plan].agree(&self.domains, slots.enumerated()))
    }

    pub(crate) fn all(&self) -> &[Domain] {
        &self.domains
    }

    pub(crate) fn len(&self) -> usize {
        self.domains.len()
    }

    pub(crate) fn iter(&self) -> Iter<'_, Domain> {
        self.domains.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> IterMut<'_, Domain> {
        self.domains.iter_mut()
    }
}

impl Index<usize> for Domains {
    type Output = Domain;

    fn index(&self, index: usize) -> &Domain {
        &self.domains[index]
    }
}

impl IndexMut<usize> for Domains {
    fn index_mut(&mut self, index: usize) -> &mut Domain {
        &mut self.domains[index]
    }
}

/// Returns the key of a recipe within a group.
fn within(key: String, group: Option<&Arc<dyn AmaxGroup>>) -> String {
    match group {
        Some(group) => format!("{key} group={}", group.id()),
        None => key,
    }
}

/// Returns the index of the domain of a policy and group.
fn find_or_add(
    domains: &mut Vec<Domain>,
    policy: &Arc<dyn Policy>,
    group: Option<&Arc<dyn AmaxGroup>>,
    slots: &ModelSlots,
) -> usize {
    let key = within(policy.key(), group);
    domains.iter().position(|domain| domain.key == key).unwrap_or_else(|| {
        domains.push(Domain::new(key, policy, slots.used_by(policy.fp8_attention())));
        domains.len() - 1
    })
}
