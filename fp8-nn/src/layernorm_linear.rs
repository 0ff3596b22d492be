//! A norm whose output goes straight into a Linear's input slot: in FP8 it is never written in high precision.

use crate::layer_norm::NormCore;
use crate::precision::{self, Entered};
use crate::{Linear, LinearOptions, LinearSaved, Module, NormOptions, Result, composite, init};
use fp8_kernels::ops::{self, NormStats};
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
    /// The normalization.
    pub norm: NormOptions,
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
            norm: NormOptions::default(),
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
    pub(crate) x: Tensor,
    pub(crate) stats: NormStats,
    pub(crate) linear: LinearSaved,
    pub(crate) input_dtype: DType,
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
        let LayerNormLinearOptions { in_features, out_features, bias, norm, params_dtype, init_std } =
            options;
        // Before the norm's parameters, which are as long as the weight's rows.
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
            let mut parameters = self.norm.parameters();
            parameters.extend(self.linear.parameters());
            let Entered { x, input_dtype } = precision::enter(cx, self.linear.path(), x, &parameters)?;
            let dtype = x.dtype();
            let (y, linear, stats) =
                self.linear.forward_with(cx, dtype, dtype, |slot| self.norm.forward_slot(&x, slot))?;
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
