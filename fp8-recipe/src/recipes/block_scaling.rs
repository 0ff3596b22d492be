//! Scales for blocks of 128 values, and for MX blocks of 32, from the values themselves.

use crate::recipes::policy::{Policy, out_of_range};
use crate::recipes::recipe_key::{self, KeyText, RecipeOption, field, file_field};
use crate::recipes::recipe_options::{FromValue, Options, Value};
use crate::{Format, QParams, QParamsByRole, Recipe, Result, SlotRole};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::fp8_format::slice::MxRounding;
use fp8_kernels::{BlockRule, Scale, ScaleRule};

/// A scale for each block of 128 values of activations and gradients, and for each 128 × 128 block of a weight: Transformer
/// Engine's `Float8BlockScaling`.
///
/// ```text
/// scale = fp8_max / max(amax of the block, amax_epsilon)
/// ```
///
/// It keeps no state. Blocks lie along the dimension that a GEMM sums over, so a tensor that is also read transposed is quantized
/// twice, each time from its values. Scales are powers of two by default. Activations and gradients have 1 × 128 blocks and weights
/// 128 × 128; the dimensions are options, of which no two may be 2, because a GEMM multiplies 128 × 128 blocks only with 1 × 128.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{BlockScaling, GemmSlots, QParams, Recipe, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let recipe = Recipe::from(BlockScaling { quant: QParams::default().into(), ..Default::default() });
/// let mut cx = scaling.autocast(&recipe)?;
/// let x = Tensor::from_vec([vec![7.0f32; 128], vec![0.5; 32]].concat(), [1, 160], &device)?;
/// let x8 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// let scale_inv = x8.as_fp8().map(|x8| x8.scale_inv().to_vec::<f32>()).transpose()?;
/// assert_eq!(scale_inv, Some(vec![1.0 / 64.0, 1.0 / 896.0])); // 448 / 7, 448 / 0.5
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockScaling {
    /// E4M3, or HYBRID: E4M3 forward and E5M2 for gradients. Default: E4M3.
    pub fp8_format: Format,
    /// The options for computing scales from amaxes, for inputs, weights and gradients. Default: scales are rounded
    /// down to powers of two, and the epsilon is 0.
    pub quant: QParamsByRole,
    /// 1 for 1 × 128 blocks of inputs, 2 for 128 × 128. Default: 1.
    pub x_block_scaling_dim: usize,
    /// 1 for 1 × 128 blocks of weights, 2 for 128 × 128. Default: 2.
    pub w_block_scaling_dim: usize,
    /// 1 for 1 × 128 blocks of gradients, 2 for 128 × 128. Default: 1.
    pub grad_block_scaling_dim: usize,
    /// Whether fprop, dgrad and wgrad use split accumulation, in this order. Nothing else is valid. Default:
    /// `(true, true, true)`.
    pub use_split_accumulator: (bool, bool, bool),
    /// Whether fprop, dgrad and wgrad run in high precision, in this order. Default: `(false, false, false)`.
    pub override_linear_precision: (bool, bool, bool),
}

/// Products of blocks have no fast accumulation.
const SPLIT: (bool, bool, bool) = (true, true, true);

/// All options, in the order of keys and of the errors of files.
const BLOCK_OPTIONS: [RecipeOption<BlockScaling>; 9] = [
    field!(fp8_format),
    RecipeOption {
        key: Some(("power_2_scale", |recipe| recipe.quant.powers_text())),
        read: Some(|recipe, options| recipe.quant.read_powers(options)),
    },
    RecipeOption {
        key: Some(("amax_epsilon", |recipe| recipe.quant.epsilons_text())),
        read: Some(|recipe, options| recipe.quant.read_epsilons(options)),
    },
    RecipeOption { key: Some(("dims", BlockScaling::dims_text)), read: None },
    file_field!(x_block_scaling_dim),
    file_field!(w_block_scaling_dim),
    file_field!(grad_block_scaling_dim),
    field!(use_split_accumulator),
    field!(override_linear_precision as "override"),
];

impl Default for BlockScaling {
    fn default() -> Self {
        Self {
            fp8_format: Format::E4M3,
            quant: QParams::POWER_2.into(),
            x_block_scaling_dim: 1,
            w_block_scaling_dim: 2,
            grad_block_scaling_dim: 1,
            use_split_accumulator: (true, true, true),
            override_linear_precision: (false, false, false),
        }
    }
}

impl BlockScaling {
    /// Returns the recipe of DeepSeek-V3: f32 scales that are not rounded, and amaxes of at least 1e-4.
    pub fn deepseek() -> Self {
        let quant = QParams { power_2_scale: false, amax_epsilon: 1e-4 };
        Self { quant: quant.into(), ..Self::default() }
    }

    /// Returns the dimensions of the blocks of inputs, weights and gradients as keys list them.
    fn dims_text(&self) -> String {
        let Self { x_block_scaling_dim: x, w_block_scaling_dim: w, grad_block_scaling_dim: dy, .. } = self;
        format!("{x}-{w}-{dy}")
    }

    /// Returns the recipe with the options that a file gives.
    pub(crate) fn with_options(mut self, options: &mut Options) -> Result<Recipe, String> {
        recipe_key::read(&BLOCK_OPTIONS, &mut self, options)?;
        Ok(self.into())
    }
}

impl From<BlockScaling> for Recipe {
    fn from(recipe: BlockScaling) -> Self {
        Self::new(recipe)
    }
}

impl Policy for BlockScaling {
    fn format(&self) -> Format {
        self.fp8_format
    }

    fn validate(&self) -> Result<()> {
        let name = "BlockScaling";
        self.fp8_format.validate(name)?;
        self.quant.validate(name)?;
        if self.use_split_accumulator != SPLIT {
            let value = format!("{:?}", self.use_split_accumulator);
            let remedy = "expected (true, true, true): products of blocks have no fast accumulation";
            return Err(out_of_range(name, "use_split_accumulator", value, remedy));
        }
        let dims = [
            ("x_block_scaling_dim", self.x_block_scaling_dim),
            ("w_block_scaling_dim", self.w_block_scaling_dim),
            ("grad_block_scaling_dim", self.grad_block_scaling_dim),
        ];
        if let Some((option, dim)) = dims.into_iter().find(|(_, dim)| !(1..=2).contains(dim)) {
            return Err(out_of_range(name, option, dim, "expected 1 (1 × 128 blocks) or 2 (128 × 128)"));
        }
        let mut twos = dims.into_iter().filter(|(_, dim)| *dim == 2);
        match (twos.next(), twos.next()) {
            (Some(_), Some((option, dim))) => {
                let remedy = "another one is 2, too: no GEMM multiplies 128 × 128 blocks with 128 × 128";
                Err(out_of_range(name, option, dim, remedy))
            }
            _ => Ok(()),
        }
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn state_key(&self) -> String {
        recipe_key::write("block", &BLOCK_OPTIONS, self, self.fp8_attention())
    }

    fn use_split_accumulator(&self) -> (bool, bool, bool) {
        SPLIT
    }

    fn rule(&self, role: SlotRole) -> ScaleRule {
        let fp8_max = self.fp8_format.encoding(role.direction()).max();
        let QParams { power_2_scale, amax_epsilon } = self.quant.of(role);
        ScaleRule::Current { fp8_max, epsilon: amax_epsilon, power_2_scales: power_2_scale }
    }

    fn scale<'a>(&'a self, role: SlotRole, _: &'a ScaleRule) -> Scale<'a> {
        let dim = match role {
            SlotRole::Input | SlotRole::Output => self.x_block_scaling_dim,
            SlotRole::Weight => self.w_block_scaling_dim,
            SlotRole::GradOutput | SlotRole::GradInput => self.grad_block_scaling_dim,
        };
        let blocks = if dim == 2 { Blocks::B128x128 } else { Blocks::B1x128 };
        Scale::Blocks(BlockRule::F32(self.quant.of(role).block_scaling(blocks)))
    }
}

/// MXFP8: an E8M0 scale, a power of two, for 32 values. Transformer Engine's `MXFP8BlockScaling`.
///
/// It keeps no state. Blocks lie along the dimension that a GEMM sums over, so a tensor that is also read transposed is quantized
/// twice, each time from its values.
///
/// ```
/// use fp8_recipe::fp8_kernels::fp8_format::E8M0;
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{GemmSlots, Mxfp8, Recipe, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let mut cx = scaling.autocast(&Recipe::from(Mxfp8::default()))?;
/// let x = Tensor::from_vec([vec![500.0f32; 32], vec![0.5; 32]].concat(), [1, 64], &device)?;
/// let x8 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// let scales = x8.as_fp8().map(|x8| x8.scale_inv().to_vec::<u8>()).transpose()?.unwrap_or_default();
/// let scales: Vec<f32> = scales.into_iter().map(|bits| E8M0::from_bits(bits).to_f32()).collect();
/// assert_eq!(scales, [2.0, 1.0 / 512.0]); // 500 / 448 and 0.5 / 448, rounded up to powers of two
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mxfp8 {
    /// E4M3, or HYBRID: E4M3 forward and E5M2 for gradients. Default: E4M3.
    pub fp8_format: Format,
    /// The rounding of scales to powers of two. Default: [`MxRounding::Ceil`], with which no value saturates.
    pub rounding: MxRounding,
    /// Whether fprop, dgrad and wgrad run in high precision, in this order. Default: `(false, false, false)`.
    pub override_linear_precision: (bool, bool, bool),
}

/// All options, in the order of keys and of the errors of files.
const MX_OPTIONS: [RecipeOption<Mxfp8>; 3] =
    [field!(fp8_format), field!(rounding), field!(override_linear_precision as "override")];

impl KeyText for MxRounding {
    fn key_text(&self) -> String {
        format!("{self:?}")
    }
}

impl Default for Mxfp8 {
    fn default() -> Self {
        let override_linear_precision = (false, false, false);
        Self { fp8_format: Format::E4M3, rounding: MxRounding::Ceil, override_linear_precision }
    }
}

impl Mxfp8 {
    /// Returns the recipe with the options that a file gives.
    pub(crate) fn with_options(mut self, options: &mut Options) -> Result<Recipe, String> {
        recipe_key::read(&MX_OPTIONS, &mut self, options)?;
        Ok(self.into())
    }
}

impl FromValue for MxRounding {
    const EXPECTED: &'static str = "\"ceil\" or \"floor\"";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(name) if name == "ceil" => Some(Self::Ceil),
            Value::Text(name) if name == "floor" => Some(Self::Floor),
            _ => None,
        }
    }
}

impl From<Mxfp8> for Recipe {
    fn from(recipe: Mxfp8) -> Self {
        Self::new(recipe)
    }
}

impl Policy for Mxfp8 {
    fn format(&self) -> Format {
        self.fp8_format
    }

    fn validate(&self) -> Result<()> {
        self.fp8_format.validate("Mxfp8")
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }

    fn state_key(&self) -> String {
        recipe_key::write("mxfp8", &MX_OPTIONS, self, self.fp8_attention())
    }

    fn use_split_accumulator(&self) -> (bool, bool, bool) {
        SPLIT
    }

    fn rule(&self, role: SlotRole) -> ScaleRule {
        let fp8_max = self.fp8_format.encoding(role.direction()).max();
        ScaleRule::Current { fp8_max, epsilon: 0.0, power_2_scales: true }
    }

    fn scale<'a>(&'a self, _: SlotRole, _: &'a ScaleRule) -> Scale<'a> {
        Scale::Blocks(BlockRule::Mx(self.rounding))
    }
}
