//! A pre-norm transformer block: `r = x + attention(norm(x))`, `y = r + mlp(norm(r))`.

use crate::arguments::Output;
use crate::{
    AttentionOptions, InitOptions, LayerNormMlp, LayerNormMlpOptions, LayerNormMlpSaved, Module,
    MultiheadAttention, MultiheadAttentionOptions, MultiheadAttentionSaved, NormOptions, Result, composite,
};
use fp8_kernels::ops::{self, Activation};
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
    /// Heads, mask and positions.
    pub attention: AttentionOptions,
    /// The MLP's function.
    pub activation: Activation,
    /// The normalization before the attention and before the MLP.
    pub norm: NormOptions,
    /// Whether the Linears have biases.
    pub bias: bool,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// The initial weights.
    pub init: InitOptions,
}

impl Default for TransformerLayerOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            ffn_hidden_size: 0,
            attention: AttentionOptions::default(),
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            bias: true,
            params_dtype: DType::F32,
            init: InitOptions::default(),
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
        let TransformerLayerOptions {
            hidden_size,
            ffn_hidden_size,
            attention,
            activation,
            norm,
            bias,
            params_dtype,
            init,
        } = options;
        let input_layernorm = Some(norm);
        let attention =
            MultiheadAttentionOptions { hidden_size, attention, input_layernorm, bias, params_dtype, init };
        let mlp =
            LayerNormMlpOptions { hidden_size, ffn_hidden_size, bias, activation, norm, params_dtype, init };
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
