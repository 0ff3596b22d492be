// These definitions win over those of README, which lead to files.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = "[which-recipe]: guide::which_recipe"]
#![doc = "[delayed-scaling]: guide::delayed_scaling"]
#![doc = "[from-transformer-engine]: guide::from_transformer_engine\n"]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod arguments;
mod attention;
mod block;
pub mod checkpoint;
mod clip;
mod cross_attention;
mod data_parallel;
mod decoder_layer;
mod delayed_wgrad;
mod dropout;
mod embedding;
mod error;
mod fp8_output;
mod fused;
mod generate;
mod gpt;
pub mod guide;
mod heads;
mod init;
mod kv_cache;
mod layer_norm;
mod layernorm_linear;
mod layernorm_mlp;
mod linear;
mod loss_scaler;
mod module;
mod multihead_attention;
mod optimizer;
mod options;
mod parameter;
mod precision;
pub mod prelude;
mod projection;
mod qk_norm;
mod quantize_weights;
mod recompute;
mod residual;
mod schedule;
mod scopes;
mod sequence_info;
mod stack;
mod transformer_layer;

pub use block::{Block, CachedLayer, DynBlock};
pub use clip::clip_grad_norm;
pub use cross_attention::{CrossAttention, CrossAttentionOptions, CrossAttentionSaved};
pub use data_parallel::{
    agree, all_reduce_gradients, broadcast_parameter, broadcast_parameters, broadcast_state,
};
pub use decoder_layer::{
    TransformerDecoderLayer, TransformerDecoderLayerOptions, TransformerDecoderLayerSaved,
};
pub use delayed_wgrad::backward_dw;
pub use embedding::{Embedding, EmbeddingOptions, EmbeddingSaved};
pub use error::{Error, Result};
pub use fp8_recipe::matches_name;
pub use generate::{GenerateOptions, Generation};
pub use gpt::{Gpt, GptLossSaved, GptOptions, GptSaved};
pub use kv_cache::KvCache;
pub use layer_norm::{LayerNorm, NormLayerOptions, NormSaved, RmsNorm};
pub use layernorm_linear::{LayerNormLinear, LayerNormLinearOptions, LayerNormLinearSaved};
pub use layernorm_mlp::{LayerNormMlp, LayerNormMlpOptions, LayerNormMlpSaved};
pub use linear::{Linear, LinearOptions, LinearSaved};
pub use loss_scaler::{LossScaler, LossScalerOptions};
pub use module::{Layer, Module, num_parameters, parameters, parameters_mut, zero_grad};
pub use multihead_attention::{MultiheadAttention, MultiheadAttentionOptions, MultiheadAttentionSaved};
pub use optimizer::{AdamW, AdamWOptions, ParameterGroup};
pub use options::{AttentionOptions, InitOptions, NormOptions, RecomputeLevel};
pub use parameter::{Parameter, frozen};
pub use quantize_weights::quantize_weights;
pub use recompute::{Recompute, RecomputeSaved};
pub use schedule::CosineSchedule;
pub use scopes::Scopes;
pub use sequence_info::SequenceInfo;
pub use stack::{AnySaved, DynModule, Stack};
pub use transformer_layer::{TransformerLayer, TransformerLayerOptions, TransformerLayerSaved};

pub use fp8_dist;
pub use fp8_format;
pub use fp8_kernels;
pub use fp8_recipe;
pub use rand;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct WorkspaceReadme;
