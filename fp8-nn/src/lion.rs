//! Lion.

use crate::any_optimizer::sealed::HasState;
use crate::optimizer::Rule;
use crate::{AdamW, AdamWOptions, MomentDtype, Optimizer, ParameterGroup, Result};

/// Lion, which updates parameters by the sign of a momentum (Chen et al., <https://arxiv.org/abs/2302.06675>).
///
/// For a step with gradient g, learning rate `lr` and weight decay λ, in f32:
///
/// ```text
/// u ← β₁ · m + (1 − β₁) · g
/// p ← p · (1 − lr · λ) − lr · sign(u)        sign(0) = 0
/// m ← β₂ · m + (1 − β₂) · g
/// ```
///
/// It has one moment, so it needs 4 bytes a parameter where AdamW needs 8, or 1.03 in FP8. Each update is as long as the learning rate
/// for every element, so its authors use rates 3 to 10 times smaller than AdamW's, and a weight decay larger by as much. Everything else is
/// as in [`AdamW`]: frozen parameters, f32 copies, gradients that are not finite, recorded steps, checkpoints. The methods are those of
/// [`Optimizer`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 2, out_features: 1, bias: false, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// parameters_mut(&mut fc)[0].set(Tensor::full(1.0, [1, 2], DType::F32, &Device::cpu())?)?;
/// *parameters_mut(&mut fc)[0].main_grad_mut() = Tensor::from_vec(vec![1e-3f32, -70.0], [1, 2], &Device::cpu())?;
/// let mut optimizer = Lion::new(LionOptions::default())?;
/// optimizer.step(&mut fc, 0.25)?;
/// assert_eq!(fc.weight().tensor().to_f32_vec()?, [0.75, 1.25]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Lion(AdamW);

impl Lion {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// A `beta1` or `beta2` that is negative or not less than 1; a `weight_decay` or `lr_factor` that is negative or not finite; a
    /// group with an empty pattern; `stochastic_rounding` of parameters that have f32 copies.
    pub fn new(options: LionOptions) -> Result<Self> {
        let LionOptions { beta1, beta2, weight_decay, main_params, groups, moments, stochastic_rounding } =
            options;
        let options = AdamWOptions {
            beta1,
            beta2,
            weight_decay,
            main_params,
            groups,
            moments,
            stochastic_rounding,
            ..Default::default()
        };
        Ok(Self(AdamW::with_rule(Rule::Lion, options)?))
    }
}

impl HasState for Lion {
    fn state(&self) -> &AdamW {
        &self.0
    }

    fn state_mut(&mut self) -> &mut AdamW {
        &mut self.0
    }
}

impl Optimizer for Lion {}

/// Options of [`Lion`]. The learning rate is an argument of [`Optimizer::step`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LionOptions { weight_decay: 1.0, moments: MomentDtype::Fp8, ..Default::default() };
/// assert_eq!((options.beta1, options.beta2), (0.9, 0.99));
/// assert!(Lion::new(LionOptions { beta1: 1.0, ..options }).is_err());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LionOptions {
    /// The weight of the momentum in an update, at least 0 and less than 1. Default: 0.9, as its authors'.
    pub beta1: f32,
    /// The decay of the momentum, at least 0 and less than 1. Default: 0.99, as its authors'.
    pub beta2: f32,
    /// The decoupled weight decay, which applies to parameters with two or more dimensions. Default: 0, as its authors'.
    pub weight_decay: f32,
    /// Whether the optimizer keeps an f32 copy of each bf16 or f16 parameter and updates that copy. Default: true.
    pub main_params: bool,
    /// Parameters with a learning rate or a weight decay of their own: see [`AdamWOptions::groups`]. Default: none.
    pub groups: Vec<ParameterGroup>,
    /// The format in which the momentum is stored. Default: f32. FP8 needs 1.03 bytes a parameter: see [`MomentDtype`].
    pub moments: MomentDtype,
    /// Whether bf16 parameters without f32 copies are rounded stochastically: see [`AdamWOptions::stochastic_rounding`].
    /// Default: false.
    pub stochastic_rounding: bool,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.0,
            main_params: true,
            groups: Vec::new(),
            moments: MomentDtype::F32,
            stochastic_rounding: false,
        }
    }
}
