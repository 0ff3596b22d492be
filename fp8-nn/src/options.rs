//! Options that several layers share.

use crate::{Error, Result};
use fp8_kernels::ops::{self, Diagonal, RopeScaling};
use std::fmt;
use std::str::FromStr;

pub use fp8_kernels::ops::NormOptions;

/// The heads of an attention layer, its mask and its positions.
///
/// [`MultiheadAttention`](crate::MultiheadAttention) and [`TransformerLayer`](crate::TransformerLayer) take it. The options of
/// the operation [`ops::attention`] are [`ops::ScoreOptions`].
///
/// | field | default |
/// |---|---|
/// | `num_attention_heads` | none: required |
/// | `num_gqa_groups` | `None`: as many as `num_attention_heads` |
/// | `kv_channels` | `None`: `hidden_size / num_attention_heads` |
/// | `causal` | true; PyTorch's `MultiheadAttention` sees all positions unless it is given a mask |
/// | `window` | `(None, None)`: no limit |
/// | `diagonal` | `Diagonal::TopLeft` |
/// | `softmax_scale` | `None`: 1/√head size |
/// | `attention_dropout` | 0; Transformer Engine's is 0.1 |
/// | `rope` | false |
/// | `rope_base` | 10 000 |
/// | `rope_scaling` | `RopeScaling::None` |
/// | `qk_norm` | `None` |
/// | `max_seq_length` | 2048, used only with `rope` |
/// | `fp8_dpa`, `fp8_mha` | `None`: the recipe decides; its own default is high precision |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let grouped = AttentionOptions { num_attention_heads: 8, num_gqa_groups: Some(2), rope: true, ..Default::default() };
/// assert!(grouped.causal);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions {
    /// The number of query heads. Required.
    pub num_attention_heads: usize,
    /// The number of key and value heads, a divisor of `num_attention_heads`. Default: `None`, one for each
    /// query head.
    pub num_gqa_groups: Option<usize>,
    /// The size of a head. Default: `None`, which is `hidden_size / num_attention_heads`.
    pub kv_channels: Option<usize>,
    /// Whether a position sees only itself and the positions before it. Default: true. PyTorch's
    /// `MultiheadAttention` attends to all positions unless it is given a mask.
    pub causal: bool,
    /// The number of positions to its left and to its right that a position sees, `(left, right)`: a sliding window. `None`
    /// is no limit; `causal` makes the right end 0. Transformer Engine's `window_size` is `(left, right)` with −1 for no
    /// limit. Default: `(None, None)`.
    pub window: (Option<usize>, Option<usize>),
    /// The place of the diagonal of `causal` and `window` if queries and keys differ in number: in padded self-attention,
    /// and in cross attention. Transformer Engine's `causal_bottom_right` is `Diagonal::BottomRight`. Default:
    /// [`Diagonal::TopLeft`].
    pub diagonal: Diagonal,
    /// The factor for scores. Default: `None`, which is 1/√(size of a head).
    pub softmax_scale: Option<f32>,
    /// The probability that an attention probability is dropped in training, at least 0 and less than 1. Default: 0.
    /// Transformer Engine's default is 0.1. [`Scaling::set_dropout_seed`](crate::fp8_recipe::Scaling::set_dropout_seed) sets
    /// the seed.
    pub attention_dropout: f32,
    /// Whether the backward pass sums the gradient of each query in a fixed order, so that equal steps give equal bits. If false,
    /// cuDNN may sum in any order, and two runs of the same training differ. This matters on GPUs for which cuDNN has no kernel
    /// with a fixed order, where this library's kernels are used otherwise ([`ops::ScoreOptions::deterministic`]). Default: true.
    pub deterministic: bool,
    /// Whether queries and keys are rotated by their position (RoPE over the whole head, in the rotate-half
    /// form). Default: false.
    pub rope: bool,
    /// The base of RoPE's frequencies. Default: 10000.
    pub rope_base: f64,
    /// The scaling of RoPE's frequencies for longer sequences. Default: [`RopeScaling::None`].
    pub rope_scaling: RopeScaling,
    /// The normalization of each head of queries and keys before RoPE, as in Qwen3: RMSNorm or LayerNorm over the size of a head,
    /// with weights that all heads share. Transformer Engine's `qk_norm_type`. Default: `None`.
    pub qk_norm: Option<NormOptions>,
    /// The longest sequence that RoPE has angles for. Without `rope`, sequences have any length. Default: 2048.
    pub max_seq_length: usize,
    /// Whether the attention itself runs in FP8 ([`ops::attention_fp8`]): queries, keys, values and the gradient of the output
    /// are quantized by slots of their own, after RoPE; probabilities and the scores' gradients by the operation. Default: `None`,
    /// as the recipe says ([`DelayedScaling::fp8_dpa`], [`CurrentScaling::fp8_dpa`]; false if it has no such option). `Some(false)`
    /// rules FP8 out.
    ///
    /// It takes recipes with one scale for a tensor, delayed and current scaling. Where a recipe has scales for rows or blocks, or
    /// leaves one of these slots in high precision, the attention runs in high precision, and
    /// [`Scaling::explain`](crate::fp8_recipe::Scaling::explain) says so. Under a recipe by name, each slot follows the options of
    /// its own recipe.
    ///
    /// [`DelayedScaling::fp8_dpa`]: crate::fp8_recipe::DelayedScaling::fp8_dpa
    /// [`CurrentScaling::fp8_dpa`]: crate::fp8_recipe::CurrentScaling::fp8_dpa
    pub fp8_dpa: Option<bool>,
    /// Whether the attention runs in FP8 and exchanges FP8 with its projections. It implies `fp8_dpa`, as in Transformer Engine.
    /// Default: `None`, as the recipe says, unless `fp8_dpa` is `Some(false)`.
    ///
    /// - Without RoPE, the projection before the attention quantizes its output ([`ops::fprop_quantize`]) with a slot of its own,
    ///   `<projection>.output`, and the attention reads queries, keys and values out of these codes. RoPE needs values: with it, the
    ///   slots of `fp8_dpa` quantize them afterwards.
    /// - In backward, dgrad of the projection behind the attention quantizes the gradient of the attention's output
    ///   ([`ops::dgrad_quantize`]) with a slot of its own, `<projection>.grad_input`.
    ///
    /// Both round once, from f32 to FP8. The attention's output is needed in backward and stays in high precision; the projection
    /// behind it quantizes it with its `input` slot in any case. Where one of these slots is off or has scales for rows or blocks,
    /// its tensor stays in high precision, and so does the attention, in the passes that read it. Recipes of Transformer Engine
    /// without delayed scaling leave the output of the projection in high precision; here it is quantized under current scaling,
    /// too.
    pub fp8_mha: Option<bool>,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self {
            num_attention_heads: 0,
            num_gqa_groups: None,
            kv_channels: None,
            causal: true,
            window: (None, None),
            diagonal: Diagonal::TopLeft,
            softmax_scale: None,
            attention_dropout: 0.0,
            deterministic: true,
            rope: false,
            rope_base: 10_000.0,
            rope_scaling: RopeScaling::None,
            qk_norm: None,
            max_seq_length: 2048,
            fp8_dpa: None,
            fp8_mha: None,
        }
    }
}

impl AttentionOptions {
    /// The mask and the scale as the operation takes them.
    pub(crate) fn operation(&self) -> ops::ScoreOptions<'static> {
        let Self { causal, window, diagonal, softmax_scale, deterministic, .. } = *self;
        ops::ScoreOptions { causal, window, diagonal, softmax_scale, deterministic, ..Default::default() }
    }
}

/// The part of a transformer block that backward recomputes instead of keeping it. Each level includes those before it, and
/// needs less memory and more time.
///
/// Results are the same at each level, bit for bit: what was quantized is quantized again with the scales of the forward pass, and
/// masks of dropout are drawn again. [`TransformerLayer`](crate::TransformerLayer) and [`Gpt`](crate::Gpt) take it; a layer of your
/// own is wrapped in [`Recompute`](crate::Recompute).
///
/// | level | computed again | kept of a block besides weights |
/// |---|---|---|
/// | `None` (default) | nothing | inputs of norms, quantized inputs of the Linears, q, k, v and output of the attention, `fc1`'s output |
/// | `Norm` | the norms' outputs | all but the inputs of `qkv` and `fc1` |
/// | `Activation` | also the MLP's activation | all but these and the input of `fc2` |
/// | `Attention` | also the whole attention, with its projections | its input, the norm's input and `fc1`'s output of the MLP |
/// | `Mlp` | also the whole MLP | the inputs of attention and MLP |
/// | `Block` | the whole block | its input |
///
/// ```
/// use fp8_nn::RecomputeLevel;
/// assert!(RecomputeLevel::Block > RecomputeLevel::Norm && RecomputeLevel::default() == RecomputeLevel::None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum RecomputeLevel {
    /// Everything that backward needs is kept. Default.
    #[default]
    None,
    /// The outputs of norms, which are inputs of `qkv` and `fc1`.
    Norm,
    /// Also the output of the MLP's activation.
    Activation,
    /// Also everything inside the attention.
    Attention,
    /// Also everything inside the MLP.
    Mlp,
    /// The whole block, of which only the input is kept.
    Block,
}

impl RecomputeLevel {
    /// All levels, from the one that keeps most.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Norm, Self::Activation, Self::Attention, Self::Mlp, Self::Block];

    /// Returns `none`, `norm`, `activation`, `attention`, `mlp` or `block`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Block => "block",
        }
    }
}

impl fmt::Display for RecomputeLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Reads the [`name`](RecomputeLevel::name).
impl FromStr for RecomputeLevel {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name).ok_or_else(|| Error::Option {
            part: "RecomputeLevel".to_owned(),
            option: "name",
            value: name.to_owned(),
            remedy: format!("expected one of {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

/// The standard deviations of the initial weights of a layer. Biases are 0 initially.
///
/// [`LayerNormMlp`](crate::LayerNormMlp), [`MultiheadAttention`](crate::MultiheadAttention) and
/// [`TransformerLayer`](crate::TransformerLayer) take it. Layers with one weight have only `init_std`. Weights are drawn
/// from a normal distribution with mean 0 and the default deviation 0.023, which is Transformer Engine's. PyTorch's
/// `Linear` draws from a uniform distribution of width `2 / √in_features` instead.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let num_layers = 12.0f32;
/// let gpt2 = InitOptions { init_std: 0.02, output_layer_init_std: 0.02 / (2.0 * num_layers).sqrt() };
/// assert!(gpt2.output_layer_init_std < InitOptions::default().output_layer_init_std);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InitOptions {
    /// The standard deviation of the weights that read the layer's input, `qkv` and `fc1`. Default: 0.023.
    pub init_std: f32,
    /// The standard deviation of the weights at the end of a residual branch, `proj` and `fc2`. Default: 0.023.
    pub output_layer_init_std: f32,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self { init_std: 0.023, output_layer_init_std: 0.023 }
    }
}
