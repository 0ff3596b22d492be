//! The tensors that a parameter is read from.

/// The tensors of a folder that one parameter of a [`Gpt`](fp8_nn::Gpt) holds.
///
/// ```
/// use fp8_hf::{Config, ParameterSource};
/// let config = Config::from_json(r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}"#)?;
/// let sources: Vec<ParameterSource> = config.parameters();
/// let qkv = sources.iter().find(|source| source.parameter == "blocks.0.attention.qkv.weight");
/// assert!(qkv.is_some_and(|qkv| qkv.is_transposed && qkv.tensors == ["transformer.h.0.attn.c_attn.weight"]));
/// # Ok::<(), fp8_hf::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSource {
    /// The parameter's name behind the model's path, such as `blocks.0.attention.qkv.weight`.
    pub parameter: String,
    /// The tensors, whose rows follow each other in the parameter.
    pub tensors: Vec<String>,
    /// Whether the files store the transpose, in × out.
    pub is_transposed: bool,
}
