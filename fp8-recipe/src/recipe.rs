//! Recipes: checks of their options, their keys, and their rules for scales.

use crate::{
    AmaxComputeAlgo, CurrentScaling, DelayedScaling, Direction, Error, Format, Result,
    ScalingFactorComputeAlgo,
};
use fp8_kernels::ScaleRule;

/// The length of the longest history, including the staging row.
pub(crate) const MAX_HISTORY_LEN: usize = 1 << 20;

/// A recipe, which determines the scale of each quantized tensor. [`Scaling::autocast`](crate::Scaling::autocast) takes one.
///
/// `Display` writes the short name with the options that differ from its defaults.
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
#[derive(Debug, Clone)]
pub enum Recipe {
    /// Scales from a history of amaxes.
    Delayed(DelayedScaling),
    /// Scales from the tensor itself.
    Current(CurrentScaling),
}

impl From<DelayedScaling> for Recipe {
    fn from(recipe: DelayedScaling) -> Self {
        Self::Delayed(recipe)
    }
}

impl From<CurrentScaling> for Recipe {
    fn from(recipe: CurrentScaling) -> Self {
        Self::Current(recipe)
    }
}

/// What the name of a saved recipe says about its amaxes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) reduce_amax: bool,
    pub(crate) calibrate_first_step: bool,
    pub(crate) record_non_finite: bool,
}

impl Terms {
    /// Reads the end of a [`Recipe::state_key`], which no user's function can name; `None` for anything else.
    pub(crate) fn parse(key: &str) -> Option<Self> {
        let mut options = key.strip_prefix("delayed(margin=")?.strip_suffix(')')?.rsplitn(5, ',');
        let mut option = |name: &str| options.next()?.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
        let _: bool = option("zero_is_skipped")?;
        let record_non_finite = option("record_non_finite")?;
        let calibrate_first_step = option("calibrate_first_step")?;
        Some(Self { reduce_amax: option("reduce_amax")?, calibrate_first_step, record_non_finite })
    }
}

/// Which of the three GEMMs of a Linear run in FP8.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
/// let override_linear_precision = (false, false, true); // wgrad in high precision
/// let recipe = DelayedScaling { override_linear_precision, ..Default::default() };
/// let cx = scaling.autocast(&recipe.into())?;
/// let gemms = cx.fp8_gemms();
/// assert_eq!((gemms.fprop, gemms.dgrad, gemms.wgrad), (true, true, false));
/// cx.discard()?;
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Gemms {
    /// `y = x · wᵀ`.
    pub fprop: bool,
    /// `dx = dy · w`.
    pub dgrad: bool,
    /// `dw = dyᵀ · x`.
    pub wgrad: bool,
}

impl Recipe {
    /// The names that [`from_name`](Self::from_name) takes.
    pub const NAMES: [&'static str; 3] = ["delayed", "current", "te-v0"];

    /// Returns the recipe with this name, with its defaults.
    ///
    /// # Errors
    /// An unknown name; the error lists the known ones.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "delayed" => Ok(DelayedScaling::default().into()),
            "current" => Ok(CurrentScaling::default().into()),
            "te-v0" => Ok(DelayedScaling::te_v0().into()),
            _ => Err(Error::Recipe {
                recipe: "recipe",
                option: "name",
                value: name.to_owned(),
                remedy: "known recipes are delayed, current and te-v0",
            }),
        }
    }

    /// Returns the FP8 format.
    pub const fn format(&self) -> Format {
        match self {
            Self::Delayed(recipe) => recipe.fp8_format,
            Self::Current(recipe) => recipe.fp8_format,
        }
    }

    /// Checks every option.
    ///
    /// # Errors
    /// Names the first option that is out of range, and says what would be right.
    pub fn validate(&self) -> Result<()> {
        let error =
            |recipe, option, value: String, remedy| Err(Error::Recipe { recipe, option, value, remedy });
        match self {
            Self::Delayed(r) => {
                let name = "DelayedScaling";
                r.fp8_format.validate(name)?;
                if !(1..=MAX_HISTORY_LEN).contains(&r.amax_history_len) {
                    let rows = r.amax_history_len.to_string();
                    return error(name, "amax_history_len", rows, "expected 1 to 1048576 rows");
                }
                if r.interval == 0 {
                    return error(
                        name,
                        "interval",
                        "0".into(),
                        "expected at least 1 (recompute at every update)",
                    );
                }
                if !(-100..=100).contains(&r.margin) {
                    return error(
                        name,
                        "margin",
                        r.margin.to_string(),
                        "expected -100 to 100, in powers of two",
                    );
                }
                Ok(())
            }
            Self::Current(r) => {
                let name = "CurrentScaling";
                r.fp8_format.validate(name)?;
                if !(r.amax_epsilon >= 0.0 && r.amax_epsilon.is_finite()) {
                    return error(
                        name,
                        "amax_epsilon",
                        r.amax_epsilon.to_string(),
                        "expected finite and ≥ 0",
                    );
                }
                Ok(())
            }
        }
    }

    pub(crate) fn rule(&self, direction: Direction) -> ScaleRule {
        let fp8_max = self.format().encoding(direction).max();
        match self {
            Self::Delayed(r) => ScaleRule::Delayed { fp8_max, margin: r.margin, policy: r.policy() },
            Self::Current(r) => {
                ScaleRule::Current { fp8_max, epsilon: r.amax_epsilon, power_2_scales: r.use_power_2_scales }
            }
        }
    }

    pub(crate) fn fp8_gemms(&self) -> Fp8Gemms {
        let (fprop, dgrad, wgrad) = match self {
            Self::Delayed(recipe) => recipe.override_linear_precision,
            Self::Current(_) => (false, false, false),
        };
        Fp8Gemms { fprop: !fprop, dgrad: !dgrad, wgrad: !wgrad }
    }

    /// Returns the key of this recipe's state in checkpoints: all options except the length of the history, which may change.
    pub(crate) fn state_key(&self) -> String {
        match self {
            Self::Delayed(r) => {
                let amax = match &r.amax_compute_algo {
                    AmaxComputeAlgo::Max => "max".to_owned(),
                    AmaxComputeAlgo::MostRecent => "most_recent".to_owned(),
                    AmaxComputeAlgo::Custom(custom) => format!("custom({:?})", custom.name),
                };
                let scale = match &r.scaling_factor_compute_algo {
                    ScalingFactorComputeAlgo::Exact => "exact".to_owned(),
                    ScalingFactorComputeAlgo::PowerOfTwo => "power_of_two".to_owned(),
                    ScalingFactorComputeAlgo::Custom(custom) => format!("custom({:?})", custom.name),
                };
                format!(
                    "delayed(margin={},interval={},fp8_format={},amax={amax},scale={scale},override={:?},\
                     reduce_amax={},calibrate_first_step={},record_non_finite={},zero_is_skipped={})",
                    r.margin,
                    r.interval,
                    r.fp8_format,
                    r.override_linear_precision,
                    r.reduce_amax,
                    r.calibrate_first_step,
                    r.record_non_finite,
                    r.zero_is_skipped,
                )
            }
            Self::Current(r) => format!(
                "current(fp8_format={},use_power_2_scales={},amax_epsilon={})",
                r.fp8_format, r.use_power_2_scales, r.amax_epsilon
            ),
        }
    }

    /// The identity of its arenas: the whole recipe.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::Delayed(r) => format!("{},len={}", self.state_key(), r.amax_history_len),
            Self::Current(_) => self.state_key(),
        }
    }
}
