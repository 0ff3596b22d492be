//! Recipes of the user's own: a function from amax to scale, with state of its own.

use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::policy::{HostUpdate, Policy, SlotUpdate, State, Update, out_of_range};
use crate::recipes::recipe_key::{self, KeyText, RecipeOption};
use crate::{Error, Format, Recipe, Result, SlotRole};
use fp8_kernels::{ArenaOptions, REST, ScalePolicy, ScaleRule, UNSET};
use std::fmt;
use std::sync::Arc;

/// A recipe of your own: it computes the scale of each slot from the amax of the scope that is committed, and from numbers
/// that it keeps for the slot. [`Recipe::custom`] makes a [`Recipe`] of it.
///
/// Each tensor is quantized with the scale that the last commit has set, so it is read once, as under
/// [`DelayedScaling`](crate::DelayedScaling). At each commit the amaxes are reduced over the group and read once. Then
/// [`scale`](Self::scale) is called for every slot that has run with a finite amax greater than 0. Slots that did not run and
/// tensors of zeros keep their scale and state. So do infinite and NaN amaxes, which
/// [`SlotReport::non_finite`](crate::SlotReport::non_finite) counts.
///
/// It runs on the host: a commit waits for the GPU, and a step under such a recipe cannot be recorded in a graph. The state is
/// part of [`Scaling::state`](crate::Scaling::state) and of checkpoints. All ranks must compute equal scales from equal
/// amaxes.
///
/// A recipe whose scale follows an exponential moving average of the amaxes, with one bit of headroom:
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{CustomRecipe, GemmSlots, Recipe, Scaling, SlotUpdate};
///
/// #[derive(Debug)]
/// struct MovingAverage {
///     beta: f32,
/// }
///
/// impl CustomRecipe for MovingAverage {
///     fn name(&self) -> &str {
///         "moving average"
///     }
///
///     fn state(&self) -> &[&str] {
///         &["mean"]
///     }
///
///     fn scale(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> f32 {
///         let first = slot.scale.is_none();
///         state[0] = if first { slot.amax } else { self.beta * state[0] + (1.0 - self.beta) * slot.amax };
///         slot.fp8_max / 2.0 / state[0]
///     }
/// }
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let recipe = Recipe::custom(MovingAverage { beta: 0.75 });
/// for amax in [4.0f32, 8.0] {
///     let mut cx = scaling.autocast(&recipe)?;
///     ops::quantize(&Tensor::from_vec(vec![amax], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
///     cx.commit()?;
/// }
/// let input = &scaling.slot_reports()?[0];
/// assert_eq!((input.amax, input.scale), (8.0, 448.0 / 2.0 / 5.0)); // 0.75 · 4 + 0.25 · 8
/// assert_eq!(recipe.to_string(), r#"custom("moving average")"#);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
pub trait CustomRecipe: fmt::Debug + Send + Sync + 'static {
    /// Returns the recipe's identity. Arenas and checkpoints go by it, so two recipes need two names. If you change what the
    /// state means, change the name.
    fn name(&self) -> &str;

    /// Returns the FP8 formats. Default: HYBRID.
    fn format(&self) -> Format {
        Format::Hybrid
    }

    /// Returns the names of the numbers that the recipe keeps for each slot. All start with 0. Default: none.
    fn state(&self) -> &[&str] {
        &[]
    }

    /// Returns the scale for the next tensor of a slot: finite and at least 2⁻¹²⁶ (`f32::MIN_POSITIVE`), so that its inverse is
    /// finite too. `state` has one number for each name of [`state`](Self::state), which must stay finite.
    ///
    /// Anything else is an error of the commit, which then changes no slot of any recipe. A panic changes nothing either.
    fn scale(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> f32;

    /// Returns whether a slot's first scale comes from its own tensor, as `fp8_max / amax`, which costs an extra read. If not,
    /// the first step quantizes with scale 1. Default: true.
    fn calibrate_first_step(&self) -> bool {
        true
    }

    /// Returns whether a commit replaces amaxes by their maximum over the ranks of the scope's group. Default: true.
    fn reduce_amax(&self) -> bool {
        true
    }

    /// Returns whether fprop, dgrad and wgrad run in high precision, in this order. Default: `(false, false, false)`.
    fn override_linear_precision(&self) -> (bool, bool, bool) {
        (false, false, false)
    }

    /// Returns whether attention runs in FP8, in layers that leave it to the recipe. Default: false.
    fn fp8_dpa(&self) -> bool {
        false
    }

    /// Returns whether attention runs in FP8 and exchanges FP8 with its projections, in layers that leave it to the recipe. It
    /// implies [`fp8_dpa`](Self::fp8_dpa). Default: false.
    fn fp8_mha(&self) -> bool {
        false
    }
}

impl Recipe {
    /// Creates a recipe from code of your own: see [`CustomRecipe`]. All of its options are read here, once.
    pub fn custom(recipe: impl CustomRecipe) -> Self {
        Self::new(Custom {
            name: recipe.name().into(),
            state: recipe.state().iter().map(|&name| name.into()).collect(),
            fp8_format: recipe.format(),
            calibrate_first_step: recipe.calibrate_first_step(),
            reduce_amax: recipe.reduce_amax(),
            override_linear_precision: recipe.override_linear_precision(),
            fp8_attention: Fp8Attention::new(recipe.fp8_dpa(), recipe.fp8_mha()),
            recipe: Arc::new(recipe),
        })
    }
}

/// A user's recipe, with its options as they were when it was passed to [`Recipe::custom`].
#[derive(Debug)]
struct Custom {
    name: Arc<str>,
    state: Vec<Arc<str>>,
    fp8_format: Format,
    calibrate_first_step: bool,
    reduce_amax: bool,
    override_linear_precision: (bool, bool, bool),
    fp8_attention: Fp8Attention,
    recipe: Arc<dyn CustomRecipe>,
}

/// The largest number of state numbers per slot.
const MAX_STATE: usize = 1024;

impl Custom {
    /// Returns the names of the numbers as keys list them.
    fn state_text(&self) -> String {
        let names: Vec<String> = self.state.iter().map(|name| format!("{name:?}")).collect();
        format!("({})", names.join(","))
    }

    fn problem(&self, slot: &str, problem: String) -> Error {
        Error::CustomRecipe { recipe: self.name.to_string(), slot: slot.to_owned(), problem }
    }
}

/// The kind of these recipes in keys.
pub(crate) const KIND: &str = "custom";

/// All options, in the order of keys. Files cannot have such recipes.
const OPTIONS: [RecipeOption<Custom>; 6] = [
    RecipeOption { key: Some(("name", |recipe| format!("{:?}", recipe.name))), read: None },
    RecipeOption { key: Some(("state", Custom::state_text)), read: None },
    RecipeOption { key: Some(("fp8_format", |recipe| recipe.fp8_format.key_text())), read: None },
    RecipeOption {
        key: Some(("override", |recipe| recipe.override_linear_precision.key_text())),
        read: None,
    },
    RecipeOption { key: Some(("reduce_amax", |recipe| recipe.reduce_amax.key_text())), read: None },
    RecipeOption {
        key: Some(("calibrate_first_step", |recipe| recipe.calibrate_first_step.key_text())),
        read: None,
    },
];

impl Policy for Custom {
    fn format(&self) -> Format {
        self.fp8_format
    }

    fn validate(&self) -> Result<()> {
        let recipe = "CustomRecipe";
        self.fp8_format.validate(recipe)?;
        if self.name.is_empty() {
            return Err(out_of_range(
                recipe,
                "name",
                "\"\"",
                "expected a name, by which checkpoints identify it",
            ));
        }
        if self.state.len() > MAX_STATE {
            let remedy = "expected at most 1024 numbers for each slot";
            return Err(out_of_range(recipe, "state", format!("{} names", self.state.len()), remedy));
        }
        let mut earlier = self.state.iter().enumerate();
        if let Some((_, name)) = earlier.find(|(index, name)| self.state[..*index].contains(name)) {
            return Err(out_of_range(recipe, "state", format!("{name:?} twice"), "expected different names"));
        }
        Ok(())
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn fp8_attention(&self) -> Fp8Attention {
        self.fp8_attention
    }

    fn state_key(&self) -> String {
        recipe_key::write(KIND, &OPTIONS, self, self.fp8_attention)
    }

    fn rule(&self, role: SlotRole) -> ScaleRule {
        let fp8_max = self.fp8_format.encoding(role.direction()).max();
        ScaleRule::Delayed { fp8_max, margin: 0, policy: ScalePolicy::Exact }
    }

    fn state(&self) -> Option<&dyn State> {
        Some(self)
    }
}

impl State for Custom {
    fn arena_options(&self) -> ArenaOptions {
        // The staging row, one row for each number, and the newest amax.
        let history_len = self.state.len() + 2;
        let first_scale = if self.calibrate_first_step { UNSET } else { 1.0 };
        ArenaOptions { history_len, rest: REST, first_scale }
    }

    fn reduce_amax(&self) -> bool {
        self.reduce_amax
    }

    fn update<'a>(&'a self, _rule: &'a ScaleRule) -> Update<'a> {
        Update::OnHost(self)
    }

    fn first_scale_is_final(&self) -> bool {
        false
    }

    fn records(&self, amax: f32) -> bool {
        amax.is_finite() && amax > 0.0
    }
}

impl HostUpdate for Custom {
    fn update(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> Result<f32> {
        let scale = self.recipe.scale(slot, state);
        if !(scale.is_finite() && scale >= f32::MIN_POSITIVE) {
            let expected = "expected a finite number of at least 2^-126, so that its inverse is finite, too";
            return Err(self.problem(slot.name, format!("scale {scale} for amax {}: {expected}", slot.amax)));
        }
        if let Some((name, value)) = self.state.iter().zip(state).find(|(_, value)| !value.is_finite()) {
            let problem =
                format!("state {name:?} is {value} after amax {}: expected a finite number", slot.amax);
            return Err(self.problem(slot.name, problem));
        }
        Ok(scale)
    }

    fn name(&self) -> &str {
        &self.name
    }
}
