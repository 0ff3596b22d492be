//! Codes of 4 bits with scales for blocks of 16, from the values themselves.

use crate::recipes::gemm_accumulation::SPLIT_BY_DEFAULT;
use crate::recipes::policy::Policy;
use crate::recipes::recipe_key::{self, KeyText, RecipeOption, field};
use crate::recipes::recipe_options::{FromValue, Options, Value};
use crate::{Format, Recipe, Result, SlotRole};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{Nvfp4Rule, Scale, ScaleRule};

/// NVFP4: codes of 4 bits (E2M1), a scale in E4M3 for 16 values, and an f32 factor for the tensor. Transformer Engine's
/// `NVFP4BlockScaling`.
///
/// | tensor | for fprop and dgrad | for wgrad |
/// |---|---|---|
/// | input | 1 × 16 | 1 × 16 after a Hadamard transform |
/// | weight | 16 × 16; dgrad reads the transpose | |
/// | gradient | 1 × 16, rounded stochastically | 1 × 16 after a Hadamard transform, rounded stochastically |
///
/// The transform mixes each 16 tokens, so that an outlier is spread over them; both operands of wgrad have it, and in exact arithmetic
/// it changes nothing. Gradients are rounded stochastically, so that small ones are right on average. Their random numbers come from
/// the seed of dropout ([`Scaling::set_dropout_seed`](crate::Scaling::set_dropout_seed)): each backward scope draws a key of its own,
/// evaluations and recomputation draw nothing. The recipe keeps no other state. Ranks that share layers (tensor parallelism) have one seed,
/// and number a gradient's elements in the whole; replicas (data parallelism) draw other numbers, by seeds of their own or by
/// [`Scaling::set_replica`](crate::Scaling::set_replica).
///
/// Linears alone run in it: attention, norms, embeddings and the head stay in high precision, and an operand's scale must be known
/// before its codes, so that norms and activations write their output in high precision first. The paper on training in NVFP4 (arXiv
/// 2509.25149) keeps the first and last layers of large models in high precision, too: see [`Recipe::by_name`].
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Encoding, Tensor, ops};
/// use fp8_recipe::{GemmSlots, Nvfp4, Recipe, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let mut cx = scaling.autocast(&Recipe::from(Nvfp4::default()))?;
/// let x = Tensor::from_vec([vec![6.0f32; 16], vec![0.5; 16]].concat(), [1, 32], &device)?;
/// let x4 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// let x4 = x4.as_fp8().cloned();
/// assert_eq!(x4.as_ref().map(|x4| x4.encoding()), Some(Encoding::E2M1));
/// let scales = x4.map(|x4| x4.scale_inv().to_vec::<u8>()).transpose()?;
/// assert_eq!(scales, Some(vec![0x7E, 0x61])); // 448, and 37.33 rounded to 36: the bits of E4M3
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Nvfp4 {
    /// Whether wgrad's operands are quantized without a Hadamard transform. Default: false.
    pub disable_rht: bool,
    /// Whether gradients are rounded to nearest. Default: false.
    pub disable_stochastic_rounding: bool,
    /// Whether weights have 1 × 16 blocks, other ones for dgrad than for fprop. Default: false.
    pub disable_2d_quantization: bool,
    /// Whether fprop, dgrad and wgrad run in high precision, in this order. `(false, true, true)` is Transformer Engine's
    /// `backward_override="high_precision"`. Default: `(false, false, false)`.
    pub override_linear_precision: (bool, bool, bool),
}

/// All options, in the order of keys and of the errors of files.
const OPTIONS: [RecipeOption<Nvfp4>; 5] = [
    field!(disable_rht),
    field!(disable_stochastic_rounding),
    field!(disable_2d_quantization),
    field!(override_linear_precision as "override"),
    RecipeOption { key: None, read: Some(|recipe, options| recipe.read_backward_override(options)) },
];

impl Nvfp4 {
    /// Returns the recipe with the options that a file gives.
    pub(crate) fn with_options(mut self, options: &mut Options) -> Result<Recipe, String> {
        recipe_key::read(&OPTIONS, &mut self, options)?;
        Ok(self.into())
    }

    /// Reads Transformer Engine's name for a backward pass in high precision.
    fn read_backward_override(&mut self, options: &mut Options) -> Result<(), String> {
        let mut given = BackwardOverride::None;
        options.read("backward_override", &mut given)?;
        if given == BackwardOverride::HighPrecision {
            self.override_linear_precision.1 = true;
            self.override_linear_precision.2 = true;
        }
        Ok(())
    }
}

/// Transformer Engine's option of this name. `"dequantized"`, a backward pass from dequantized codes, is not among its values.
#[derive(PartialEq)]
enum BackwardOverride {
    None,
    HighPrecision,
}

impl FromValue for BackwardOverride {
    const EXPECTED: &'static str =
        "\"high_precision\" (\"dequantized\", a backward pass from dequantized codes, does not exist here)";

    fn from_value(value: &Value) -> Option<Self> {
        matches!(value, Value::Text(name) if name == "high_precision").then_some(Self::HighPrecision)
    }
}

impl From<Nvfp4> for Recipe {
    fn from(recipe: Nvfp4) -> Self {
        Self::new(recipe)
    }
}

impl Policy for Nvfp4 {
    fn format(&self) -> Format {
        Format::E2M1
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn state_key(&self) -> String {
        recipe_key::write("nvfp4", &OPTIONS, self, self.fp8_attention())
    }

    fn use_split_accumulator(&self) -> (bool, bool, bool) {
        SPLIT_BY_DEFAULT
    }

    /// The rule of the scale that reports show: the factor of a tensor.
    fn rule(&self, _: SlotRole) -> ScaleRule {
        ScaleRule::Current { fp8_max: 6.0 * 448.0, epsilon: 0.0, power_2_scales: false }
    }

    fn scale<'a>(&'a self, role: SlotRole, _: &'a ScaleRule) -> Scale<'a> {
        let line = Nvfp4Rule { hadamard: !self.disable_rht, ..Nvfp4Rule::default() };
        Scale::Nvfp4(match role {
            SlotRole::Weight if self.disable_2d_quantization => Nvfp4Rule::default(),
            SlotRole::Weight => Nvfp4Rule { blocks: Blocks::B16x16, ..Nvfp4Rule::default() },
            SlotRole::Input | SlotRole::Output | SlotRole::GradOutput | SlotRole::GradInput => line,
        })
    }

    fn rounds_stochastically(&self, role: SlotRole) -> bool {
        role == SlotRole::GradOutput && !self.disable_stochastic_rounding
    }
}
