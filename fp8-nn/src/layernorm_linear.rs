//! A norm whose output goes straight into a Linear's input slot: in FP8 it is never written in high precision.

use crate::layer_norm::NormCore;
use crate::linear::Quantized;
use crate::precision::{self, Entered};
use crate::{Linear, LinearOptions, LinearSaved, Module, NormLayerOptions, Result, composite, init};
use fp8_kernels::ops::{self, Norm, NormStats};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;

/// How a [`LayerNormLinear`] is made. Sizes have no default.
#[derive(Debug, Clone)]
pub struct LayerNormLinearOptions {
    /// The input's last dimension.
    pub in_features: usize,
    /// The output's last dimension.
    pub out_features: usize,
    /// Whether the Linear has a bias.
    pub bias: bool,
    /// LayerNorm or RMSNorm.
    pub normalization: Norm,
    /// The norm's ε.
    pub eps: f32,
    /// Whether the stored norm weight is γ − 1.
    pub zero_centered_gamma: bool,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// Standard deviation of the weight's initial values.
    pub init_std: f32,
}

impl Default for LayerNormLinearOptions {
    fn default() -> Self {
        Self {
            in_features: 0,
            out_features: 0,
            bias: true,
            normalization: Norm::LayerNorm,
            eps: 1e-5,
            zero_centered_gamma: false,
            params_dtype: DType::F32,
            init_std: 0.023,
        }
    }
}

/// `y = norm(x) · wᵀ + b`. Parameters: `<path>.norm.weight`, `<path>.norm.bias`, `<path>.weight`, `<path>.bias`.
#[derive(Debug)]
pub struct LayerNormLinear {
    pub(crate) norm: NormCore,
    pub(crate) linear: Linear,
}

composite!(LayerNormLinear { norm, linear });

/// What its backward needs.
#[derive(Debug)]
pub struct LayerNormLinearSaved {
    x: Tensor,
    stats: NormStats,
    pub(crate) linear: LinearSaved,
    input_dtype: DType,
}

impl LayerNormLinear {
    /// A layer at `path`.
    ///
    /// # Errors
    /// A size of 0, an ε out of range, a dtype other than f32 and bf16.
    pub fn new(
        path: &str,
        options: LayerNormLinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        Self::with_paths(&format!("{path}.norm"), path, options, device, rng)
    }

    /// With the norm's path beside the Linear's, as in layers that name their parts.
    pub(crate) fn with_paths(
        norm_path: &str,
        linear_path: &str,
        options: LayerNormLinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LayerNormLinearOptions { in_features, out_features, bias, params_dtype, init_std, .. } = options;
        // Before the norm's parameters, which are as long as the weight's rows.
        init::check_parameter(linear_path, "weight", [out_features, in_features])?;
        let norm = NormLayerOptions {
            hidden_size: in_features,
            eps: options.eps,
            zero_centered_gamma: options.zero_centered_gamma,
            params_dtype,
        };
        let linear = LinearOptions { in_features, out_features, bias, params_dtype, init_std };
        Ok(Self {
            norm: NormCore::new(norm_path, options.normalization, &norm, device)?,
            linear: Linear::new(linear_path, linear, device, rng)?,
        })
    }

    /// From a gradient that a fused operation may have quantized.
    pub(crate) fn backward_quantized(
        &mut self,
        cx: &Backward<'_>,
        saved: LayerNormLinearSaved,
        dy: &Quantized,
        db: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dn = self.linear.backward_quantized(cx, saved.linear, dy, db)?;
        let dx = self.norm.backward(&saved.x, &saved.stats, &dn)?;
        Ok(ops::cast(&dx, saved.input_dtype)?)
    }
}

impl Module for LayerNormLinear {
    type Saved = LayerNormLinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LayerNormLinearSaved)> {
        cx.attempt(|cx| {
            self.linear.check_input(x)?;
            let mut parameters = self.norm.parameters();
            parameters.extend(self.linear.parameters());
            let Entered { x, input_dtype } = precision::enter(cx, self.linear.path(), x, &parameters)?;
            let (normed, stats) = self.norm.forward_quantized(cx, &x, &self.linear.slots.input)?;
            let (y, linear) = self.linear.forward_quantized(cx, &normed, x.dtype(), x.dtype())?;
            Ok((y, LayerNormLinearSaved { x, stats, linear, input_dtype }))
        })
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
