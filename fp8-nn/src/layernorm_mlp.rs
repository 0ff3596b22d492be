//! norm → fc1 → activation → fc2, with the activation fused into fc2's quantization and its backward into fc1's.
//!
//! Gated activations double fc1's rows: the activated half first, the linear half second.

use crate::arguments::{Argument, Output};
use crate::{
    Error, InitOptions, LayerNormLinear, LayerNormLinearOptions, LayerNormLinearSaved, Linear, LinearOptions,
    LinearSaved, Module, NormOptions, Result, composite, init,
};
use fp8_kernels::ops::{self, Activation};
use fp8_kernels::{DType, Device, Slot, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// How a [`LayerNormMlp`] is made. Sizes have no default.
#[derive(Debug, Clone)]
pub struct LayerNormMlpOptions {
    /// The input's and output's last dimension.
    pub hidden_size: usize,
    /// The dimension in between.
    pub ffn_hidden_size: usize,
    /// Whether the Linears have biases.
    pub bias: bool,
    /// The function in between.
    pub activation: Activation,
    /// The normalization.
    pub norm: NormOptions,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// The initial weights.
    pub init: InitOptions,
}

impl Default for LayerNormMlpOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            ffn_hidden_size: 0,
            bias: true,
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            params_dtype: DType::F32,
            init: InitOptions::default(),
        }
    }
}

/// See the module's text. Parameters below `<path>`: `norm.*`, `fc1.*`, `fc2.*`.
#[derive(Debug)]
pub struct LayerNormMlp {
    path: Arc<str>,
    fc1: LayerNormLinear,
    fc2: Linear,
    activation: Activation,
}

composite!(LayerNormMlp { fc1, fc2 });

/// What its backward needs.
#[derive(Debug)]
pub struct LayerNormMlpSaved {
    fc1: LayerNormLinearSaved,
    h: Tensor,
    fc2: LinearSaved,
    output: Output,
}

impl LayerNormMlp {
    /// A layer at `path`.
    ///
    /// # Errors
    /// A size of 0, an ε out of range, a dtype other than f32 and bf16.
    pub fn new(
        path: &str,
        options: LayerNormMlpOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LayerNormMlpOptions { hidden_size, ffn_hidden_size, bias, activation, norm, params_dtype, init } =
            options;
        init::check_positive(path, &[("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)])?;
        let halves = if activation.is_gated() { 2 } else { 1 };
        let out_features = ffn_hidden_size.checked_mul(halves).ok_or_else(|| Error::Option {
            layer: path.to_owned(),
            option: "ffn_hidden_size",
            value: ffn_hidden_size.to_string(),
            remedy: "twice this many rows do not fit into memory".to_owned(),
        })?;
        init::check_parameter(&format!("{path}.fc2"), "weight", [hidden_size, ffn_hidden_size])?;
        let fc1 = LayerNormLinearOptions {
            in_features: hidden_size,
            out_features,
            bias,
            norm,
            params_dtype,
            init_std: init.init_std,
        };
        let fc2 = LinearOptions {
            in_features: ffn_hidden_size,
            out_features: hidden_size,
            bias,
            params_dtype,
            init_std: init.output_layer_init_std,
        };
        let (norm_path, fc1_path) = (format!("{path}.norm"), format!("{path}.fc1"));
        Ok(Self {
            path: path.into(),
            fc1: LayerNormLinear::with_paths(&norm_path, &fc1_path, fc1, device, rng)?,
            fc2: Linear::new(&format!("{path}.fc2"), fc2, device, rng)?,
            activation,
        })
    }
}

impl Module for LayerNormMlp {
    type Saved = LayerNormMlpSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LayerNormMlpSaved)> {
        cx.attempt(|cx| {
            let weight = self.fc2.weight().tensor();
            let [hidden_size, _] = weight.shape().matrix();
            let argument = Argument::new(&self.path, "input", x).float()?.on(weight.device())?;
            argument.features(hidden_size, "hidden_size")?;
            let (h, fc1) = self.fc1.forward(cx, x)?;
            let activation = |slot: &Slot<'_>| Ok(ops::activation(&h, self.activation, slot)?);
            let (y, fc2) = self.fc2.forward_fused(cx, h.dtype(), activation)?;
            let output = Output::of(&self.path, &y);
            Ok((y, LayerNormMlpSaved { fc1, h, fc2, output }))
        })
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LayerNormMlpSaved, dy: &Tensor) -> Result<Tensor> {
        cx.attempt(|cx| {
            let LayerNormMlpSaved { fc1, h, fc2, output } = saved;
            output.check(dy)?;
            let da = self.fc2.backward(cx, fc2, dy)?;
            let activation = self.activation;
            self.fc1.backward_fused(cx, fc1, |slot| {
                let (dh, db) = ops::activation_backward_quantize_dbias(&da, &h, activation, slot)?;
                Ok((dh, Some(db)))
            })
        })
    }
}
