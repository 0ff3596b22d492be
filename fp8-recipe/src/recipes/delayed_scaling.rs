//! Delayed scaling: scales from a history of amaxes. Field names are Transformer Engine's.

use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::policy::{Policy, State, Update, out_of_range};
use crate::recipes::recipe_key::{self, KeyText, RecipeOption, field, file_field};
use crate::recipes::recipe_options::{FromValue, Options, Value};
use crate::{AmaxComputeAlgo, Format, Recipe, Result, SlotRole};
use fp8_kernels::ops::ScaleUpdate;
use fp8_kernels::{ArenaOptions, CustomPolicy, REST, ScalePolicy, ScaleRule, UNSET};
use std::fmt;
use std::sync::Arc;

/// The length of the longest history, including the staging row.
pub(crate) const MAX_HISTORY_LEN: usize = 1 << 20;

/// Delayed scaling: each tensor is quantized with a scale that its past amaxes predict, so it is read once.
///
/// The amax of a tensor is its largest magnitude before scaling. Each slot keeps the amaxes of its last
/// `amax_history_len` − 1 scopes. When a scope is committed, the new amax of every slot that ran enters its window, `amax`
/// is chosen from the window by `amax_compute_algo`, and the scale becomes
///
/// ```text
/// Exact:       scale = (fp8_max · 2^−margin) / amax           in f32, kept within 2⁻¹²⁶ … f32::MAX
/// PowerOfTwo:  scale = 2^(⌊log₂(fp8_max / amax)⌋ − margin)    exponent kept within −126 … 127
/// ```
///
/// where `fp8_max` is 448 for E4M3 and 57344 for E5M2. An amax of 0, and one that is infinite or NaN, leaves the scale as it
/// is. Quantizing multiplies by the scale and saturates.
///
/// The field names are those of Transformer Engine's `DelayedScaling`. Its other defaults are here too, except for three
/// rules that [`with_te_rules`](Self::with_te_rules) turns to Transformer Engine's.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor};
/// use fp8_recipe::{DelayedScaling, Direction, Format, Quantizer};
///
/// let recipe = DelayedScaling { margin: 2, ..Default::default() };
/// assert_eq!((recipe.fp8_format, recipe.amax_history_len), (Format::Hybrid, 1024));
///
/// let device = Device::cpu();
/// let mut quantizer = Quantizer::new(recipe, Direction::Forward, &device)?;
/// for amax in [0.5f32, 7.0, 3.5] {
///     quantizer.quantize(&Tensor::from_vec(vec![amax], [1], &device)?)?;
/// }
/// assert_eq!(quantizer.scale()?, 16.0); // 448 / 2² / 7: the largest amax of the window counts
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DelayedScaling {
    /// Bits of headroom, −100 to 100: the scale is divided by `2^margin`. Default: 0.
    pub margin: i32,
    /// Scales are recomputed at every `interval`-th commit, at least 1. Histories roll at each. Default: 1.
    pub interval: u64,
    /// E4M3, or HYBRID: E4M3 forward and E5M2 for gradients. Default: HYBRID.
    pub fp8_format: Format,
    /// The number of rows of the history, 1 to 1048576. One of them is the staging row, which collects the
    /// amaxes of the open scope, so `amax_history_len` − 1 past amaxes are kept. Default: 1024.
    pub amax_history_len: usize,
    /// The algorithm that chooses the amax from which the scale is computed. Default: [`Max`](AmaxComputeAlgo::Max).
    pub amax_compute_algo: AmaxComputeAlgo,
    /// The formula that computes the scale from that amax. Default: [`Exact`](ScalingFactorComputeAlgo::Exact).
    pub scaling_factor_compute_algo: ScalingFactorComputeAlgo,
    /// Whether fprop, dgrad and wgrad run in high precision, in this order. Default: `(false, false, false)`.
    pub override_linear_precision: (bool, bool, bool),
    /// Whether a commit replaces amaxes by their maximum over the ranks of the scope's group. Default: true.
    pub reduce_amax: bool,
    /// Whether a slot's first scale comes from its own tensor, which costs an extra read. Default: true.
    /// `false` is Transformer Engine's rule: the first step quantizes with scale 1.
    pub calibrate_first_step: bool,
    /// Whether infinite and NaN amaxes enter the window, as in Transformer Engine. Default: false. They are
    /// then left out and counted in [`SlotReport::non_finite`](crate::SlotReport::non_finite).
    pub record_non_finite: bool,
    /// Whether an amax of 0 means that the slot did not run, as in Transformer Engine. Default: false. The 0 of
    /// a tensor of zeros then enters the window.
    pub zero_is_skipped: bool,
    /// Whether attention runs in FP8, in layers that leave it to the recipe. Default: false.
    pub fp8_dpa: bool,
    /// Whether attention runs in FP8 and exchanges FP8 with its projections, in layers that leave it to the recipe. It implies
    /// `fp8_dpa`. Default: false.
    pub fp8_mha: bool,
}

/// The kind of these recipes in keys.
pub(crate) const KIND: &str = "delayed";

/// All options, in the order of keys and of the errors of files.
const OPTIONS: [RecipeOption<DelayedScaling>; 13] = [
    field!(margin),
    field!(interval),
    field!(fp8_format),
    file_field!(amax_history_len),
    field!(amax_compute_algo as "amax"),
    field!(scaling_factor_compute_algo as "scale"),
    field!(override_linear_precision as "override"),
    field!(reduce_amax),
    field!(calibrate_first_step),
    field!(record_non_finite),
    field!(zero_is_skipped),
    file_field!(fp8_dpa),
    file_field!(fp8_mha),
];

impl Default for DelayedScaling {
    fn default() -> Self {
        Self {
            margin: 0,
            interval: 1,
            fp8_format: Format::Hybrid,
            amax_history_len: 1024,
            amax_compute_algo: AmaxComputeAlgo::Max,
            scaling_factor_compute_algo: ScalingFactorComputeAlgo::Exact,
            override_linear_precision: (false, false, false),
            reduce_amax: true,
            calibrate_first_step: true,
            record_non_finite: false,
            zero_is_skipped: false,
            fp8_dpa: false,
            fp8_mha: false,
        }
    }
}

impl DelayedScaling {
    /// Returns the defaults of Transformer Engine's old Common API page: E4M3, a history of 1, the most recent amax, scales
    /// that are powers of two, and [Transformer Engine's rules](Self::with_te_rules).
    ///
    /// ```
    /// use fp8_recipe::{DelayedScaling, Format};
    /// let recipe = DelayedScaling::te_v0();
    /// assert_eq!((recipe.fp8_format, recipe.amax_history_len), (Format::E4M3, 1));
    /// assert!(!recipe.calibrate_first_step);
    /// ```
    pub fn te_v0() -> Self {
        Self {
            fp8_format: Format::E4M3,
            amax_history_len: 1,
            amax_compute_algo: AmaxComputeAlgo::MostRecent,
            scaling_factor_compute_algo: ScalingFactorComputeAlgo::PowerOfTwo,
            ..Self::default().with_te_rules()
        }
    }

    /// Returns the recipe with Transformer Engine's rules for first steps, non-finite amaxes and zeros:
    /// `calibrate_first_step: false`, `record_non_finite: true` and `zero_is_skipped: true`.
    ///
    /// Scales and histories then have the bits of Transformer Engine's own kernel for the update (`Max` and `MostRecent`
    /// with `Exact`), with one exception, and four more where that kernel does not run:
    ///
    /// - a scale below 2⁻¹²⁶ becomes 2⁻¹²⁶, so that its inverse is finite: Transformer Engine keeps the subnormal scale. Only
    ///   amaxes beyond `fp8_max` · 2^(126 − margin) lead there; with a margin below 7 (E4M3) there is none;
    /// - a user's scale function is called with finite amaxes above 0 only, and any other amax keeps the scale. Transformer
    ///   Engine calls it with every amax;
    /// - with a user's amax or scale function, slots that did not run stay as they are. Transformer Engine rolls a 0 into
    ///   their histories on this path;
    /// - what a user's scale function returns is checked ([`CustomScale`]): Transformer Engine stores it unchecked;
    /// - `PowerOfTwo`, the rule of Transformer Engine up to 0.12, takes the exact floor of log₂, keeps the old scale for an
    ///   infinite amax, and stays within 2⁻¹²⁶ … 2¹²⁷. There, an infinite amax inverts the scale, an infinite quotient gives
    ///   an infinite scale, and a quotient one ulp below a power of two counts as that power.
    ///
    /// No release of Transformer Engine reads `interval`. With the default, 1, there is no difference.
    #[must_use]
    pub fn with_te_rules(self) -> Self {
        Self { calibrate_first_step: false, record_non_finite: true, zero_is_skipped: true, ..self }
    }

    /// Returns the recipe with the rules of Transformer Engine's quantizers for JAX: `calibrate_first_step: false`,
    /// `record_non_finite: true` and `zero_is_skipped: false`.
    ///
    /// They are the rules of [`with_te_rules`](Self::with_te_rules), except that a tensor of zeros rolls a 0 into the history.
    /// Under them, [`Quantizer`](crate::Quantizer) has the scales and histories of JAX's `DelayedScaleQuantizer`, except that:
    ///
    /// - a scale stays within 2⁻¹²⁶ … `f32::MAX`. JAX gives an infinite or a subnormal scale beyond;
    /// - NaN in a tensor is left out of its amax. In JAX, the amax becomes NaN, and the scale stays until it drops out.
    ///
    /// JAX has no `PowerOfTwo`, no functions of a user's own, and no algorithms besides `Max` and `MostRecent`.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor};
    /// use fp8_recipe::{DelayedScaling, Direction, Quantizer};
    ///
    /// let device = Device::cpu();
    /// let recipe = DelayedScaling { amax_history_len: 3, ..Default::default() }.with_jax_rules();
    /// let mut quantizer = Quantizer::new(recipe, Direction::Forward, &device)?;
    /// for amax in [3.5f32, 0.0] {
    ///     quantizer.quantize(&Tensor::from_vec(vec![amax], [1], &device)?)?;
    /// }
    /// assert_eq!(quantizer.amax_history()?, [0.0, 3.5, 0.0]); // the staging row, then from oldest to newest
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    #[must_use]
    pub fn with_jax_rules(self) -> Self {
        Self { zero_is_skipped: false, ..self.with_te_rules() }
    }

    /// Returns the recipe with the options that a file gives.
    pub(crate) fn with_options(mut self, options: &mut Options) -> Result<Recipe, String> {
        recipe_key::read(&OPTIONS, &mut self, options)?;
        Ok(self.into())
    }

    /// Returns the update of an arena's scales. `rule` is this recipe's rule for the arena's direction.
    pub(crate) fn scale_update<'a>(&'a self, rule: &'a ScaleRule) -> ScaleUpdate<'a> {
        let (interval, record_non_finite) = (self.interval, self.record_non_finite);
        ScaleUpdate { amax: self.amax_compute_algo.rule(), rule, interval, record_non_finite }
    }

    fn scale_policy(&self) -> ScalePolicy {
        match &self.scaling_factor_compute_algo {
            ScalingFactorComputeAlgo::Exact => ScalePolicy::Exact,
            ScalingFactorComputeAlgo::PowerOfTwo => ScalePolicy::PowerOfTwo,
            ScalingFactorComputeAlgo::Custom(custom) => {
                let (recipe, function) = (self.clone(), custom.function.clone());
                let function = move |amax, old, fp8_max| function(amax, old, fp8_max, &recipe);
                ScalePolicy::Custom(CustomPolicy { name: custom.name.clone(), function: Arc::new(function) })
            }
        }
    }
}

impl From<DelayedScaling> for Recipe {
    fn from(recipe: DelayedScaling) -> Self {
        Self::new(recipe)
    }
}

impl Policy for DelayedScaling {
    fn format(&self) -> Format {
        self.fp8_format
    }

    fn validate(&self) -> Result<()> {
        let name = "DelayedScaling";
        self.fp8_format.validate(name)?;
        if !(1..=MAX_HISTORY_LEN).contains(&self.amax_history_len) {
            let remedy = "expected 1 to 1048576 rows";
            return Err(out_of_range(name, "amax_history_len", self.amax_history_len, remedy));
        }
        self.amax_compute_algo.validate(name, self.amax_history_len)?;
        if self.interval == 0 {
            let remedy = "expected at least 1 (recompute at every update)";
            return Err(out_of_range(name, "interval", 0, remedy));
        }
        if !(-100..=100).contains(&self.margin) {
            return Err(out_of_range(name, "margin", self.margin, "expected -100 to 100, in powers of two"));
        }
        Ok(())
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn fp8_attention(&self) -> Fp8Attention {
        Fp8Attention::new(self.fp8_dpa, self.fp8_mha)
    }

    fn state_key(&self) -> String {
        recipe_key::write(KIND, &OPTIONS, self, self.fp8_attention())
    }

    fn key(&self) -> String {
        recipe_key::with_history_len(&self.state_key(), self.amax_history_len)
    }

    fn rule(&self, role: SlotRole) -> ScaleRule {
        let fp8_max = self.fp8_format.encoding(role.direction()).max();
        ScaleRule::Delayed { fp8_max, margin: self.margin, policy: self.scale_policy() }
    }

    fn state(&self) -> Option<&dyn State> {
        Some(self)
    }
}

impl State for DelayedScaling {
    fn arena_options(&self) -> ArenaOptions {
        ArenaOptions {
            history_len: self.amax_history_len,
            rest: if self.zero_is_skipped { 0.0 } else { REST },
            first_scale: if self.calibrate_first_step { UNSET } else { 1.0 },
        }
    }

    fn reduce_amax(&self) -> bool {
        self.reduce_amax
    }

    fn update<'a>(&'a self, rule: &'a ScaleRule) -> Update<'a> {
        Update::Window(self.scale_update(rule))
    }

    fn first_scale_is_final(&self) -> bool {
        // A function may choose another amax than the newest, even if it is the only one.
        self.calibrate_first_step && !matches!(self.amax_compute_algo, AmaxComputeAlgo::Custom(_))
    }

    fn keeps_first_copies(&self) -> bool {
        !self.calibrate_first_step && self.record_non_finite && self.zero_is_skipped
    }

    fn records(&self, amax: f32) -> bool {
        (amax.is_finite() || self.record_non_finite) && !(amax == 0.0 && self.zero_is_skipped)
    }
}

/// The formula that computes a scale from an amax.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor};
/// use fp8_recipe::{DelayedScaling, Direction, Quantizer, ScalingFactorComputeAlgo};
///
/// let device = Device::cpu();
/// let scale = |scaling_factor_compute_algo| {
///     let recipe = DelayedScaling { scaling_factor_compute_algo, ..Default::default() };
///     let mut quantizer = Quantizer::new(recipe, Direction::Forward, &device)?;
///     quantizer.quantize(&Tensor::from_vec(vec![5.0f32], [1], &device)?)?;
///     quantizer.scale()
/// };
/// assert_eq!(scale(ScalingFactorComputeAlgo::Exact)?, 89.6); // 448 / 5
/// assert_eq!(scale(ScalingFactorComputeAlgo::PowerOfTwo)?, 64.0);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum ScalingFactorComputeAlgo {
    /// `(fp8_max · 2^−margin) / amax`.
    Exact,
    /// `2^(floor(log2(fp8_max / amax)) − margin)`, with the exponent kept within −126 … 127. It introduces no error when codes
    /// are dequantized to f32: every product is exact, unless it is beyond the largest f32 and becomes infinite.
    PowerOfTwo,
    /// A function of yours.
    Custom(CustomScale),
}

/// The type of a user's scale function: `(amax, old_scale, fp8_max, recipe) → scale`.
pub(crate) type ScaleFunction = dyn Fn(f32, f32, f32, &DelayedScaling) -> f32 + Send + Sync;

/// A function that computes a scale, with a name. Arenas and checkpoints go by the name, so two functions need two names.
///
/// ```
/// use fp8_recipe::{CustomScale, DelayedScaling, Recipe, ScalingFactorComputeAlgo};
/// use std::sync::Arc;
///
/// let half = CustomScale {
///     name: "half".into(),
///     function: Arc::new(|amax, _old_scale, fp8_max, _recipe| 0.5 * fp8_max / amax),
/// };
/// let scaling_factor_compute_algo = ScalingFactorComputeAlgo::Custom(half);
/// let recipe = Recipe::from(DelayedScaling { scaling_factor_compute_algo, ..Default::default() });
/// assert_eq!(recipe.to_string(), r#"delayed (scaling_factor_compute_algo=custom("half"))"#);
/// ```
#[derive(Clone)]
pub struct CustomScale {
    /// The function's identity.
    pub name: Arc<str>,
    /// Takes `(amax, old_scale, fp8_max, recipe)` and returns the scale. The amax is finite and greater than 0: for any other,
    /// the function is not called and the old scale stays. The scale must be finite and at least 2⁻¹²⁶
    /// (`f32::MIN_POSITIVE`), so that its inverse is finite too. Anything else is an error of the commit, or of the
    /// quantization that asked for a first scale, and changes nothing.
    pub function: Arc<ScaleFunction>,
}

impl KeyText for ScalingFactorComputeAlgo {
    fn key_text(&self) -> String {
        match self {
            Self::Exact => "exact".to_owned(),
            Self::PowerOfTwo => "power_of_two".to_owned(),
            Self::Custom(custom) => format!("custom({:?})", custom.name),
        }
    }
}

impl FromValue for ScalingFactorComputeAlgo {
    const EXPECTED: &'static str = "\"exact\" or \"power_of_two\"";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(name) if name == "exact" => Some(Self::Exact),
            Value::Text(name) if name == "power_of_two" => Some(Self::PowerOfTwo),
            _ => None,
        }
    }
}

impl fmt::Debug for CustomScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomScale({})", self.name)
    }
}
