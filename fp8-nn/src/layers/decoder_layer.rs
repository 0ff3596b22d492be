//! A transformer block that also attends to an encoder's output.

use super::residual::{Residual, ResidualSaved};
use crate::arguments::Output;
use crate::dropout::Rate;
use crate::{
    AttentionOptions, CrossAttention, CrossAttentionOptions, CrossAttentionSaved, InitOptions, LayerNormMlp,
    LayerNormMlpOptions, LayerNormMlpSaved, MultiheadAttention, MultiheadAttentionOptions,
    MultiheadAttentionSaved, NormOptions, Result, SequenceInfo, composite,
};
use fp8_kernels::ops::{Activation, Sequences};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// Options of a [`TransformerDecoderLayer`]. The two sizes and the heads of both attentions are required; the other fields have
/// defaults.
///
/// See [`TransformerDecoderLayer`] for an example.
#[derive(Debug, Clone)]
pub struct TransformerDecoderLayerOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// The inner dimension of the MLP, often four times `hidden_size`. Required.
    pub ffn_hidden_size: usize,
    /// The last dimension of the encoder's output. Default: `None`, which is `hidden_size`.
    pub encoder_hidden_size: Option<usize>,
    /// The self-attention. Required, because `num_attention_heads` is. The other defaults are causal attention without RoPE.
    pub attention: AttentionOptions,
    /// The cross attention. Default: `None`, the heads and the scale of `attention`, without a mask.
    pub cross_attention: Option<AttentionOptions>,
    /// The activation of the MLP. Default: [`Activation::Gelu`], the tanh form.
    pub activation: Activation,
    /// The normalization before each of the three parts. Default: `NormOptions::default()`, a LayerNorm with ε = 1e-5.
    pub norm: NormOptions,
    /// The probability that an element of a residual branch is dropped in training, at least 0 and less than 1: see
    /// [`TransformerLayerOptions::hidden_dropout`](crate::TransformerLayerOptions::hidden_dropout). Default: 0.
    pub hidden_dropout: f32,
    /// The probability that a residual branch is dropped in training for a whole entry of the batch, at least 0 and less than 1.
    /// Default: 0.
    pub drop_path_rate: f32,
    /// Whether the residual additions and the output are f32: see
    /// [`TransformerLayerOptions::fp32_residual_connection`](crate::TransformerLayerOptions::fp32_residual_connection). Default:
    /// false.
    pub fp32_residual_connection: bool,
    /// Whether the Linears have biases. Default: true.
    pub bias: bool,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all weights.
    pub init: InitOptions,
}

impl Default for TransformerDecoderLayerOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            ffn_hidden_size: 0,
            encoder_hidden_size: None,
            attention: AttentionOptions::default(),
            cross_attention: None,
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            hidden_dropout: 0.0,
            drop_path_rate: 0.0,
            fp32_residual_connection: false,
            bias: true,
            params_dtype: DType::F32,
            init: InitOptions::default(),
        }
    }
}

/// A block of a decoder that attends to an encoder's output `e`: `r = x + attention(norm(x))`, `s = r + cross(norm(r), e)`,
/// `y = s + mlp(norm(s))`.
///
/// Its Linears run in FP8; attention and residual additions run in high precision. Input and output are
/// `[batch, seq, hidden_size]`, the encoder's output is `[batch, keys, encoder_hidden_size]`. Transformer Engine's
/// `TransformerLayer` does this with `layer_type="decoder"`.
///
/// Its parameters are those of [`MultiheadAttention`] with a norm, below `<path>.attention`, of [`CrossAttention`] with a norm,
/// below `<path>.cross_attention`, and of [`LayerNormMlp`], below `<path>.mlp`.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = TransformerDecoderLayerOptions {
///     hidden_size: 32,
///     ffn_hidden_size: 64,
///     attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
///     ..Default::default()
/// };
/// let mut block = TransformerDecoderLayer::new("decoder.0", options, &device, &mut fp8_nn::rand::rng())?;
/// let mut scaling = Scaling::new(&block, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [2, 3, 32], DType::F32, &device)?;
/// let encoder_output = Tensor::full(0.25, [2, 7, 32], DType::F32, &device)?;
/// // Only the first five keys of the second batch entry are real.
/// let lengths = Tensor::from_vec(vec![7i32, 5], [2], &device)?;
/// let (own, cross) = (SequenceInfo::default(), Sequences::padded(&lengths));
/// let forward = |cx: &mut Forward<'_>| block.forward(cx, &x, &encoder_output, &own, &cross);
/// let (y, saved) = scaling.in_autocast(&recipe, forward)?;
/// let (dx, de) = scaling.in_backward(|cx| block.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape(), de.shape()), (x.shape(), x.shape(), encoder_output.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct TransformerDecoderLayer {
    path: Arc<str>,
    attention: MultiheadAttention,
    cross_attention: CrossAttention,
    mlp: LayerNormMlp,
    residual: Residual,
}

composite!(TransformerDecoderLayer { attention, cross_attention, mlp; skip path, residual });

/// The values that the backward pass of [`TransformerDecoderLayer`] needs.
#[derive(Debug)]
pub struct TransformerDecoderLayerSaved {
    attention: MultiheadAttentionSaved,
    cross_attention: CrossAttentionSaved,
    mlp: LayerNormMlpSaved,
    /// The dropout masks of the residual additions of the three parts.
    residuals: [ResidualSaved; 3],
    output: Output,
}

impl TransformerDecoderLayer {
    /// Creates a block at `path`, with weights drawn from `rng`: the attention's, the cross attention's, then the MLP's.
    ///
    /// # Errors
    /// The errors of [`MultiheadAttention::new`], [`CrossAttention::new`] and [`LayerNormMlp::new`].
    pub fn new(
        path: &str,
        options: TransformerDecoderLayerOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let TransformerDecoderLayerOptions {
            hidden_size,
            ffn_hidden_size,
            encoder_hidden_size,
            attention,
            cross_attention,
            activation,
            norm,
            hidden_dropout,
            drop_path_rate,
            fp32_residual_connection,
            bias,
            params_dtype,
            init,
        } = options;
        let cross = cross_attention.unwrap_or(AttentionOptions {
            num_attention_heads: attention.num_attention_heads,
            num_gqa_groups: attention.num_gqa_groups,
            kv_channels: attention.kv_channels,
            softmax_scale: attention.softmax_scale,
            causal: false,
            ..Default::default()
        });
        let input_layernorm = Some(norm);
        let attention = MultiheadAttentionOptions {
            hidden_size,
            attention,
            input_layernorm,
            bias,
            params_dtype,
            init,
            ..Default::default()
        };
        let cross = CrossAttentionOptions {
            hidden_size,
            encoder_hidden_size,
            attention: cross,
            input_layernorm,
            bias,
            params_dtype,
            init,
        };
        let mlp = LayerNormMlpOptions {
            hidden_size,
            ffn_hidden_size,
            bias,
            activation,
            norm,
            params_dtype,
            init,
            ..Default::default()
        };
        let cross_path = format!("{path}.cross_attention");
        Ok(Self {
            path: path.into(),
            attention: MultiheadAttention::new(&format!("{path}.attention"), attention, device, rng)?,
            cross_attention: CrossAttention::new(&cross_path, cross, device, rng)?,
            mlp: LayerNormMlp::new(&format!("{path}.mlp"), mlp, device, rng)?,
            residual: Residual {
                hidden: Rate::new(path, "hidden_dropout", hidden_dropout)?,
                path: Rate::new(path, "drop_path_rate", drop_path_rate)?,
                is_f32: fp32_residual_connection,
                params_dtype,
            },
        })
    }

    /// Returns the output for an input and an encoder's output, and the value that [`backward`](Self::backward) takes. `own` says
    /// which positions of the input are real and belong together, `cross` which of them see which positions of the encoder.
    ///
    /// # Errors
    /// An input or encoder's output whose shape, dtype or device does not fit; `own` or `cross` that do not fit them; a layer that
    /// the scope's `Scaling` does not know.
    pub fn forward(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        encoder_output: &Tensor,
        own: &SequenceInfo,
        cross: &Sequences,
    ) -> Result<(Tensor, TransformerDecoderLayerSaved)> {
        cx.attempt(|cx| {
            let residual = &self.residual;
            self.attention.check_input(&self.path, x, own)?;
            self.cross_attention.check_inputs(&self.path, x, encoder_output, cross)?;
            let encoder_output = residual.input_of_branch(cx, encoder_output)?;
            let input = residual.input_of_branch(cx, x)?;
            let addend = residual.addend(cx, x, input.dtype())?;
            let (a, attention) = self.attention.cached(cx, &input, own, None, addend.as_ref())?;
            let (r, of_attention) = residual.add(cx, x, a, addend.is_some())?;
            let input = residual.input_of_branch(cx, &r)?;
            let addend = residual.addend(cx, &r, input.dtype())?;
            let layer = &self.cross_attention;
            let (c, cross_attention) =
                layer.forward_adding(cx, &input, &encoder_output, cross, addend.as_ref())?;
            let (s, of_cross) = residual.add(cx, &r, c, addend.is_some())?;
            let input = residual.input_of_branch(cx, &s)?;
            let addend = residual.addend(cx, &s, input.dtype())?;
            let (m, mlp) = self.mlp.forward_adding(cx, &input, addend.as_ref())?;
            let (y, of_mlp) = residual.add(cx, &s, m, addend.is_some())?;
            let residuals = [of_attention, of_cross, of_mlp];
            let output = Output::of(&self.path, &y);
            Ok((y, TransformerDecoderLayerSaved { attention, cross_attention, mlp, residuals, output }))
        })
    }

    /// Returns the gradients of the input and of the encoder's output, and adds those of the parameters to their `main_grad`.
    ///
    /// # Errors
    /// Those of [`Module::backward`](crate::Module::backward).
    pub fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: TransformerDecoderLayerSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        cx.attempt(|cx| {
            saved.output.check(dy)?;
            saved.output.expect_layer(&self.path)?;
            let residual = &self.residual;
            let [of_attention, of_cross, of_mlp] = &saved.residuals;
            let dm = of_mlp.backward(dy)?;
            let ds = self.mlp.backward_around(cx, saved.mlp, &dm, residual.around(dy))?;
            let (dc, around) = (of_cross.backward(&ds)?, residual.around(&ds));
            let cross = &mut self.cross_attention;
            let (dr, de) = cross.backward_around(cx, saved.cross_attention, &dc, Some(around))?;
            let (da, around) = (of_attention.backward(&dr)?, residual.around(&dr));
            Ok((self.attention.backward_around(cx, saved.attention, &da, around)?, de))
        })
    }
}
