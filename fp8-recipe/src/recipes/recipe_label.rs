//! Short names of recipes for reports and errors.
//!
//! Arenas and checkpoints identify a recipe by its key, which lists all options. Reports show a short name instead: the
//! closest of the recipes that [`Recipe::from_name`] knows, and the options that differ from it.

use crate::Recipe;
use crate::recipes::custom_recipe;
use crate::recipes::recipe::Choice;
use crate::recipes::recipe_key::{KeyOption, RecipeKey};
use std::fmt;
use std::sync::Arc;

/// Names a recipe, and the group that its amaxes are reduced over, in a report.
///
/// `Display` writes a short name with the options that differ from the defaults: `delayed`, `te-v0`, `delayed (margin=1)`,
/// `delayed (margin=1), group dp`. Labels of different recipes have different names. [`details`](Self::details) lists every
/// option.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let mut cx = scaling.autocast(&DelayedScaling { margin: 1, ..Default::default() }.into())?;
/// ops::quantize(&Tensor::from_vec(vec![3.5f32], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
///
/// let label = &scaling.slot_reports()?[0].recipe;
/// assert_eq!(label.to_string(), "delayed (margin=1)");
/// assert!(label.details().starts_with("delayed(margin=1,interval=1,fp8_format=HYBRID,"));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecipeLabel {
    key: Arc<str>,
    group: Option<Arc<str>>,
}

impl RecipeLabel {
    /// Creates the label of the recipe with this key, which includes the length of the history.
    pub(crate) fn new(key: &str, group: Option<&str>) -> Self {
        Self { key: key.into(), group: group.map(Into::into) }
    }

    /// Returns all options of the recipe, and the id of its group if it has one.
    pub fn details(&self) -> String {
        let Self { key, group } = self;
        group.as_ref().map_or_else(|| key.to_string(), |group| format!("{key} group={group}"))
    }

    /// Returns the label of the recipe alone.
    pub(crate) fn without_group(self) -> Self {
        Self { group: None, ..self }
    }

    /// Returns the options in which two recipes differ: `margin=0 → margin=1`. Recipes of different kinds are named.
    pub(crate) fn difference(&self, to: &Self) -> String {
        let (Some(old), Some(new)) = (RecipeKey::parse(&self.key), RecipeKey::parse(&to.key)) else {
            return format!("{self} → {to}");
        };
        if !old.is_comparable(&new) || self.group.is_some() != to.group.is_some() {
            return format!("{self} → {to}");
        }
        let changes = old.changes(&new).into_iter();
        let mut changes: Vec<String> = changes.map(|(old, new)| format!("{old} → {new}")).collect();
        if let (Some(old), Some(new)) = (&self.group, &to.group)
            && old != new
        {
            changes.push(format!("group {old} → group {new}"));
        }
        changes.join(", ")
    }
}

impl fmt::Display for RecipeLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = short_name(&self.key);
        match &self.group {
            Some(group) => f.pad(&format!("{short}, group {group}")),
            None => f.pad(&short),
        }
    }
}

/// Writes the recipe's short name: `delayed`, `current`, `te-v0`, followed by the options that differ from it. A recipe by name
/// lists its patterns.
///
/// ```
/// use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe};
///
/// assert_eq!(Recipe::from(CurrentScaling::default()).to_string(), "current");
/// assert_eq!(Recipe::from(DelayedScaling::te_v0()).to_string(), "te-v0");
/// let recipe = DelayedScaling { margin: 1, amax_history_len: 16, ..Default::default() };
/// assert_eq!(Recipe::from(recipe).to_string(), "delayed (margin=1, amax_history_len=16)");
/// let recipe = Recipe::by_name([("*.fc2", Recipe::off())], CurrentScaling::default());
/// assert_eq!(recipe.to_string(), "by name (*.fc2: off; default: current)");
/// ```
impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Choice::ByName(recipe) = self.choice() else { return f.pad(&short_name(&self.key())) };
        let short = |position| match recipe.policy(position) {
            Some(policy) => short_name(&policy.key()),
            None => "off".to_owned(),
        };
        let rules = recipe.rules.iter().enumerate();
        let rules = rules.map(|(position, rule)| format!("{}: {}; ", rule.pattern, short(Some(position))));
        f.pad(&format!("by name ({}default: {})", rules.collect::<String>(), short(None)))
    }
}

/// The short name of the recipe with this key; the key itself if no recipe has it.
fn short_name(key: &str) -> String {
    let Some(parsed) = RecipeKey::parse(key) else { return key.to_owned() };
    if let Some(option) = parsed.options().first().filter(|_| parsed.kind == custom_recipe::KIND)
        && option.name == "name"
    {
        return custom_name(option.value, &parsed);
    }
    let bases =
        Recipe::NAMES.into_iter().filter_map(|name| Some((name, Recipe::from_name(name).ok()?.key())));
    let mut nearest: Option<(&str, Vec<String>)> = None;
    for (name, base) in bases {
        let Some(base) = RecipeKey::parse(&base).filter(|base| base.is_comparable(&parsed)) else { continue };
        let changes: Vec<_> =
            base.changes(&parsed).into_iter().map(|(_, option)| option.to_string()).collect();
        if nearest.as_ref().is_none_or(|(_, fewest)| changes.len() < fewest.len()) {
            nearest = Some((name, changes));
        }
    }
    match nearest {
        Some((name, changes)) if changes.is_empty() => name.to_owned(),
        Some((name, changes)) => format!("{name} ({})", changes.join(", ")),
        None => key.to_owned(),
    }
}

/// The short name of a user's recipe, with the options that differ from the defaults of [`CustomRecipe`](crate::CustomRecipe).
fn custom_name(name: &str, key: &RecipeKey<'_>) -> String {
    const DEFAULTS: [KeyOption<'_>; 4] = [
        KeyOption { name: "fp8_format", value: "HYBRID" },
        KeyOption { name: "override", value: "(false, false, false)" },
        KeyOption { name: "reduce_amax", value: "true" },
        KeyOption { name: "calibrate_first_step", value: "true" },
    ];
    let differs = |default: &KeyOption<'static>| {
        let value = key.value(default.name)?;
        (value != default.value).then(|| KeyOption { name: default.name, value }.to_string())
    };
    let changes: Vec<String> = DEFAULTS.iter().filter_map(differs).collect();
    if changes.is_empty() {
        format!("custom({name})")
    } else {
        format!("custom({name}) ({})", changes.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::state_terms::{SavedRows, StateTerms};
    use crate::{
        AmaxComputeAlgo, CurrentScaling, CustomAmax, CustomRecipe, DelayedScaling, Format, SlotUpdate,
    };

    fn short(recipe: impl Into<Recipe>) -> String {
        recipe.into().to_string()
    }

    #[test]
    fn a_short_name_says_what_differs_from_the_nearest_default() {
        assert_eq!(short(DelayedScaling::default()), "delayed");
        assert_eq!(short(DelayedScaling { margin: 3, ..DelayedScaling::te_v0() }), "te-v0 (margin=3)");
        let current = CurrentScaling { fp8_format: Format::E4M3, ..Default::default() };
        assert_eq!(short(current), "current (fp8_format=E4M3)");
        let overridden = (false, true, false);
        let recipe = DelayedScaling {
            amax_compute_algo: AmaxComputeAlgo::MostRecent,
            override_linear_precision: overridden,
            reduce_amax: false,
            ..Default::default()
        };
        let expected = "delayed (amax_compute_algo=most_recent, override_linear_precision=(false, true, false), \
                        reduce_amax=false)";
        assert_eq!(short(recipe), expected);
    }

    #[test]
    fn no_name_of_a_function_is_taken_for_an_option() {
        for name in ["a", "a),margin=1", "a\",margin=1", "\\", "(", "a, b"] {
            let function = CustomAmax { name: name.into(), function: Arc::new(|_| 1.0) };
            let amax_compute_algo = AmaxComputeAlgo::Custom(function);
            let recipe = DelayedScaling { amax_compute_algo, margin: 7, ..Default::default() };
            let expected = format!("delayed (margin=7, amax_compute_algo=custom({name:?}))");
            assert_eq!(short(recipe), expected);
        }
    }

    #[derive(Debug)]
    struct Named(&'static str);

    impl CustomRecipe for Named {
        fn name(&self) -> &str {
            self.0
        }

        fn state(&self) -> &[&str] {
            &["a,b", "c)d"]
        }

        fn scale(&self, slot: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
            slot.amax
        }

        fn reduce_amax(&self) -> bool {
            false
        }
    }

    #[test]
    fn no_name_of_a_users_recipe_is_taken_for_an_option() {
        for name in [
            "a",
            "a),reduce_amax=true",
            "a\",reduce_amax=true,calibrate_first_step=false)",
            "\\",
            "(",
            "delayed",
        ] {
            let recipe = Recipe::custom(Named(name));
            assert_eq!(recipe.to_string(), format!("custom({name:?}) (reduce_amax=false)"));
            let terms = StateTerms::parse(&recipe.key()).unwrap();
            assert_eq!(
                (terms.reduce_amax, terms.calibrate_first_step, terms.rows),
                (false, true, SavedRows::Custom)
            );
        }
    }

    #[test]
    fn a_text_that_is_no_key_is_shown_as_it_is() {
        for text in ["", "x", "delayed", "delayed(", "delayed(margin=0)", "delayed(é,)", "other(a=1)", "x)(,"]
        {
            assert_eq!(RecipeLabel::new(text, None).to_string(), text);
            assert_eq!(RecipeLabel::new(text, Some("dp")).to_string(), format!("{text}, group dp"));
        }
    }

    #[test]
    fn a_difference_names_options_or_both_recipes() {
        let label = |recipe: Recipe, group| RecipeLabel::new(&recipe.key(), group);
        let margin = |margin| Recipe::from(DelayedScaling { margin, ..Default::default() });
        let [zero, one] = [0, 1].map(|m| label(margin(m), Some("dp")));
        assert_eq!(zero.difference(&one), "margin=0 → margin=1");
        assert_eq!(zero.difference(&label(margin(0), Some("tp"))), "group dp → group tp");
        assert_eq!(label(margin(0), None).difference(&one), "delayed → delayed (margin=1), group dp");
        let current = label(CurrentScaling::default().into(), Some("dp"));
        assert_eq!(zero.difference(&current), "delayed, group dp → current, group dp");
        assert!(zero.details().ends_with(",len=1024 group=dp"), "{}", zero.details());
    }
}
