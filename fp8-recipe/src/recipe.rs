//! Recipes, whatever their kind.

use crate::Format;
use crate::Result;
use crate::policy::Policy;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A recipe, which determines the scale of each quantized tensor. [`Scaling::autocast`](crate::Scaling::autocast) takes one.
///
/// It is made from the options of its kind: [`DelayedScaling`](crate::DelayedScaling) or
/// [`CurrentScaling`](crate::CurrentScaling). `Display` writes the short name with the options that differ from its defaults.
/// Clones share the options.
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
pub struct Recipe(Arc<dyn Policy>);

impl Recipe {
    /// Creates a recipe from the options of its kind.
    pub(crate) fn new(policy: impl Policy) -> Self {
        Self(Arc::new(policy))
    }

    /// Returns the FP8 format.
    pub fn format(&self) -> Format {
        self.0.format()
    }

    /// Checks every option.
    ///
    /// # Errors
    /// Names the first option that is out of range, and says what would be right.
    pub fn validate(&self) -> Result<()> {
        self.0.validate()
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
        let policy: &dyn Any = &*self.0;
        policy.downcast_ref()
    }

    pub(crate) fn policy(&self) -> &Arc<dyn Policy> {
        &self.0
    }

    /// Returns the recipe's identity: all of its options.
    pub(crate) fn key(&self) -> String {
        self.0.key()
    }
}

/// Writes all options.
impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
