//! LayerNorm and RMSNorm.

use crate::arguments::{Argument, Output};
use crate::precision::{self, Entered};
use crate::{Error, Layer, Module, NormOptions, Parameter, Placement, Result, TensorParallel, init};
use fp8_kernels::ops::{self, Norm, NormStats};
use fp8_kernels::{DType, Device, Encoding, Operand, Slot, Tensor};
use fp8_recipe::{Backward, Forward, SlotName, Slots};
use std::sync::Arc;

/// Options of a [`LayerNorm`] or [`RmsNorm`]. `hidden_size` is required.
///
/// See [`LayerNorm`] and [`RmsNorm`] for examples.
#[derive(Debug, Clone)]
pub struct NormLayerOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// ε, which is added to the variance or the mean square. Finite and greater than 0. Default: 1e-5.
    /// PyTorch's `RMSNorm` uses the epsilon of the dtype.
    pub eps: f32,
    /// Whether the stored weight is γ − 1, so that weight decay pulls γ to 1. Default: false.
    pub zero_centered_gamma: bool,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// The ranks that share the layers around it. With sequence parallelism, its input is this rank's tokens, and each rank has a part of
    /// the gradients of its parameters. Default: `None`.
    pub tensor_parallel: Option<TensorParallel>,
}

impl Default for NormLayerOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            eps: 1e-5,
            zero_centered_gamma: false,
            params_dtype: DType::F32,
            tensor_parallel: None,
        }
    }
}

/// Layer normalization of the last dimension: `y = (x − μ) / √(σ² + ε) · γ + β`.
///
/// μ and σ² are mean and variance of a row, computed in f32. Input and output are `[…, hidden_size]`; the norm runs in high
/// precision under every recipe. To normalize directly into a GEMM's FP8 input, use
/// [`LayerNormLinear`](crate::LayerNormLinear), or [`forward_slot`](Self::forward_slot) in a layer of your own.
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.weight` | `[hidden_size]` | γ = 1: stored as 1, or as 0 with `zero_centered_gamma` |
/// | `<path>.bias` | `[hidden_size]` | β = 0 |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = NormLayerOptions { hidden_size: 2, ..Default::default() };
/// let norm = LayerNorm::new("norm", &options, &device)?;
/// let mut scaling = Scaling::new(&norm, &device)?;
/// let x = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2], &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, _) = scaling.in_autocast(&recipe, |cx| norm.forward(cx, &x))?;
/// assert_eq!(y.to_f32_vec()?, [-0.999995, 0.999995]); // (1 − 2) / √(1 + 1e-5)
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNorm(NormCore);

/// Root-mean-square normalization of the last dimension: `y = x / √(mean(x²) + ε) · γ`.
///
/// The mean square of a row is computed in f32. Input and output are `[…, hidden_size]`; the norm runs in high precision
/// under every recipe.
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.weight` | `[hidden_size]` | γ = 1: stored as 1, or as 0 with `zero_centered_gamma` |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = NormLayerOptions { hidden_size: 2, ..Default::default() };
/// let norm = RmsNorm::new("norm", &options, &device)?;
/// let mut scaling = Scaling::new(&norm, &device)?;
/// let x = Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, _) = scaling.in_autocast(&recipe, |cx| norm.forward(cx, &x))?;
/// let y = y.to_f32_vec()?;
/// assert!((y[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-5 && (y[1] - 4.0 / 12.5f32.sqrt()).abs() < 1e-5);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct RmsNorm(NormCore);

/// The values that the backward pass of a norm needs: the input and the statistics of its rows.
#[derive(Debug)]
pub struct NormSaved {
    x: Tensor,
    stats: NormStats,
    input_dtype: DType,
    layer: Arc<str>,
}

/// LayerNorm or RMSNorm, as a layer of its own or in front of a Linear.
#[derive(Debug)]
pub(crate) struct NormCore {
    path: Arc<str>,
    pub(crate) weight: Parameter,
    pub(crate) bias: Option<Parameter>,
    options: NormOptions,
}

impl NormCore {
    pub(crate) fn new(
        path: &str,
        hidden_size: usize,
        options: NormOptions,
        params_dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let NormOptions { normalization, eps, zero_centered_gamma } = options;
        init::check_params_dtype(path, params_dtype)?;
        init::check_positive(path, &[("hidden_size", hidden_size)])?;
        if !(eps > 0.0 && eps.is_finite()) {
            return Err(Error::Option {
                part: path.to_owned(),
                option: "eps",
                value: eps.to_string(),
                remedy: "expected finite and greater than 0".to_owned(),
            });
        }
        let gamma = if zero_centered_gamma { 0.0 } else { 1.0 };
        let weight = Tensor::full(gamma, [hidden_size], params_dtype, device)?;
        let zeros = || {
            let zeros = Tensor::zeros([hidden_size], params_dtype, device)?;
            Parameter::new(format!("{path}.bias"), zeros)
        };
        Ok(Self {
            path: path.into(),
            weight: Parameter::new(format!("{path}.weight"), weight)?,
            bias: (normalization == Norm::LayerNorm).then(zeros).transpose()?,
            options,
        })
    }

    /// Places its parameters.
    pub(crate) fn placed(self, placement: &Placement, ranks: &TensorParallel) -> Self {
        let place = |parameter: Parameter| parameter.placed(placement.clone(), ranks);
        Self { weight: place(self.weight), bias: self.bias.map(place), ..self }
    }

    /// Places its parameters for a norm of the tokens that each of `ranks` has, if there are any.
    pub(crate) fn of_tokens(self, ranks: Option<&TensorParallel>) -> Self {
        match ranks {
            Some(ranks) => self.placed(&ranks.placement_by_tokens(), ranks),
            None => self,
        }
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        [&self.weight].into_iter().chain(&self.bias)
    }

    fn check_input(&self, x: &Tensor) -> Result<()> {
        let weight = self.weight.tensor();
        let argument = Argument::new(&self.path, "input", x).float()?.on(weight.device())?;
        argument.features(weight.numel(), "hidden_size").map(drop)
    }

    /// Computes the output in high precision.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<(Tensor, NormStats)> {
        match self.forward_slot(x, &Slot::off(Encoding::E4M3))? {
            (Operand::High(y), stats) => Ok((y, stats)),
            (quantized, stats) => Ok((quantized.dequantize(x.dtype())?, stats)),
        }
    }

    /// Computes the output directly into a slot, without rounding it to a 16-bit dtype first.
    pub(crate) fn forward_slot(&self, x: &Tensor, slot: &Slot<'_>) -> Result<(Operand, NormStats)> {
        let bias = self.bias.as_ref().map(Parameter::tensor);
        Ok(ops::norm(x, self.weight.tensor(), bias, &self.options, slot)?)
    }

    pub(crate) fn backward(
        &mut self,
        cx: &Backward<'_>,
        x: &Tensor,
        stats: &NormStats,
        dy: &Tensor,
    ) -> Result<Tensor> {
        self.backward_add(cx, x, stats, dy, None)
    }

    /// Returns the gradient of the input, with `residual`, another gradient of it, added before it is rounded.
    pub(crate) fn backward_add(
        &mut self,
        cx: &Backward<'_>,
        x: &Tensor,
        stats: &NormStats,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let Self { weight, bias, options, .. } = self;
        let (gamma, recipe) = (weight.tensor().clone(), cx.lone_recipe());
        Parameter::store_in_pass(Some(weight), recipe.clone(), |dgamma| {
            Parameter::store_in_pass(bias.as_mut(), recipe, |dbeta| {
                Ok(ops::norm_backward_into(dy, x, &gamma, stats, options, residual, dgamma, dbeta)?)
            })
        })
    }

    fn module_forward(&self, cx: &Forward<'_>, x: &Tensor) -> Result<(Tensor, NormSaved)> {
        self.check_input(x)?;
        let Entered { x, input_dtype } = precision::enter(cx, &self.path, x, self.parameters())?;
        let (y, stats) = self.forward(&x)?;
        Ok((y, NormSaved { x, stats, input_dtype, layer: self.path.clone() }))
    }

    fn module_backward(&mut self, cx: &Backward<'_>, saved: &NormSaved, dy: &Tensor) -> Result<Tensor> {
        if saved.layer != self.path {
            let (layer, found) = (self.path.to_string(), format!("layer `{}`", saved.layer));
            return Err(fp8_recipe::Error::Origin { layer, found }.into());
        }
        Output::of(&saved.layer, &saved.x).check(dy)?;
        let dx = self.backward(cx, &saved.x, &saved.stats, &ops::cast(dy, saved.x.dtype())?)?;
        Ok(ops::cast(&dx, saved.input_dtype)?)
    }
}

impl Slots for NormCore {
    fn slots(&self, _f: &mut dyn FnMut(&SlotName)) {}
}

impl Layer for NormCore {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        f(&self.weight);
        self.bias.iter().for_each(f);
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(f);
    }
}

macro_rules! norm_module {
    ($layer:ident, $norm:expr) => {
        impl $layer {
            /// Creates a norm at `path`, with γ = 1.
            ///
            /// # Errors
            /// A size of 0, an ε that is not finite and greater than 0, a `params_dtype` that is not a float.
            pub fn new(path: &str, options: &NormLayerOptions, device: &Device) -> Result<Self> {
                let NormLayerOptions { hidden_size, eps, zero_centered_gamma, params_dtype, .. } = *options;
                let norm = NormOptions { normalization: $norm, eps, zero_centered_gamma };
                let norm = NormCore::new(path, hidden_size, norm, params_dtype, device)?;
                Ok(Self(norm.of_tokens(options.tensor_parallel.as_ref())))
            }

            /// Returns γ, `[hidden_size]`.
            pub fn weight(&self) -> &Parameter {
                &self.0.weight
            }

            /// Returns β, `[hidden_size]`, if the norm has one.
            pub fn bias(&self) -> Option<&Parameter> {
                self.0.bias.as_ref()
            }

            /// Normalizes `x` directly into a Linear's input slot, for
            /// [`Linear::forward_fused`](crate::Linear::forward_fused): in FP8 the normalized values are never stored in high
            /// precision. Computes in `x`'s dtype, so cast `x` to the scope's `compute_dtype` first.
            /// [`backward`](Module::backward) takes the `Saved`.
            ///
            /// # Errors
            /// An input whose shape, dtype or device does not fit.
            pub fn forward_slot(&self, x: &Tensor, slot: &Slot<'_>) -> Result<(Operand, NormSaved)> {
                self.0.check_input(x)?;
                let (y, stats) = self.0.forward_slot(x, slot)?;
                Ok((y, NormSaved { x: x.clone(), stats, input_dtype: x.dtype(), layer: self.0.path.clone() }))
            }
        }

        crate::composite!($layer { 0 });

        impl Module for $layer {
            type Saved = NormSaved;

            fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, NormSaved)> {
                cx.attempt(|cx| self.0.module_forward(cx, x))
            }

            fn is_positionwise(&self) -> bool {
                true
            }

            fn backward(
                &mut self,
                cx: &mut Backward<'_>,
                saved: NormSaved,
                dy: &Tensor,
            ) -> Result<Tensor> {
                cx.attempt(|cx| self.0.module_backward(cx, &saved, dy))
            }
        }
    };
}

norm_module!(LayerNorm, Norm::LayerNorm);
norm_module!(RmsNorm, Norm::RmsNorm);
