//! A norm and a Linear in one layer.

use crate::layer_norm::NormCore;
use crate::precision::{self, Entered};
use crate::{Linear, LinearOptions, LinearSaved, Module, NormOptions, Result, composite, init};
use fp8_kernels::ops::{self, NormStats};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;

/// Options of a [`LayerNormLinear`]. The two sizes are required; the other fields have defaults.
///
/// See [`LayerNormLinear`] for an example.
#[derive(Debug, Clone)]
pub struct LayerNormLinearOptions {
    /// The last dimension of the input. Required.
    pub in_features: usize,
    /// The last dimension of the output. Required.
    pub out_features: usize,
    /// Whether the Linear has a bias. Default: true.
    pub bias: bool,
    /// The normalization of the input. Default: `NormOptions::default()`, a LayerNorm with ε = 1e-5.
    pub norm: NormOptions,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviation of the weight's initial values, which are normally distributed with mean 0. Default:
    /// 0.023. PyTorch's `Linear` draws from a uniform distribution instead.
    pub init_std: f32,
}

impl Default for LayerNormLinearOptions {
    fn default() -> Self {
        Self {
            in_features: 0,
            out_features: 0,
            bias: true,
            norm: NormOptions::default(),
            params_dtype: DType::F32,
            init_std: 0.023,
        }
    }
}

/// A norm followed by a fully connected layer: `y = norm(x) · wᵀ + b`.
///
/// The output of the norm is quantized in the same pass that computes it. In FP8 it is never stored in high precision, and it
/// is not rounded to a 16-bit dtype first. The input is `[…, in_features]`, the output `[…, out_features]`; dtypes are
/// those of [`Linear`].
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.norm.weight` | `[in_features]` | γ = 1 |
/// | `<path>.norm.bias`, with LayerNorm | `[in_features]` | 0 |
/// | `<path>.weight` | `[out_features, in_features]` | normal with deviation `init_std` |
/// | `<path>.bias`, if asked for | `[out_features]` | 0 |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let norm = NormOptions { normalization: Norm::RmsNorm, ..Default::default() };
/// let options = LayerNormLinearOptions { in_features: 32, out_features: 16, norm, ..Default::default() };
/// let mut layer = LayerNormLinear::new("qkv", options, &device, &mut fp8_nn::rand::rng())?;
/// let names: Vec<_> = parameters(&layer).iter().map(|parameter| parameter.name().to_string()).collect();
/// assert_eq!(names, ["qkv.norm.weight", "qkv.weight", "qkv.bias"]);
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let recipe = Recipe::from(CurrentScaling::default());
/// let x = Tensor::full(0.5, [4, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.autocast_with(&recipe, |cx| layer.forward(cx, &x))?;
/// let dx = scaling.backward_with(|cx| layer.backward(cx, saved, &y))?;
/// assert_eq!((&**y.shape(), &**dx.shape()), (&[4, 16][..], &[4, 32][..]));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNormLinear {
    pub(crate) norm: NormCore,
    pub(crate) linear: Linear,
}

composite!(LayerNormLinear { norm, linear });

/// The values that the backward pass of [`LayerNormLinear`] needs.
#[derive(Debug)]
pub struct LayerNormLinearSaved {
    pub(crate) x: Tensor,
    pub(crate) stats: NormStats,
    pub(crate) linear: LinearSaved,
    pub(crate) input_dtype: DType,
}

impl LayerNormLinear {
    /// Creates a layer at `path`, with weights drawn from `rng`.
    ///
    /// # Errors
    /// A size of 0, a weight that is too large for a tensor, an ε that is not finite and greater than 0, a `params_dtype`
    /// that is not a float.
    pub fn new(
        path: &str,
        options: LayerNormLinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        Self::with_paths(&format!("{path}.norm"), path, options, device, rng)
    }

    /// Creates the layer with separate paths for norm and Linear, for layers that name their parts.
    pub(crate) fn with_paths(
        norm_path: &str,
        linear_path: &str,
        options: LayerNormLinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LayerNormLinearOptions { in_features, out_features, bias, norm, params_dtype, init_std } =
            options;
        // Checked before the norm's parameters are allocated, which are as long as the rows of the weight.
        init::check_parameter(linear_path, "weight", [out_features, in_features])?;
        let linear = LinearOptions { in_features, out_features, bias, params_dtype, init_std };
        Ok(Self {
            norm: NormCore::new(norm_path, in_features, norm, params_dtype, device)?,
            linear: Linear::new(linear_path, linear, device, rng)?,
        })
    }
}

impl Module for LayerNormLinear {
    type Saved = LayerNormLinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LayerNormLinearSaved)> {
        cx.attempt(|cx| {
            self.linear.check_input(x)?;
            let parameters = self.norm.parameters().chain(self.linear.parameters());
            let Entered { x, input_dtype } = precision::enter(cx, self.linear.path(), x, parameters)?;
            let dtype = x.dtype();
            let (y, linear, stats) =
                self.linear.forward_with(cx, dtype, dtype, |slot| self.norm.forward_slot(&x, slot))?;
            Ok((y, LayerNormLinearSaved { x, stats, linear, input_dtype }))
        })
    }

    fn is_positionwise(&self) -> bool {
        true
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            let LayerNormLinearSaved { x, stats, linear, input_dtype } = saved;
            let dn = self.linear.backward(cx, linear, dy)?;
            let dx = self.norm.backward(&x, &stats, &dn)?;
            Ok(ops::cast(&dx, input_dtype)?)
        })
    }
}
