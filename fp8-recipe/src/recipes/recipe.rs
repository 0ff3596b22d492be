//! Recipes, whatever their kind.

use crate::recipes::by_name::{ByName, Rule};
use crate::recipes::policy::Policy;
use crate::{Format, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A recipe, which determines the scale of each quantized tensor. [`Scaling::autocast`](crate::Scaling::autocast) takes one.
///
/// It is made from the options of its kind: [`DelayedScaling`](crate::DelayedScaling) or
/// [`CurrentScaling`](crate::CurrentScaling). [`custom`](Self::custom) takes code of your own, and
/// [`by_name`](Self::by_name) a recipe for each slot. `Display` writes the short name with the options that differ from its
/// defaults. Clones share the options.
///
/// ```
/// use fp8_recipe::{DelayedScaling, Recipe};
///
/// let recipe = Recipe::from(DelayedScaling { margin: 1, ..Default::default() });
/// assert_eq!(recipe.to_string(), "delayed (margin=1)");
/// recipe.validate()?;
/// assert_eq!(Recipe::from_name("current")?.to_string(), "current");
///
/// let error = Recipe::from(DelayedScaling { interval: 0, ..Default::default() }).validate().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "DelayedScaling: interval = 0: expected at least 1 (recompute at every update)"
/// );
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Clone)]
pub struct Recipe(Kind);

#[derive(Clone)]
enum Kind {
    Off,
    One(Arc<dyn Policy>),
    ByName(Arc<ByName>),
}

/// The policies that a recipe chooses for slots.
#[derive(Debug, Clone)]
pub(crate) enum Choice<'a> {
    /// One policy for all slots; `None` is high precision.
    All(Option<&'a Arc<dyn Policy>>),
    /// By the name of the slot.
    ByName(&'a Arc<ByName>),
}

impl Recipe {
    /// Creates a recipe from the options of its kind.
    pub(crate) fn new(policy: impl Policy) -> Self {
        Self(Kind::One(Arc::new(policy)))
    }

    /// Returns the recipe that leaves tensors in high precision. It is meant for some slots of a recipe
    /// [`by_name`](Self::by_name). Alone, it runs everything in high precision.
    pub fn off() -> Self {
        Self(Kind::Off)
    }

    /// Returns whether it is [`off`](Self::off), which quantizes nothing. A recipe by name is not, whatever its parts are.
    ///
    /// ```
    /// use fp8_recipe::{CurrentScaling, Recipe};
    /// assert!(Recipe::off().is_off() && !Recipe::from(CurrentScaling::default()).is_off());
    /// ```
    pub fn is_off(&self) -> bool {
        matches!(self.0, Kind::Off)
    }

    /// Creates a recipe that treats slots by their names. Each slot gets the recipe of the first pattern that matches, or
    /// `default`.
    ///
    /// A pattern matches the whole name of a slot (`blocks.3.mlp.fc2.grad_output`), or the path of its layer
    /// (`blocks.3.mlp.fc2`), which stands for all slots of the layer. `*` stands for any characters, dots included. Opening a
    /// scope fails if the model has no slot that a pattern matches.
    ///
    /// A GEMM runs in FP8 if both of its operands have a recipe and neither recipe overrides its precision. With an operand
    /// that is [`off`](Self::off), it runs wholly in high precision: `off` for `*.fc2.weight` turns off fprop and dgrad.
    /// [`Scaling::explain`](crate::Scaling::explain) shows what each slot gets.
    ///
    /// Each of the recipes has scales and histories of its own, those that it has when it is used alone. One commit updates
    /// all of them.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
    /// use fp8_recipe::{CurrentScaling, DelayedScaling, GemmSlots, Recipe, Scaling};
    ///
    /// let model = vec![GemmSlots::new("blocks.0.fc1"), GemmSlots::new("blocks.0.fc2"), GemmSlots::new("head")];
    /// let recipe = Recipe::by_name(
    ///     [("*.grad_output", CurrentScaling::default().into()), ("head", Recipe::off())],
    ///     DelayedScaling::default(),
    /// );
    /// let mut scaling = Scaling::new(&model, &Device::cpu())?;
    /// let mut cx = scaling.autocast(&recipe)?;
    /// let x = Tensor::from_vec(vec![3.5f32], [1, 1], &Device::cpu())?;
    /// assert!(ops::quantize(&x, &cx.slot(&model[0].input)?)?.is_fp8()); // by delayed scaling
    /// assert!(!ops::quantize(&x, &cx.slot(&model[2].input)?)?.is_fp8());
    /// assert!(cx.fp8_gemms(&model[0].input).fprop && !cx.fp8_gemms(&model[2].input).fprop);
    /// cx.commit()?;
    ///
    /// let recipe = Recipe::by_name([("*.fc3.*", Recipe::off())], DelayedScaling::default());
    /// assert_eq!(
    ///     scaling.autocast(&recipe).err().map(|error| error.to_string()).as_deref(),
    ///     Some(
    ///         "recipe by name: pattern `*.fc3.*` matches no slot: the nearest are `blocks.0.fc1.grad_output`, \
    ///          `blocks.0.fc1.input` and `blocks.0.fc1.weight`"
    ///     )
    /// );
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn by_name<P: Into<Arc<str>>>(
        patterns: impl IntoIterator<Item = (P, Self)>,
        default: impl Into<Self>,
    ) -> Self {
        let mut is_nested = false;
        let mut single = |recipe: Self| match recipe.0 {
            Kind::Off => None,
            Kind::One(policy) => Some(policy),
            Kind::ByName(_) => {
                is_nested = true; // `validate` refuses it
                None
            }
        };
        let rule = |(pattern, recipe): (P, Self)| Rule { pattern: pattern.into(), policy: single(recipe) };
        let rules = patterns.into_iter().map(rule).collect();
        let default = single(default.into());
        Self(Kind::ByName(Arc::new(ByName { rules, default, is_nested })))
    }

    /// Returns the FP8 formats. Under a recipe [`by_name`](Self::by_name) those of its default, and HYBRID for
    /// [`off`](Self::off).
    pub fn format(&self) -> Format {
        let policy = match &self.0 {
            Kind::Off => None,
            Kind::One(policy) => Some(policy),
            Kind::ByName(recipe) => recipe.default.as_ref(),
        };
        policy.map_or(Format::Hybrid, |policy| policy.format())
    }

    /// Checks every option.
    ///
    /// # Errors
    /// Names the first option that is out of range, and says what would be right.
    pub fn validate(&self) -> Result<()> {
        match &self.0 {
            Kind::Off => Ok(()),
            Kind::One(policy) => policy.validate(),
            Kind::ByName(recipe) => recipe.validate(),
        }
    }

    /// Returns the options of a recipe of the kind `T`, or `None` for a recipe of another kind.
    ///
    /// ```
    /// use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe};
    /// let recipe = Recipe::from(DelayedScaling { margin: 1, ..Default::default() });
    /// assert_eq!(recipe.options::<DelayedScaling>().map(|options| options.margin), Some(1));
    /// assert!(recipe.options::<CurrentScaling>().is_none());
    /// ```
    pub fn options<T: Any>(&self) -> Option<&T> {
        let Kind::One(policy) = &self.0 else { return None };
        let policy: &dyn Any = &**policy;
        policy.downcast_ref()
    }

    pub(crate) fn choice(&self) -> Choice<'_> {
        match &self.0 {
            Kind::Off => Choice::All(None),
            Kind::One(policy) => Choice::All(Some(policy)),
            Kind::ByName(recipe) => Choice::ByName(recipe),
        }
    }

    /// Returns the recipe's identity: all of its options.
    pub(crate) fn key(&self) -> String {
        match &self.0 {
            Kind::Off => "off".to_owned(),
            Kind::One(policy) => policy.key(),
            Kind::ByName(recipe) => recipe.key(),
        }
    }
}

/// Writes all options.
impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Off => f.write_str("Off"),
            Kind::One(policy) => policy.fmt(f),
            Kind::ByName(recipe) => recipe.fmt(f),
        }
    }
}
