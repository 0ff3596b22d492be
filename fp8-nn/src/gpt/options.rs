//! The options of a language model.

use crate::{AttentionOptions, InitOptions, NormOptions, RecomputeLevel, TransformerLayerOptions};
use fp8_kernels::DType;
use fp8_kernels::ops::{Activation, Norm, RopeScaling};

/// Options of a [`Gpt`](crate::Gpt). `vocab_size`, `num_layers`, `hidden_size`, `num_attention_heads` and `max_seq_length` are required;
/// the other fields have defaults.
///
/// See [`Gpt`](crate::Gpt) for an example.
#[derive(Debug, Clone)]
pub struct GptOptions {
    /// The number of token ids, which run from 0 to `vocab_size − 1`. Required.
    pub vocab_size: usize,
    /// The number of transformer blocks. Required.
    pub num_layers: usize,
    /// The width of the model. Required.
    pub hidden_size: usize,
    /// The inner width of the MLPs. Default: `None`, four times `hidden_size`.
    pub ffn_hidden_size: Option<usize>,
    /// The number of query heads, a divisor of `hidden_size`. Required.
    pub num_attention_heads: usize,
    /// The number of key and value heads. Default: `None`, one for each query head.
    pub num_gqa_groups: Option<usize>,
    /// The length of the longest sequence. Required.
    pub max_seq_length: usize,
    /// The activation of the MLPs. Default: [`Activation::Gelu`], the tanh form.
    pub activation: Activation,
    /// The normalization in the blocks and before the head. Default: `NormOptions::default()`, a LayerNorm with
    /// ε = 1e-5.
    pub norm: NormOptions,
    /// The size of a head. Default: `None`, which is `hidden_size / num_attention_heads`.
    pub kv_channels: Option<usize>,
    /// The base of RoPE's frequencies. Default: 10000.
    pub rope_base: f64,
    /// The scaling of RoPE's frequencies for longer sequences. Default: [`RopeScaling::None`].
    pub rope_scaling: RopeScaling,
    /// Whether the model adds a table of learned positions, `<path>.position.weight` `[max_seq_length, hidden_size]`, to the
    /// embedding in place of RoPE, as GPT-2 does. Default: false.
    pub learned_positions: bool,
    /// The number of positions that a position sees in each block's attention, itself included: one number for each block,
    /// `None` for no limit. Default: empty, no limits.
    pub sliding_windows: Vec<Option<usize>>,
    /// Whether each head of queries and keys is normalized by an RMSNorm before RoPE, with the ε of `norm`, as Qwen3 does.
    /// Default: false.
    pub qk_norm: bool,
    /// Whether the attention of the blocks runs in FP8: see [`AttentionOptions::fp8_dpa`](crate::AttentionOptions::fp8_dpa). Default:
    /// `None`, as the recipe says.
    pub fp8_dpa: Option<bool>,
    /// Whether the attention of the blocks also exchanges FP8 with its projections: see [`AttentionOptions::fp8_mha`](crate::AttentionOptions::fp8_mha). It implies
    /// `fp8_dpa`. Default: `None`, as the recipe says.
    pub fp8_mha: Option<bool>,
    /// The probability that an element of the embedding is dropped in training, at least 0 and less than 1, as in GPT-2.
    /// Default: 0.
    pub embedding_dropout: f32,
    /// The probability that an attention probability is dropped in training, at least 0 and less than 1. Default: 0.
    /// Transformer Engine's default is 0.1.
    pub attention_dropout: f32,
    /// The probability that an element of a residual branch is dropped in training, at least 0 and less than 1. Default: 0.
    /// Transformer Engine's default is 0.1.
    pub hidden_dropout: f32,
    /// The probability that a residual branch is dropped in training for a whole sequence, at least 0 and less than 1: the same
    /// in each block. Default: 0.
    pub drop_path_rate: f32,
    /// Whether the Linears of the blocks have biases. The head has none. Default: true.
    pub bias: bool,
    /// Whether `qkv` has a bias. Default: `None`, as `bias` says.
    pub qkv_bias: Option<bool>,
    /// Whether the head is the table of the embedding, so that the model has no `<path>.head.weight`. The table's gradient is the
    /// sum of both uses. Default: false.
    pub tie_word_embeddings: bool,
    /// The part of each block that backward recomputes instead of keeping it. Default: [`RecomputeLevel::None`].
    pub recompute: RecomputeLevel,
    /// Whether the residual additions of the blocks are f32: see
    /// [`TransformerLayerOptions::fp32_residual_connection`](crate::TransformerLayerOptions::fp32_residual_connection). Default: false.
    pub fp32_residual_connection: bool,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviation of the initial weights. The weights at the end of a residual branch (`proj` and
    /// `fc2`) have `init_std / √(2 · num_layers)`. Default: 0.023.
    pub init_std: f32,
}

impl Default for GptOptions {
    fn default() -> Self {
        Self {
            vocab_size: 0,
            num_layers: 0,
            hidden_size: 0,
            ffn_hidden_size: None,
            num_attention_heads: 0,
            num_gqa_groups: None,
            max_seq_length: 0,
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            kv_channels: None,
            rope_base: 10_000.0,
            rope_scaling: RopeScaling::None,
            learned_positions: false,
            sliding_windows: Vec::new(),
            qk_norm: false,
            fp8_dpa: None,
            fp8_mha: None,
            embedding_dropout: 0.0,
            attention_dropout: 0.0,
            hidden_dropout: 0.0,
            drop_path_rate: 0.0,
            bias: true,
            qkv_bias: None,
            tie_word_embeddings: false,
            recompute: RecomputeLevel::None,
            fp32_residual_connection: false,
            params_dtype: DType::F32,
            init_std: 0.023,
        }
    }
}

impl GptOptions {
    /// Returns the options of the block at `index`, which has its own window.
    #[must_use]
    pub fn block(&self, index: usize) -> TransformerLayerOptions {
        let mut window = AttentionOptions::default().window;
        // A query sees itself, too.
        window.0 = self.sliding_windows.get(index).copied().flatten().map(|window| window.saturating_sub(1));
        TransformerLayerOptions {
            hidden_size: self.hidden_size,
            ffn_hidden_size: self.ffn_hidden_size.unwrap_or(self.hidden_size.saturating_mul(4)),
            attention: AttentionOptions {
                num_attention_heads: self.num_attention_heads,
                num_gqa_groups: self.num_gqa_groups,
                kv_channels: self.kv_channels,
                rope: !self.learned_positions,
                rope_base: self.rope_base,
                rope_scaling: self.rope_scaling,
                qk_norm: self.qk_norm.then_some(NormOptions { normalization: Norm::RmsNorm, ..self.norm }),
                max_seq_length: self.max_seq_length,
                window,
                fp8_dpa: self.fp8_dpa,
                fp8_mha: self.fp8_mha,
                attention_dropout: self.attention_dropout,
                ..Default::default()
            },
            hidden_dropout: self.hidden_dropout,
            drop_path_rate: self.drop_path_rate,
            activation: self.activation,
            norm: self.norm,
            recompute: self.recompute,
            fp32_residual_connection: self.fp32_residual_connection,
            bias: self.bias,
            qkv_bias: self.qkv_bias,
            params_dtype: self.params_dtype,
            init: InitOptions {
                init_std: self.init_std,
                output_layer_init_std: self.init_std / (2.0 * self.num_layers as f32).sqrt(),
            },
            ..Default::default()
        }
    }
}
