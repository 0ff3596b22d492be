//! Current scaling: scales from the tensor itself.

use crate::names::fp8_attention::Fp8Attention;
use crate::recipes::policy::Policy;
use crate::recipes::recipe_key::{self, KeyText, RecipeOption, field, file_field};
use crate::recipes::recipe_options::{FromValue, Options, Value};
use crate::{Format, QParams, QParamsByRole, Recipe, Result, SlotRole};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{BlockRule, Scale, ScaleRule};

/// The number of scales of a tensor under [`CurrentScaling`]: one, or one for each row.
///
/// ```
/// use fp8_recipe::{CurrentScaling, Granularity};
/// assert_eq!(CurrentScaling::default().granularity, Granularity::Tensor);
/// assert_eq!(CurrentScaling::rowwise().granularity, Granularity::Row);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Granularity {
    /// One.
    #[default]
    Tensor,
    /// One for each row of the last dimension: a token, or an output channel of a weight.
    Row,
    /// One for each row, except in the weight that dgrad reads, which has one scale for the tensor.
    RowTensorDgrad,
}

impl FromValue for Granularity {
    const EXPECTED: &'static str = "\"tensor\", \"row\" or \"row_tensor_dgrad\"";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(name) if name == "tensor" => Some(Self::Tensor),
            Value::Text(name) if name == "row" => Some(Self::Row),
            Value::Text(name) if name == "row_tensor_dgrad" => Some(Self::RowTensorDgrad),
            _ => None,
        }
    }
}

/// Current scaling: each tensor is quantized with a scale from its own amax. It takes two reads and keeps no state.
///
/// ```text
/// scale = fp8_max / max(amax, amax_epsilon)
/// ```
///
/// `fp8_max` is 448 for E4M3 and 57344 for E5M2. With `power_2_scale` the scale is rounded down to a power of two.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{CurrentScaling, GemmSlots, QParams, Recipe, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let recipe = Recipe::from(CurrentScaling { quant: QParams::POWER_2.into(), ..Default::default() });
/// let mut cx = scaling.autocast(&recipe)?;
/// let x = Tensor::from_vec(vec![5.0f32], [1, 1], &device)?;
/// let x8 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// assert_eq!(x8.as_fp8().map(|x8| x8.scale_inv().item()).transpose()?, Some(1.0 / 64.0)); // 448 / 5 = 89.6
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurrentScaling {
    /// Whether a tensor has one scale, or one for each row. Default: [`Granularity::Tensor`].
    pub granularity: Granularity,
    /// E4M3, or HYBRID: E4M3 forward and E5M2 for gradients. Default: HYBRID.
    pub fp8_format: Format,
    /// The options for computing scales from amaxes, for inputs, weights and gradients. Default: scales are not
    /// rounded, and the epsilon is 0.
    pub quant: QParamsByRole,
    /// Whether fprop, dgrad and wgrad use split accumulation, in this order; if not, they use fast accumulation. Default:
    /// `(false, true, true)`.
    pub use_split_accumulator: (bool, bool, bool),
    /// Whether fprop, dgrad and wgrad run in high precision, in this order. Default: `(false, false, false)`.
    pub override_linear_precision: (bool, bool, bool),
    /// Whether attention runs in FP8, in layers that leave it to the recipe. It stays in high precision unless
    /// a tensor has one scale. Default: false.
    pub fp8_dpa: bool,
    /// Whether attention runs in FP8 and exchanges FP8 with its projections, in layers that leave it to the recipe. It implies
    /// `fp8_dpa`. Default: false.
    pub fp8_mha: bool,
}

/// All options, in the order of keys and of the errors of files. Keys have the granularity as their kind.
const OPTIONS: [RecipeOption<CurrentScaling>; 8] = [
    file_field!(granularity),
    field!(fp8_format),
    RecipeOption {
        key: Some(("power_2_scale", |recipe| recipe.quant.powers_text())),
        read: Some(|recipe, options| recipe.quant.read_powers(options)),
    },
    RecipeOption {
        key: Some(("amax_epsilon", |recipe| recipe.quant.epsilons_text())),
        read: Some(|recipe, options| recipe.quant.read_epsilons(options)),
    },
    field!(use_split_accumulator),
    field!(override_linear_precision as "override"),
    file_field!(fp8_dpa),
    file_field!(fp8_mha),
];

impl Default for CurrentScaling {
    fn default() -> Self {
        Self {
            granularity: Granularity::Tensor,
            fp8_format: Format::Hybrid,
            quant: QParamsByRole::default(),
            use_split_accumulator: (false, true, true),
            override_linear_precision: (false, false, false),
            fp8_dpa: false,
            fp8_mha: false,
        }
    }
}

impl CurrentScaling {
    /// Returns the recipe with a scale for each row, in E4M3: for each token of activations and gradients, and for each output
    /// channel of weights. In the transpose, each column has a scale, computed from the column.
    pub fn rowwise() -> Self {
        Self { granularity: Granularity::Row, fp8_format: Format::E4M3, ..Self::default() }
    }

    /// Returns torchao's recipe `rowwise_with_gw_hp`: [`rowwise`](Self::rowwise) with scales that are powers of two, wgrad in high
    /// precision, and one scale for the weight that dgrad reads.
    ///
    /// ```
    /// use fp8_recipe::{CurrentScaling, Granularity, QParams, Recipe};
    /// let recipe = CurrentScaling::rowwise_gw_hp();
    /// assert_eq!(recipe.granularity, Granularity::RowTensorDgrad);
    /// assert_eq!(recipe.quant, QParams::POWER_2.into());
    /// assert_eq!(recipe.override_linear_precision, (false, false, true));
    /// assert_eq!(Recipe::from(recipe).to_string(), "rowwise-gw-hp");
    /// ```
    pub fn rowwise_gw_hp() -> Self {
        Self {
            granularity: Granularity::RowTensorDgrad,
            quant: QParams::POWER_2.into(),
            override_linear_precision: (false, false, true),
            ..Self::rowwise()
        }
    }

    /// Returns the recipe with the options that a file gives.
    pub(crate) fn with_options(mut self, options: &mut Options) -> Result<Recipe, String> {
        recipe_key::read(&OPTIONS, &mut self, options)?;
        Ok(self.into())
    }
}

impl From<CurrentScaling> for Recipe {
    fn from(recipe: CurrentScaling) -> Self {
        Self::new(recipe)
    }
}

impl Policy for CurrentScaling {
    fn format(&self) -> Format {
        self.fp8_format
    }

    fn validate(&self) -> Result<()> {
        let name = "CurrentScaling";
        self.fp8_format.validate(name)?;
        self.quant.validate(name)
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn fp8_attention(&self) -> Fp8Attention {
        Fp8Attention::new(self.fp8_dpa, self.fp8_mha)
    }

    fn state_key(&self) -> String {
        let kind = match self.granularity {
            Granularity::Tensor => "current",
            Granularity::Row => "rowwise",
            Granularity::RowTensorDgrad => "rowwise-gw-hp",
        };
        recipe_key::write(kind, &OPTIONS, self, self.fp8_attention())
    }

    fn use_split_accumulator(&self) -> (bool, bool, bool) {
        self.use_split_accumulator
    }

    fn rule(&self, role: SlotRole) -> ScaleRule {
        let fp8_max = self.fp8_format.encoding(role.direction()).max();
        let QParams { power_2_scale, amax_epsilon } = self.quant.of(role);
        ScaleRule::Current { fp8_max, epsilon: amax_epsilon, power_2_scales: power_2_scale }
    }

    fn scale<'a>(&'a self, role: SlotRole, rule: &'a ScaleRule) -> Scale<'a> {
        let rows = self.quant.of(role).block_scaling(Blocks::Row);
        match (self.granularity, role) {
            (Granularity::Tensor, _) => Scale::FromTensor(rule),
            (Granularity::RowTensorDgrad, SlotRole::Weight) => Scale::Blocks(BlockRule::RowsThenTensor(rows)),
            (Granularity::Row | Granularity::RowTensorDgrad, _) => Scale::Blocks(BlockRule::F32(rows)),
        }
    }
}
