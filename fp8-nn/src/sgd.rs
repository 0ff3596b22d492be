//! SGD with momentum.

use crate::any_optimizer::sealed::HasState;
use crate::optimizer::Rule;
use crate::{AdamW, AdamWOptions, MomentDtype, Optimizer, ParameterGroup, Result};

/// Stochastic gradient descent with momentum, as PyTorch's `SGD` without dampening.
///
/// For a step with gradient g, learning rate `lr`, momentum μ and weight decay λ, in f32:
///
/// ```text
/// d ← g + λ · p
/// m ← μ · m + d
/// p ← p − lr · m        with `nesterov`: p ← p − lr · (d + μ · m)
/// ```
///
/// Everything else is as in [`AdamW`]: frozen parameters, f32 copies, gradients that are not finite, recorded steps, checkpoints. The
/// methods are those of [`Optimizer`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 2, out_features: 1, bias: false, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// parameters_mut(&mut fc)[0].set(Tensor::full(1.0, [1, 2], DType::F32, &Device::cpu())?)?;
/// *parameters_mut(&mut fc)[0].main_grad_mut() = Tensor::from_vec(vec![1.0f32, -2.0], [1, 2], &Device::cpu())?;
/// let mut optimizer = Sgd::new(SgdOptions { momentum: 0.5, ..Default::default() })?;
/// optimizer.step(&mut fc, 0.25)?; // m = g
/// optimizer.step(&mut fc, 0.25)?; // m = 1.5 · g
/// assert_eq!(fc.weight().tensor().to_f32_vec()?, [0.375, 2.25]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Sgd(AdamW);

impl Sgd {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// A `momentum` that is negative or not less than 1; a `weight_decay` or `lr_factor` that is negative or not finite; a group with
    /// an empty pattern; `stochastic_rounding` of parameters that have f32 copies.
    pub fn new(options: SgdOptions) -> Result<Self> {
        let SgdOptions {
            momentum,
            nesterov,
            weight_decay,
            main_params,
            groups,
            moments,
            stochastic_rounding,
        } = options;
        let options = AdamWOptions {
            beta1: momentum,
            weight_decay,
            main_params,
            groups,
            moments,
            stochastic_rounding,
            ..Default::default()
        };
        Ok(Self(AdamW::with_rule(Rule::Sgd { nesterov }, options)?))
    }
}

impl HasState for Sgd {
    fn state(&self) -> &AdamW {
        &self.0
    }

    fn state_mut(&mut self) -> &mut AdamW {
        &mut self.0
    }
}

impl Optimizer for Sgd {}

/// Options of [`Sgd`]. The learning rate is an argument of [`Optimizer::step`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = SgdOptions { nesterov: true, ..Default::default() };
/// assert_eq!((options.momentum, options.weight_decay), (0.9, 0.0));
/// let refused = Sgd::new(SgdOptions { momentum: 1.0, ..options }).unwrap_err();
/// assert_eq!(refused.to_string(), "Sgd: momentum = 1: expected 0 or more and less than 1");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SgdOptions {
    /// The decay of the momentum, at least 0 and less than 1. Default: 0.9. PyTorch's default is 0.
    pub momentum: f32,
    /// Whether updates look a step ahead (Nesterov). Default: false, as in PyTorch.
    pub nesterov: bool,
    /// The weight decay, which is added to gradients and applies to parameters with two or more dimensions. Default: 0, as in
    /// PyTorch, whose decay applies to all parameters.
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

impl Default for SgdOptions {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.0,
            main_params: true,
            groups: Vec::new(),
            moments: MomentDtype::F32,
            stochastic_rounding: false,
        }
    }
}
