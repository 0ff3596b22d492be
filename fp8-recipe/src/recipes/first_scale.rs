//! The first scales of a recipe, which it uses before it has recorded an amax.

use crate::Recipe;
use crate::recipes::by_name::ByName;
use crate::recipes::policy::Policy;
use crate::recipes::recipe::Choice;
use std::sync::Arc;

impl Recipe {
    /// Returns whether some slots quantize with scale 1 until they have recorded an amax, because their recipe does not calibrate
    /// its first step (`calibrate_first_step: false`). Large values saturate then, and small ones become 0.
    ///
    /// ```
    /// use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe};
    /// assert!(Recipe::from(DelayedScaling::te_v0()).starts_at_one());
    /// assert!(!Recipe::from(DelayedScaling::default()).starts_at_one());
    ///
    /// let mixed = Recipe::by_name([("*.weight", CurrentScaling::default().into())], DelayedScaling::te_v0());
    /// assert!(mixed.starts_at_one());
    /// ```
    #[must_use]
    pub fn starts_at_one(&self) -> bool {
        self.policies().any(starts_at_one)
    }

    /// Returns whether some slots take a scale from their own tensor until they have recorded an amax.
    ///
    /// ```
    /// use fp8_recipe::{DelayedScaling, Recipe};
    /// assert!(Recipe::from(DelayedScaling::default()).calibrates_first_step());
    /// assert!(!Recipe::from(DelayedScaling::te_v0()).calibrates_first_step());
    /// ```
    #[must_use]
    pub fn calibrates_first_step(&self) -> bool {
        self.policies().any(|policy| policy.state().is_some() && !starts_at_one(policy))
    }

    /// Returns the policies of all slots.
    fn policies(&self) -> impl Iterator<Item = &dyn Policy> {
        let (one, by_name): (Option<&Arc<dyn Policy>>, Option<&ByName>) = match self.choice() {
            Choice::All(policy) => (policy, None),
            Choice::ByName(recipe) => (None, Some(recipe)),
        };
        let rules =
            by_name.into_iter().flat_map(|recipe| &recipe.rules).filter_map(|rule| rule.policy.as_ref());
        let default = by_name.and_then(|recipe| recipe.default.as_ref());
        one.into_iter().chain(rules).chain(default).map(|policy| &**policy)
    }
}

fn starts_at_one(policy: &dyn Policy) -> bool {
    policy.state().is_some_and(|state| state.arena_options().first_scale == 1.0)
}
