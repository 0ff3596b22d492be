//! The layers, a file for each, and the parts that layers share.
//!
//! The crate and its prelude re-export all that is public here.

mod attention;
mod cross_attention;
mod decoder_layer;
mod embedding;
mod fused;
mod heads;
mod layer_norm;
mod layernorm_linear;
mod layernorm_mlp;
mod linear;
mod multihead_attention;
mod operands;
mod projection;
mod qk_norm;
mod residual;
mod transformer_layer;

pub use cross_attention::{CrossAttention, CrossAttentionOptions, CrossAttentionSaved};
pub use decoder_layer::{
    TransformerDecoderLayer, TransformerDecoderLayerOptions, TransformerDecoderLayerSaved,
};
pub use embedding::{Embedding, EmbeddingOptions, EmbeddingSaved};
pub use layer_norm::{LayerNorm, NormLayerOptions, NormSaved, RmsNorm};
pub use layernorm_linear::{LayerNormLinear, LayerNormLinearOptions, LayerNormLinearSaved};
pub use layernorm_mlp::{LayerNormMlp, LayerNormMlpOptions, LayerNormMlpSaved};
pub use linear::{Linear, LinearOptions, LinearSaved};
pub use multihead_attention::{MultiheadAttention, MultiheadAttentionOptions, MultiheadAttentionSaved};
pub use transformer_layer::{TransformerLayer, TransformerLayerOptions, TransformerLayerSaved};

pub(crate) use embedding::vocabulary;
pub(crate) use layer_norm::NormCore;
pub(crate) use linear::Part;
