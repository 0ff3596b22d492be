//! Current scaling: scales from the tensor itself.

use crate::policy::{Policy, out_of_range};
use crate::recipe_options::{FromValue, Options, Value};
use crate::{Direction, Format, Recipe, Result, SlotRole};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::fp8_format::slice::BlockScaling;
use fp8_kernels::{BlockRule, Scale, ScaleRule};

/// How many scales a tensor has under [`CurrentScaling`].
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
}

impl FromValue for Granularity {
    const EXPECTED: &'static str = "\"tensor\" or \"row\"";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(name) if name == "tensor" => Some(Self::Tensor),
            Value::Text(name) if name == "row" => Some(Self::Row),
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
/// `fp8_max` is 448 for E4M3 and 57344 for E5M2. With `use_power_2_scales` the scale is rounded down to a power of two.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{CurrentScaling, GemmSlots, Recipe, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let recipe = Recipe::from(CurrentScaling { use_power_2_scales: true, ..Default::default() });
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
    /// Whether scales are rounded down to powers of two. Default: false.
    pub use_power_2_scales: bool,
    /// The smallest amax that counts: smaller ones are replaced by it. Finite, at least 0. Default: 0.
    pub amax_epsilon: f32,
    /// Whether fprop, dgrad and wgrad run in high precision, in this order. Default: `(false, false, false)`.
    pub override_linear_precision: (bool, bool, bool),
}

impl Default for CurrentScaling {
    fn default() -> Self {
        Self {
            granularity: Granularity::Tensor,
            fp8_format: Format::Hybrid,
            use_power_2_scales: false,
            amax_epsilon: 0.0,
            override_linear_precision: (false, false, false),
        }
    }
}

impl CurrentScaling {
    /// Returns the recipe with a scale for each row, in E4M3: for each token of activations and gradients, and for each output
    /// channel of weights. In the transpose, each column has a scale, computed from the column.
    pub fn rowwise() -> Self {
        Self { granularity: Granularity::Row, fp8_format: Format::E4M3, ..Self::default() }
    }

    /// Returns the recipe with the options that a file gives.
    pub(crate) fn with_options(mut self, options: &mut Options) -> Result<Recipe, String> {
        options.read("granularity", &mut self.granularity)?;
        options.read("fp8_format", &mut self.fp8_format)?;
        options.read("use_power_2_scales", &mut self.use_power_2_scales)?;
        options.read("amax_epsilon", &mut self.amax_epsilon)?;
        options.read("override_linear_precision", &mut self.override_linear_precision)?;
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
        if !(self.amax_epsilon >= 0.0 && self.amax_epsilon.is_finite()) {
            return Err(out_of_range(name, "amax_epsilon", self.amax_epsilon, "expected finite and ≥ 0"));
        }
        Ok(())
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn state_key(&self) -> String {
        let Self { granularity, fp8_format, use_power_2_scales, amax_epsilon, override_linear_precision } =
            self;
        let name = if *granularity == Granularity::Row { "rowwise" } else { "current" };
        format!(
            "{name}(fp8_format={fp8_format},use_power_2_scales={use_power_2_scales},amax_epsilon={amax_epsilon},\
             override={override_linear_precision:?})"
        )
    }

    fn rule(&self, direction: Direction) -> ScaleRule {
        ScaleRule::Current {
            fp8_max: self.fp8_format.encoding(direction).max(),
            epsilon: self.amax_epsilon,
            power_2_scales: self.use_power_2_scales,
        }
    }

    fn scale<'a>(&'a self, _: SlotRole, rule: &'a ScaleRule) -> Scale<'a> {
        match self.granularity {
            Granularity::Tensor => Scale::FromTensor(rule),
            Granularity::Row => {
                let (power_2_scales, epsilon) = (self.use_power_2_scales, self.amax_epsilon);
                let scaling = BlockScaling { power_2_scales, epsilon, ..BlockScaling::new(Blocks::Row) };
                Scale::Blocks(BlockRule::F32(scaling))
            }
        }
    }
}
