//! Recipes by the name of the slot.

use crate::names::pattern::matches_glob;
use crate::recipes::policy::Policy;
use crate::{Error, Result, SlotName};
use std::sync::Arc;

/// A recipe for each slot: that of the first pattern that matches it, or a default. `None` is high precision.
#[derive(Debug)]
pub(crate) struct ByName {
    pub(crate) rules: Vec<Rule>,
    pub(crate) default: Option<Arc<dyn Policy>>,
    /// Whether one of the recipes that it was made of was itself by name.
    pub(crate) is_nested: bool,
}

/// A pattern and its recipe.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) pattern: Arc<str>,
    pub(crate) policy: Option<Arc<dyn Policy>>,
}

impl ByName {
    /// Returns the recipe with this position: that of a rule, or the default.
    pub(crate) fn policy(&self, position: Option<usize>) -> Option<&Arc<dyn Policy>> {
        position.map_or(self.default.as_ref(), |position| self.rules.get(position)?.policy.as_ref())
    }

    /// Returns the position of the first rule whose pattern matches a slot, or `None` for the default.
    pub(crate) fn choose(&self, slot: &SlotName) -> Option<usize> {
        self.rules.iter().position(|rule| rule.is_for(slot))
    }

    /// Checks every option of every recipe.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.is_nested {
            return Err(Error::Recipe {
                recipe: "by_name",
                option: "recipe",
                value: "another recipe by name".to_owned(),
                remedy: "expected a recipe for all slots, or Recipe::off(); list the patterns of both in one",
            });
        }
        let all = self.rules.iter().filter_map(|rule| rule.policy.as_ref()).chain(&self.default);
        all.into_iter().try_for_each(|policy| policy.validate())
    }

    /// Returns its identity: every pattern with its recipe, and the default.
    pub(crate) fn key(&self) -> String {
        let key = |policy: &Option<Arc<dyn Policy>>| {
            policy.as_ref().map_or_else(|| "off".to_owned(), |policy| policy.key())
        };
        let rules = self.rules.iter().map(|rule| format!("{:?}: {}; ", rule.pattern, key(&rule.policy)));
        format!("by name ({}default: {})", rules.collect::<String>(), key(&self.default))
    }
}

impl Rule {
    /// Returns whether the pattern matches the name of the slot or the path of its layer.
    pub(crate) fn is_for(&self, slot: &SlotName) -> bool {
        matches_glob(&self.pattern, slot.name()) || matches_glob(&self.pattern, slot.layer())
    }
}
