//! A pre-norm transformer block: `r = x + attention(norm(x))`, `y = r + mlp(norm(r))`.

use crate::arguments::Output;
use crate::{
    LayerNormMlp, LayerNormMlpOptions, LayerNormMlpSaved, Module, MultiheadAttention,
    MultiheadAttentionOptions, MultiheadAttentionSaved, Result, composite,
};
use fp8_kernels::ops::{self, Activation, Norm};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// How a [`TransformerLayer`] is made. Sizes have no default.
#[derive(Debug, Clone)]
pub struct TransformerLayerOptions {
    /// The input's and output's last dimension.
    pub hidden_size: usize,
    /// The MLP's inner dimension.
    pub ffn_hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; `None`: as many as query heads.
    pub num_gqa_groups: Option<usize>,
    /// Size of a head; `None`: `hidden_size / num_attention_heads`.
    pub kv_channels: Option<usize>,
    /// Whether a position sees only itself and those before it.
    pub causal: bool,
    /// Whether queries and keys are rotated by their position.
    pub rope: bool,
    /// RoPE's base.
    pub rope_base: f64,
    /// The longest sequence that RoPE has angles for.
    pub max_seq_length: usize,
    /// The MLP's function.
    pub activation: Activation,
    /// LayerNorm or RMSNorm.
    pub normalization: Norm,
    /// The norms' ε.
    pub eps: f32,
    /// Whether stored norm weights are γ − 1.
    pub zero_centered_gamma: bool,
    /// Whether the Linears have biases.
    pub bias: bool,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// Standard deviation of initial weights.
    pub init_std: f32,
    /// Standard deviation of proj's and fc2's initial weights.
    pub output_layer_init_std: f32,
}

impl Default for TransformerLayerOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            ffn_hidden_size: 0,
            num_attention_heads: 0,
            num_gqa_groups: None,
            kv_channels: None,
            causal: true,
            rope: false,
            rope_base: 10_000.0,
            max_seq_length: 2048,
            activation: Activation::Gelu,
            normalization: Norm::LayerNorm,
            eps: 1e-5,
            zero_centered_gamma: false,
            bias: true,
            params_dtype: DType::F32,
            init_std: 0.023,
            output_layer_init_std: 0.023,
        }
    }
}

/// See the module's text. Parameters below `<path>`: `attention.*`, `mlp.*`.
#[derive(Debug)]
pub struct TransformerLayer {
    path: Arc<str>,
    attention: MultiheadAttention,
    mlp: LayerNormMlp,
}

composite!(TransformerLayer { attention, mlp });

/// What its backward needs.
#[derive(Debug)]
pub struct TransformerLayerSaved {
    attention: MultiheadAttentionSaved,
    mlp: LayerNormMlpSaved,
    output: Output,
}

impl TransformerLayer {
    /// A layer at `path`.
    ///
    /// # Errors
    /// Those of its attention and MLP.
    pub fn new(
        path: &str,
        options: TransformerLayerOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let o = options;
        let attention = MultiheadAttentionOptions {
            hidden_size: o.hidden_size,
            num_attention_heads: o.num_attention_heads,
            num_gqa_groups: o.num_gqa_groups,
            kv_channels: o.kv_channels,
            causal: o.causal,
            rope: o.rope,
            rope_base: o.rope_base,
            max_seq_length: o.max_seq_length,
            input_layernorm: true,
            normalization: o.normalization,
            eps: o.eps,
            zero_centered_gamma: o.zero_centered_gamma,
            bias: o.bias,
            params_dtype: o.params_dtype,
            init_std: o.init_std,
            output_layer_init_std: o.output_layer_init_std,
        };
        let mlp = LayerNormMlpOptions {
            hidden_size: o.hidden_size,
            ffn_hidden_size: o.ffn_hidden_size,
            bias: o.bias,
            activation: o.activation,
            normalization: o.normalization,
            eps: o.eps,
            zero_centered_gamma: o.zero_centered_gamma,
            params_dtype: o.params_dtype,
            init_std: o.init_std,
            output_layer_init_std: o.output_layer_init_std,
        };
        Ok(Self {
            path: path.into(),
            attention: MultiheadAttention::new(&format!("{path}.attention"), attention, device, rng)?,
            mlp: LayerNormMlp::new(&format!("{path}.mlp"), mlp, device, rng)?,
        })
    }

    /// With padding, as [`MultiheadAttention::forward_padded`].
    ///
    /// # Errors
    /// As [`MultiheadAttention::forward_padded`].
    pub fn forward_padded(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        key_lengths: Option<&Tensor>,
    ) -> Result<(Tensor, TransformerLayerSaved)> {
        cx.attempt(|cx| {
            self.attention.check_input(&self.path, x, key_lengths)?;
            let (a, attention) = self.attention.forward_padded(cx, x, key_lengths)?;
            let r = ops::add(&ops::cast(x, a.dtype())?, &a)?;
            let (m, mlp) = self.mlp.forward(cx, &r)?;
            let y = ops::add(&r, &m)?;
            let output = Output::of(&self.path, &y);
            Ok((y, TransformerLayerSaved { attention, mlp, output }))
        })
    }
}

impl Module for TransformerLayer {
    type Saved = TransformerLayerSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, TransformerLayerSaved)> {
        self.forward_padded(cx, x, None)
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: TransformerLayerSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            saved.output.check(dy)?;
            let dr = ops::add(dy, &self.mlp.backward(cx, saved.mlp, dy)?)?;
            let dx = self.attention.backward(cx, saved.attention, &dr)?;
            Ok(ops::add(&dx, &ops::cast(&dr, dx.dtype())?)?)
        })
    }
}
