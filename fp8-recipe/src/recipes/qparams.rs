//! The options with which a recipe without state computes scales from amaxes, for each kind of tensor.

use crate::recipes::policy::out_of_range;
use crate::recipes::recipe_options::{FromValue, Options, Value};
use crate::{Result, SlotRole};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::fp8_format::slice::BlockScaling;
use std::fmt::Display;

/// The options for computing the scale of a tensor, row or block from its amax: Transformer Engine's `QParams`.
///
/// ```text
/// scale = fp8_max / max(amax, amax_epsilon), rounded down to a power of two if power_2_scale
/// ```
///
/// The default rounds nothing and has an epsilon of 0. [`QParamsByRole`] has an example.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct QParams {
    /// Whether scales are rounded down to powers of two. Default: false.
    pub power_2_scale: bool,
    /// The smallest amax that counts: smaller ones are replaced by it. Finite, at least 0. Default: 0.
    pub amax_epsilon: f32,
}

impl QParams {
    /// Scales that are powers of two, and an epsilon of 0.
    ///
    /// ```
    /// use fp8_recipe::QParams;
    /// assert_eq!(QParams::POWER_2, QParams { power_2_scale: true, ..Default::default() });
    /// ```
    pub const POWER_2: Self = Self { power_2_scale: true, amax_epsilon: 0.0 };

    /// Returns the rule for blocks of this kind.
    pub(crate) fn block_scaling(self, blocks: Blocks) -> BlockScaling {
        let Self { power_2_scale, amax_epsilon } = self;
        BlockScaling { power_2_scales: power_2_scale, epsilon: amax_epsilon, ..BlockScaling::new(blocks) }
    }
}

/// [`QParams`] for inputs, for weights and for gradients: Transformer Engine's `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and
/// `fp8_quant_bwd_grad`.
///
/// `QParams` convert into it: all three are then equal. In files, `power_2_scale` and `amax_epsilon` are either one value for
/// all three or a list for inputs, weights and gradients, in this order.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{CurrentScaling, GemmSlots, QParams, QParamsByRole, Recipe, Scaling};
///
/// let all = CurrentScaling { quant: QParams::POWER_2.into(), ..Default::default() };
/// let quant = QParamsByRole { weight: QParams::POWER_2, ..Default::default() };
/// let weights = CurrentScaling { quant, ..Default::default() };
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let x = Tensor::from_vec(vec![5.0f32], [1, 1], &device)?;
/// let mut scales = Vec::new();
/// for recipe in [all, weights] {
///     let mut cx = scaling.autocast(&recipe.into())?;
///     for slot in [&fc.input, &fc.weight] {
///         let x8 = ops::quantize(&x, &cx.slot(slot)?)?;
///         scales.extend(x8.as_fp8().map(|x8| x8.scale_inv().item()).transpose()?);
///     }
///     cx.commit()?;
/// }
/// let exact = 1.0 / (448.0f32 / 5.0);
/// assert_eq!(scales, [1.0 / 64.0, 1.0 / 64.0, exact, 1.0 / 64.0]);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct QParamsByRole {
    /// Activations: inputs of a GEMM, and outputs that are written in FP8.
    pub input: QParams,
    /// Weights.
    pub weight: QParams,
    /// Gradients: of a GEMM's output, and of its input where that is written in FP8.
    pub grad_output: QParams,
}

impl From<QParams> for QParamsByRole {
    fn from(params: QParams) -> Self {
        Self { input: params, weight: params, grad_output: params }
    }
}

impl QParamsByRole {
    /// Returns the parameters of a slot.
    pub(crate) const fn of(&self, role: SlotRole) -> QParams {
        match role {
            SlotRole::Input | SlotRole::Output => self.input,
            SlotRole::Weight => self.weight,
            SlotRole::GradOutput | SlotRole::GradInput => self.grad_output,
        }
    }

    /// Replaces the choices of rounding that a file gives.
    pub(crate) fn read_powers(&mut self, options: &mut Options) -> Result<(), String> {
        let mut powers = Three(self.values(|params| params.power_2_scale));
        options.read("power_2_scale", &mut powers)?;
        let [input, weight, grad_output] = powers.0;
        self.input.power_2_scale = input;
        self.weight.power_2_scale = weight;
        self.grad_output.power_2_scale = grad_output;
        Ok(())
    }

    /// Replaces the epsilons that a file gives.
    pub(crate) fn read_epsilons(&mut self, options: &mut Options) -> Result<(), String> {
        let mut epsilons = Three(self.values(|params| params.amax_epsilon));
        options.read("amax_epsilon", &mut epsilons)?;
        let [input, weight, grad_output] = epsilons.0;
        self.input.amax_epsilon = input;
        self.weight.amax_epsilon = weight;
        self.grad_output.amax_epsilon = grad_output;
        Ok(())
    }

    /// Checks every epsilon.
    pub(crate) fn validate(&self, recipe: &'static str) -> Result<()> {
        let options =
            ["quant.input.amax_epsilon", "quant.weight.amax_epsilon", "quant.grad_output.amax_epsilon"];
        let mut all = options.into_iter().zip(self.values(|params| params.amax_epsilon));
        match all.find(|(_, epsilon)| !(*epsilon >= 0.0 && epsilon.is_finite())) {
            Some((option, epsilon)) => Err(out_of_range(recipe, option, epsilon, "expected finite and ≥ 0")),
            None => Ok(()),
        }
    }

    /// Returns the choices of rounding as keys list them: one value if all roles have it, else `(input, weight, grad_output)`.
    pub(crate) fn powers_text(&self) -> String {
        Three(self.values(|params| params.power_2_scale)).text()
    }

    /// Returns the epsilons as keys list them.
    pub(crate) fn epsilons_text(&self) -> String {
        Three(self.values(|params| params.amax_epsilon)).text()
    }

    fn values<T>(&self, of: impl Fn(&QParams) -> T) -> [T; 3] {
        [&self.input, &self.weight, &self.grad_output].map(of)
    }
}

/// Values for inputs, weights and gradients.
struct Three<T>([T; 3]);

impl<T: PartialEq + Display> Three<T> {
    fn text(&self) -> String {
        match &self.0 {
            [a, b, c] if a == b && b == c => a.to_string(),
            [a, b, c] => format!("({a}, {b}, {c})"),
        }
    }
}

/// One value for all, or a list of three.
fn three<T: FromValue + Copy>(value: &Value) -> Option<Three<T>> {
    if let Value::List(values) = value {
        let [a, b, c] = &values[..] else { return None };
        return Some(Three([T::from_value(a)?, T::from_value(b)?, T::from_value(c)?]));
    }
    T::from_value(value).map(|value| Three([value; 3]))
}

impl FromValue for Three<bool> {
    const EXPECTED: &'static str =
        "true or false, or three of them, for inputs, weights and gradients: [false, false, true]";

    fn from_value(value: &Value) -> Option<Self> {
        three(value)
    }
}

impl FromValue for Three<f32> {
    const EXPECTED: &'static str = "a number, or three, for inputs, weights and gradients: [0, 0, 1e-4]";

    fn from_value(value: &Value) -> Option<Self> {
        three(value)
    }
}
