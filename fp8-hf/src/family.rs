//! Families of models as data: which options they have, and their tensors by name.

use fp8_kernels::Shape;
use fp8_kernels::ops::Norm;

/// The output projection, which files of a tied model may have, too.
pub(super) const HEAD: &str = "lm_head.weight";

/// A family of decoders: one entry of [`Family::ALL`].
///
/// Families differ in data alone. The decoder is the same for all of them: a norm, attention, a norm, and an MLP in each layer.
///
/// ```
/// use fp8_hf::Family;
/// let names: Vec<&str> = Family::ALL.iter().map(|family| family.model_type).collect();
/// assert_eq!(names, ["llama", "mistral", "qwen2", "qwen3", "gpt2"]);
/// let qwen2 = Family::by_name("qwen2").ok_or("unknown")?;
/// assert!(qwen2.qkv_bias && !qwen2.qk_norm);
/// # Ok::<(), &str>(())
/// ```
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures` that is supported.
    pub architecture: &'static str,
    /// The norm in front of attention and MLP.
    pub norm: Norm,
    /// Whether positions are a learned embedding instead of rotations.
    pub has_learned_positions: bool,
    /// Whether weights are stored as in × out.
    pub is_transposed: bool,
    /// Whether the projections to queries, keys and values have a bias, and no other does.
    pub qkv_bias: bool,
    /// Whether all projections have a bias.
    pub linear_bias: bool,
    /// Whether each head of queries and keys passes an RMSNorm before the rotation.
    pub qk_norm: bool,
    pub(super) window: Window,
    pub(super) is_tied_by_default: bool,
    /// `head_dim` where the configuration has none; `None` is hidden_size / heads.
    pub(super) head_dim: Option<usize>,
    pub(super) tensors: &'static [Template],
}

/// The layers that have a sliding window if `layer_types` does not say which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Window {
    /// No layer.
    Never,
    /// All layers, if `sliding_window` is set.
    Always,
    /// Layers from `max_window_layers` on, if `use_sliding_window` is set.
    Flagged,
}

/// A tensor that every model of a family has, in each layer if its name has a `{}`.
#[derive(Debug, PartialEq)]
pub(super) struct Template {
    pub(super) name: &'static str,
    pub(super) shape: &'static [Extent],
    pub(super) condition: Condition,
    pub(super) kind: TensorKind,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Extent {
    Vocab,
    Positions,
    Hidden,
    Intermediate,
    Queries,
    Keys,
    QueriesKeysValues,
    HeadDim,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Condition {
    Always,
    Untied,
    QkvBias,
    QkNorm,
}

/// The role of a tensor. The example of [`Config::tensors`](super::Config::tensors) counts the tensors of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorKind {
    /// The weight of a projection in a layer, which FP8 checkpoints quantize.
    Linear,
    /// The projection to queries, keys or values, which vLLM computes as one.
    Qkv,
    /// The gate or the other half of the MLP's input projection, which vLLM computes as one.
    GateUp,
    /// An embedding or the output projection.
    Embedding,
    /// A norm's weight or bias, or the bias of a projection.
    Vector,
}

impl TensorKind {
    /// Returns true for the weights that FP8 checkpoints quantize. The example of [`Config::tensors`](super::Config::tensors) uses it.
    #[must_use]
    pub const fn is_linear(self) -> bool {
        matches!(self, Self::Linear | Self::Qkv | Self::GateUp)
    }
}

/// A tensor that a model has, from [`Config::tensors`](super::Config::tensors), whose example reads one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the files.
    pub name: String,
    /// Its shape as stored.
    pub shape: Shape,
    /// Its role.
    pub kind: TensorKind,
    /// The layer it belongs to, if any.
    pub layer: Option<usize>,
}

const fn template(
    name: &'static str,
    shape: &'static [Extent],
    condition: Condition,
    kind: TensorKind,
) -> Template {
    Template { name, shape, condition, kind }
}

use Condition::{Always, QkNorm, QkvBias, Untied};
use Extent::{HeadDim, Hidden, Intermediate, Keys, Positions, Queries, QueriesKeysValues, Vocab};
use TensorKind::{Embedding, GateUp, Linear, Qkv, Vector};

const LLAMA: &[Template] = &[
    template("model.embed_tokens.weight", &[Vocab, Hidden], Always, Embedding),
    template("model.layers.{}.input_layernorm.weight", &[Hidden], Always, Vector),
    template("model.layers.{}.self_attn.q_proj.weight", &[Queries, Hidden], Always, Qkv),
    template("model.layers.{}.self_attn.k_proj.weight", &[Keys, Hidden], Always, Qkv),
    template("model.layers.{}.self_attn.v_proj.weight", &[Keys, Hidden], Always, Qkv),
    template("model.layers.{}.self_attn.q_proj.bias", &[Queries], QkvBias, Vector),
    template("model.layers.{}.self_attn.k_proj.bias", &[Keys], QkvBias, Vector),
    template("model.layers.{}.self_attn.v_proj.bias", &[Keys], QkvBias, Vector),
    template("model.layers.{}.self_attn.q_norm.weight", &[HeadDim], QkNorm, Vector),
    template("model.layers.{}.self_attn.k_norm.weight", &[HeadDim], QkNorm, Vector),
    template("model.layers.{}.self_attn.o_proj.weight", &[Hidden, Queries], Always, Linear),
    template("model.layers.{}.post_attention_layernorm.weight", &[Hidden], Always, Vector),
    template("model.layers.{}.mlp.gate_proj.weight", &[Intermediate, Hidden], Always, GateUp),
    template("model.layers.{}.mlp.up_proj.weight", &[Intermediate, Hidden], Always, GateUp),
    template("model.layers.{}.mlp.down_proj.weight", &[Hidden, Intermediate], Always, Linear),
    template("model.norm.weight", &[Hidden], Always, Vector),
    template("lm_head.weight", &[Vocab, Hidden], Untied, Embedding),
];

const GPT2: &[Template] = &[
    template("transformer.wte.weight", &[Vocab, Hidden], Always, Embedding),
    template("transformer.wpe.weight", &[Positions, Hidden], Always, Embedding),
    template("transformer.h.{}.ln_1.weight", &[Hidden], Always, Vector),
    template("transformer.h.{}.ln_1.bias", &[Hidden], Always, Vector),
    template("transformer.h.{}.attn.c_attn.weight", &[Hidden, QueriesKeysValues], Always, Linear),
    template("transformer.h.{}.attn.c_attn.bias", &[QueriesKeysValues], Always, Vector),
    template("transformer.h.{}.attn.c_proj.weight", &[Hidden, Hidden], Always, Linear),
    template("transformer.h.{}.attn.c_proj.bias", &[Hidden], Always, Vector),
    template("transformer.h.{}.ln_2.weight", &[Hidden], Always, Vector),
    template("transformer.h.{}.ln_2.bias", &[Hidden], Always, Vector),
    template("transformer.h.{}.mlp.c_fc.weight", &[Hidden, Intermediate], Always, Linear),
    template("transformer.h.{}.mlp.c_fc.bias", &[Intermediate], Always, Vector),
    template("transformer.h.{}.mlp.c_proj.weight", &[Intermediate, Hidden], Always, Linear),
    template("transformer.h.{}.mlp.c_proj.bias", &[Hidden], Always, Vector),
    template("transformer.ln_f.weight", &[Hidden], Always, Vector),
    template("transformer.ln_f.bias", &[Hidden], Always, Vector),
    template("lm_head.weight", &[Vocab, Hidden], Untied, Embedding),
];

/// The Llama family, which the others but GPT-2 differ from in few fields.
const BASE: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    norm: Norm::RmsNorm,
    has_learned_positions: false,
    is_transposed: false,
    qkv_bias: false,
    linear_bias: false,
    qk_norm: false,
    window: Window::Never,
    is_tied_by_default: false,
    head_dim: None,
    tensors: LLAMA,
};

impl Family {
    /// The prefix that very old GPT-2 files lack.
    const PREFIX: &str = "transformer.";

    /// All families that are supported.
    pub const ALL: &[Self] = &[
        BASE,
        Self { model_type: "mistral", architecture: "MistralForCausalLM", window: Window::Always, ..BASE },
        Self {
            model_type: "qwen2",
            architecture: "Qwen2ForCausalLM",
            qkv_bias: true,
            window: Window::Flagged,
            ..BASE
        },
        Self {
            model_type: "qwen3",
            architecture: "Qwen3ForCausalLM",
            qk_norm: true,
            window: Window::Flagged,
            head_dim: Some(128),
            ..BASE
        },
        Self {
            model_type: "gpt2",
            architecture: "GPT2LMHeadModel",
            norm: Norm::LayerNorm,
            has_learned_positions: true,
            is_transposed: true,
            linear_bias: true,
            is_tied_by_default: true,
            tensors: GPT2,
            ..BASE
        },
    ];

    /// Returns the family with this `model_type`.
    #[must_use]
    pub fn by_name(model_type: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|family| family.model_type == model_type)
    }

    /// Returns the name under which very old files store the tensor, if it differs.
    pub(super) fn old_name(name: &str) -> Option<&str> {
        name.strip_prefix(Self::PREFIX)
    }

    /// Returns true for tensors that some files have and no model needs: buffers, and the head of a tied model.
    pub(super) fn is_spare(&self, name: &str, is_tied: bool) -> bool {
        let is_buffer = match self.has_learned_positions {
            true => name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"),
            false => name.ends_with(".rotary_emb.inv_freq"),
        };
        is_buffer || (is_tied && name == HEAD)
    }
}
