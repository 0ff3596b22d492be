//! A transformer block.

use crate::arguments::Output;
use crate::dropout::{Rate, Residual, ResidualSaved};
use crate::layer_norm::NormCore;
use crate::{
    AttentionOptions, Error, InitOptions, LayerNormMlp, LayerNormMlpOptions, LayerNormMlpSaved, Module,
    MultiheadAttention, MultiheadAttentionOptions, MultiheadAttentionSaved, NormOptions, Result,
    SequenceInfo, composite,
};
use fp8_kernels::ops::{self, Activation, NormStats};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// Options of a [`TransformerLayer`]. The two sizes and `attention.num_attention_heads` are required; the other fields have
/// defaults.
///
/// See [`TransformerLayer`] for an example.
#[derive(Debug, Clone)]
pub struct TransformerLayerOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// The inner dimension of the MLP, often four times `hidden_size`. Required. PyTorch's
    /// `TransformerEncoderLayer` has 2048 by default.
    pub ffn_hidden_size: usize,
    /// The heads, the mask and the positions. Required, because `num_attention_heads` is. The other defaults
    /// are causal attention without RoPE.
    pub attention: AttentionOptions,
    /// The activation of the MLP. Default: [`Activation::Gelu`], the tanh form. PyTorch's
    /// `TransformerEncoderLayer` has ReLU.
    pub activation: Activation,
    /// The normalization before the attention and before the MLP. Default: `NormOptions::default()`, a
    /// LayerNorm with ε = 1e-5.
    pub norm: NormOptions,
    /// Whether attention and MLP read the same input: `y = x + attention(norm(x)) + mlp(norm(x))`, each with a norm of its own.
    /// Not together with `output_layernorm`. Default: false.
    pub parallel_attention_mlp: bool,
    /// Whether the norm in front of the attention moves to the end of the block: `r = x + attention(x)`,
    /// `y = norm(r + mlp(norm(r)))`. Default: false.
    pub output_layernorm: bool,
    /// The probability that an element of a residual branch is dropped in training before it is added, at least 0 and less
    /// than 1. The attention has one of its own, `attention.attention_dropout`, and
    /// [`Scaling::set_dropout_seed`](crate::fp8_recipe::Scaling::set_dropout_seed) sets the seed. Default: 0.
    /// Transformer Engine's default is 0.1.
    pub hidden_dropout: f32,
    /// The probability that a residual branch is dropped in training for a whole entry of the batch (stochastic depth), at least 0
    /// and less than 1. Packed sequences are one entry. Default: 0.
    pub drop_path_rate: f32,
    /// Whether the four Linears have biases. Default: true.
    pub bias: bool,
    /// The dtype of the parameters, f32 or bf16. Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all
    /// weights.
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
            parallel_attention_mlp: false,
            output_layernorm: false,
            hidden_dropout: 0.0,
            drop_path_rate: 0.0,
            bias: true,
            params_dtype: DType::F32,
            init: InitOptions::default(),
        }
    }
}

/// A transformer block with the norms in front of attention and MLP: `r = x + attention(norm(x))`, `y = r + mlp(norm(r))`.
///
/// Its four Linears (`qkv`, `proj`, `fc1`, `fc2`) run in FP8; attention and residual additions run in high precision. Input
/// and output are `[batch, seq, hidden_size]`; dtypes are those of [`Linear`](crate::Linear). PyTorch's
/// `TransformerEncoderLayer` normalizes after the addition by default (`norm_first=False`), has dropout of 0.1 and is not causal.
///
/// With `hidden_dropout` and `drop_path_rate`, each branch is added as `x + path(hidden(branch))`, by one kernel.
///
/// Its parameters are those of [`MultiheadAttention`] with a norm, below `<path>.attention`, and those of [`LayerNormMlp`],
/// below `<path>.mlp`; with `output_layernorm`, those of the norm at the end, `<path>.norm.*`, in place of the attention's.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = TransformerLayerOptions {
///     hidden_size: 32,
///     ffn_hidden_size: 4 * 32,
///     attention: AttentionOptions { num_attention_heads: 4, rope: true, ..Default::default() },
///     norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
///     activation: Activation::Swiglu,
///     bias: false,
///     ..Default::default()
/// };
/// let mut block = TransformerLayer::new("blocks.0", options, &device, &mut fp8_nn::rand::rng())?;
/// let names: Vec<_> = parameters(&block).iter().map(|parameter| parameter.name().to_string()).collect();
/// assert_eq!(names[..3], ["blocks.0.attention.norm.weight", "blocks.0.attention.qkv.weight", "blocks.0.attention.proj.weight"]);
/// let mut scaling = Scaling::new(&block, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [2, 6, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.autocast_with(&recipe, |cx| block.forward(cx, &x))?;
/// let dx = scaling.backward_with(|cx| block.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape()), (x.shape(), x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct TransformerLayer {
    path: Arc<str>,
    attention: MultiheadAttention,
    mlp: LayerNormMlp,
    /// At the end of the block.
    norm: Option<NormCore>,
    /// Whether the MLP reads what the attention reads.
    is_parallel: bool,
    residual: Residual,
}

composite!(TransformerLayer { attention, mlp, norm });

/// The values that the backward pass of [`TransformerLayer`] needs.
#[derive(Debug)]
pub struct TransformerLayerSaved {
    attention: MultiheadAttentionSaved,
    mlp: LayerNormMlpSaved,
    /// The input of the norm at the end, and its statistics.
    normed: Option<(Tensor, NormStats)>,
    /// Of the attention and of the MLP.
    residuals: [ResidualSaved; 2],
    output: Output,
}

impl TransformerLayer {
    /// Creates a block at `path`, with weights drawn from `rng`: the attention's, then the MLP's.
    ///
    /// # Errors
    /// The errors of [`MultiheadAttention::new`] and [`LayerNormMlp::new`]; both `parallel_attention_mlp` and `output_layernorm`; a
    /// dropout outside `[0, 1)`.
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
            parallel_attention_mlp,
            output_layernorm,
            hidden_dropout,
            drop_path_rate,
            bias,
            params_dtype,
            init,
        } = options;
        let residual = Residual {
            hidden: Rate::new(path, "hidden_dropout", hidden_dropout)?,
            path: Rate::new(path, "drop_path_rate", drop_path_rate)?,
        };
        if parallel_attention_mlp && output_layernorm {
            let (layer, value) = (path.to_owned(), "true".to_owned());
            let remedy = "not together with output_layernorm: set one of the two".to_owned();
            return Err(Error::Option { layer, option: "parallel_attention_mlp", value, remedy });
        }
        let input_layernorm = (!output_layernorm).then_some(norm);
        let output_norm = || NormCore::new(&format!("{path}.norm"), hidden_size, norm, params_dtype, device);
        let attention =
            MultiheadAttentionOptions { hidden_size, attention, input_layernorm, bias, params_dtype, init };
        let mlp =
            LayerNormMlpOptions { hidden_size, ffn_hidden_size, bias, activation, norm, params_dtype, init };
        Ok(Self {
            path: path.into(),
            attention: MultiheadAttention::new(&format!("{path}.attention"), attention, device, rng)?,
            mlp: LayerNormMlp::new(&format!("{path}.mlp"), mlp, device, rng)?,
            norm: output_layernorm.then(output_norm).transpose()?,
            is_parallel: parallel_attention_mlp,
            residual,
        })
    }
}

impl Module for TransformerLayer {
    type Saved = TransformerLayerSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, TransformerLayerSaved)> {
        self.forward_with(cx, x, &SequenceInfo::default())
    }

    fn forward_with(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, TransformerLayerSaved)> {
        cx.attempt(|cx| {
            self.attention.check_input(&self.path, x, info)?;
            let (a, attention) = self.attention.forward_with(cx, x, info)?;
            let (r, of_attention) = self.residual.add(cx, &ops::cast(x, a.dtype())?, &a)?;
            let (m, mlp) = self.mlp.forward(cx, if self.is_parallel { x } else { &r })?;
            let (y, of_mlp) = self.residual.add(cx, &r, &m)?;
            let (y, normed) = match &self.norm {
                Some(norm) => {
                    let (normed, stats) = norm.forward(&y)?;
                    (normed, Some((y, stats)))
                }
                None => (y, None),
            };
            let output = Output::of(&self.path, &y);
            let residuals = [of_attention, of_mlp];
            Ok((y, TransformerLayerSaved { attention, mlp, normed, residuals, output }))
        })
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: TransformerLayerSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            saved.output.check(dy)?;
            saved.output.expect_layer(&self.path)?;
            let normed = match (&mut self.norm, &saved.normed) {
                (Some(norm), Some((x, stats))) => {
                    Some(norm.backward(x, stats, &ops::cast(dy, x.dtype())?)?)
                }
                _ => None,
            };
            let dy = normed.as_ref().unwrap_or(dy);
            let [of_attention, of_mlp] = &saved.residuals;
            let dm = self.mlp.backward(cx, saved.mlp, &of_mlp.backward(dy)?)?;
            if self.is_parallel {
                let dx = self.attention.backward(cx, saved.attention, &of_attention.backward(dy)?)?;
                return Ok(ops::add(&ops::add(&dx, &dm)?, &ops::cast(dy, dx.dtype())?)?);
            }
            let dr = ops::add(dy, &dm)?;
            let dx = self.attention.backward(cx, saved.attention, &of_attention.backward(&dr)?)?;
            Ok(ops::add(&dx, &ops::cast(&dr, dx.dtype())?)?)
        })
    }
}
