//! `config.json` in both spellings, that of transformers 5 and that of 4, as a typed description.

pub(super) mod fields;
mod quantization;
mod rope;
pub(super) mod text;

pub(crate) use quantization::{GROUP, of_modelopt as modelopt};
pub use quantization::{InputScales, QuantMethod, Quantization, WeightScales};
pub use rope::{Rope, RopeScaling};

use super::family::{Family, Window};
use crate::{Error, Result};
use fields::Fields;
use fp8_kernels::DType;
use fp8_kernels::ops::Activation;
use serde_json::Value;
use std::path::Path;

/// transformers' default of `sliding_window`, where it is used and absent.
const SLIDING_WINDOW: usize = 4096;
/// transformers' default of `max_window_layers`.
const MAX_WINDOW_LAYERS: usize = 28;
/// More layers than any model has; a bound for files that are not what they seem.
const MAX_LAYERS: usize = 10_000;
/// A bound for every other size. Products of two fit in 64 bits.
const MAX_EXTENT: usize = 1 << 31;

/// The description of a model, from its `config.json`.
///
/// Fields have Hugging Face's names. Absent fields and `null` mean the family's default. A field that changes the result and is
/// not supported is an error that names it.
///
/// ```
/// use fp8_hf::{Config, Rope, RopeScaling};
/// let config = Config::from_json(
///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
///         "num_attention_heads": 2, "rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}"#,
/// )?;
/// assert_eq!((config.head_dim, config.num_key_value_heads, config.norm_eps), (4, 2, 1e-6));
/// assert_eq!(config.rope, Some(Rope { theta: 500000.0, scaling: RopeScaling::Linear { factor: 4.0 } }));
///
/// let error = Config::from_json(r#"{"model_type": "mamba"}"#).unwrap_err().to_string();
/// assert!(error.starts_with("config.json: `model_type` is \"mamba\": expected one of llama, mistral"));
/// # Ok::<(), fp8_hf::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The family, which says what the fields do not.
    pub family: &'static Family,
    /// The number of tokens: rows of the embedding.
    pub vocab_size: usize,
    /// The width of the model (`n_embd` of GPT-2).
    pub hidden_size: usize,
    /// The width of the MLP (`n_inner` of GPT-2; default there: 4 · hidden_size).
    pub intermediate_size: usize,
    /// The number of layers (`n_layer`).
    pub num_hidden_layers: usize,
    /// The number of query heads (`n_head`).
    pub num_attention_heads: usize,
    /// The number of heads of keys and values. Default: num_attention_heads.
    pub num_key_value_heads: usize,
    /// The width of a head. Default: hidden_size / num_attention_heads; 128 for Qwen3.
    pub head_dim: usize,
    /// The longest sequence that the model was made for (`n_positions`). Default: 2048.
    pub max_position_embeddings: usize,
    /// ε of the norms: `rms_norm_eps` (default: 1e-6) or `layer_norm_epsilon` (default: 1e-5).
    pub norm_eps: f64,
    /// The activation of the MLP: SwiGLU, or GELU in the tanh approximation for GPT-2.
    pub activation: Activation,
    /// The rotary positions; `None` for a family with learned ones.
    pub rope: Option<Rope>,
    /// For each layer the number of positions that a query sees, itself included. `None`: all before it.
    pub sliding_windows: Vec<Option<usize>>,
    /// Whether the output projection is the embedding. Default: false; true for GPT-2.
    pub tie_word_embeddings: bool,
    /// The token that begins a text. Default: none.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text. [`Folder::open`](crate::Folder::open) takes them from `generation_config.json` if it
    /// has some. Default: none.
    pub eos_token_ids: Vec<u32>,
    /// The quantization of weights and inputs. Default: `None`, not quantized.
    pub quantization: Option<Quantization>,
    /// The whole file, fields that are not known here included.
    json: String,
    /// `original_max_position_embeddings`, if the file has it and RoPE scaling is linear.
    original_positions: Option<usize>,
}

impl Config {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`Error::File`], which names the field that is missing, wrong, or not supported.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::parse(text).map_err(|problem| Error::File { path: "config.json".into(), problem })
    }

    /// Reads the file at `path`. The example of [`save`](crate::save) does it.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, or as in [`from_json`](Self::from_json).
    pub fn read(path: &Path) -> Result<Self> {
        let text = super::files::read_text(path)?;
        Self::parse(&text).map_err(|problem| Error::File { path: path.to_owned(), problem })
    }

    /// Returns the text of the file, in which every field has its original spelling.
    ///
    /// ```
    /// # use fp8_hf::Config;
    /// let text = r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "mine": 1e-05}"#;
    /// assert_eq!(Config::from_json(text)?.json(), text);
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    #[must_use]
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Returns the length of the longest sequence that the model is made for: `max_position_embeddings`, or, if RoPE scaling
    /// extends the model to more than that, factor × the length of the original model.
    ///
    /// The original length is `original_max_position_embeddings`, or `max_position_embeddings` if that is absent. Files differ in
    /// what they mean by the latter: some with RoPE scaling give the original length, others the extended one. With learned
    /// positions, `max_position_embeddings` is the number of positions that exist.
    /// [`LoadOptions::max_seq_length`](super::LoadOptions::max_seq_length) makes a model of this length.
    ///
    /// ```
    /// # use fp8_hf::Config;
    /// let config = Config::from_json(
    ///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    ///         "num_attention_heads": 2, "max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}"#,
    /// )?;
    /// assert_eq!(config.longest_sequence(), 16384);
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    #[must_use]
    pub fn longest_sequence(&self) -> usize {
        let longest = self.max_position_embeddings;
        let extended = match self.rope.as_ref().map(|rope| rope.scaling) {
            Some(RopeScaling::Linear { factor }) => {
                factor * self.original_positions.unwrap_or(longest) as f64
            }
            Some(
                RopeScaling::Llama3 { factor, original_max_position, .. }
                | RopeScaling::Yarn { factor, original_max_position, .. },
            ) => factor * original_max_position as f64,
            Some(RopeScaling::None) | None => 0.0,
        };
        // A factor may be any number: this is a bound for lengths.
        longest.max(extended.min(MAX_EXTENT as f64) as usize)
    }

    /// Returns this configuration with another `quantization_config`, or without one. A `compression_config` is removed.
    pub(crate) fn with_quantization(&self, value: Option<&Value>) -> Result<Self> {
        let [key, older] = quantization::KEYS;
        let text = text::with_field(&self.json, older, None);
        Self::from_json(&text::with_field(&text, key, value))
    }

    /// Returns whether it names the dtype of the tensors.
    pub(crate) fn names_dtype(&self) -> bool {
        let map = crate::json::object(&self.json).unwrap_or_default();
        ["dtype", "torch_dtype"].iter().any(|&key| map.get(key).is_some_and(|value| !value.is_null()))
    }

    /// Returns this configuration for tensors of this dtype.
    pub(crate) fn with_dtype(&self, dtype: DType) -> Result<Self> {
        let map = crate::json::object(&self.json).unwrap_or_default();
        // Readers differ in which one they prefer, so both are set where both are present.
        let mut keys: Vec<&str> =
            ["dtype", "torch_dtype"].into_iter().filter(|&key| map.contains_key(key)).collect();
        if keys.is_empty() {
            // transformers 5 writes `dtype`, and reads both.
            keys.push(if map.contains_key("rope_parameters") { "dtype" } else { "torch_dtype" });
        }
        let name = match dtype {
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            _ => "float32",
        };
        let value = Value::from(name);
        let mut text = self.json.clone();
        for key in keys.into_iter().filter(|&key| map.get(key) != Some(&value)) {
            text = text::with_field(&text, key, Some(&value));
        }
        if text == self.json { Ok(self.clone()) } else { Self::from_json(&text) }
    }

    fn parse(json: &str) -> Result<Self, String> {
        let map = crate::json::object(json)?;
        let fields = Fields::new(&map, "");
        let family = family(fields)?;
        expect_supported(fields, family)?;
        let is_gpt2 = family.has_learned_positions;
        let of = |llama, gpt2| if is_gpt2 { gpt2 } else { llama };
        let size = |key: &'static str| match fields.required(key)? {
            size if size > MAX_EXTENT => Err(fields.wrong(key, "at most 2³¹")),
            size => Ok(size),
        };
        let hidden_size = size(of("hidden_size", "n_embd"))?;
        let layers = of("num_hidden_layers", "n_layer");
        let num_hidden_layers = size(layers)?;
        if num_hidden_layers > MAX_LAYERS {
            return Err(fields.wrong(layers, "at most 10000"));
        }
        let heads = of("num_attention_heads", "n_head");
        let num_attention_heads = size(heads)?;
        let optional =
            |key: &'static str| if fields.get(key).is_some() { size(key).map(Some) } else { Ok(None) };
        let num_key_value_heads =
            if is_gpt2 { None } else { optional("num_key_value_heads")? }.unwrap_or(num_attention_heads);
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads, {num_attention_heads}");
            return Err(fields.wrong("num_key_value_heads", &expected));
        }
        let head_dim = match if is_gpt2 { None } else { optional("head_dim")?.or(family.head_dim) } {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => {
                return Err(fields.wrong(heads, &format!("a divisor of the model's width, {hidden_size}")));
            }
        };
        if num_attention_heads.saturating_mul(head_dim) > MAX_EXTENT {
            return Err(fields.wrong(heads, "at most 2³¹ as a product with head_dim"));
        }
        if !is_gpt2 && head_dim % 2 == 1 {
            return Err(format!("`head_dim` is {head_dim}: expected an even number, for rotary positions"));
        }
        let intermediate = match is_gpt2 {
            true => match optional("n_inner")? {
                Some(inner) => inner,
                None if hidden_size > MAX_EXTENT / 4 => {
                    return Err(fields.wrong("n_embd", "at most 2²⁹, as `n_inner` is four times as much"));
                }
                None => 4 * hidden_size,
            },
            false => size("intermediate_size")?,
        };
        let positions = optional(of("max_position_embeddings", "n_positions"))?;
        let eps = fields.positive(of("rms_norm_eps", "layer_norm_epsilon"))?;
        let rope = if is_gpt2 { None } else { Some(rope::rope(fields)?) };
        let tied = fields.flag("tie_word_embeddings")?.unwrap_or(family.is_tied_by_default);
        Ok(Self {
            family,
            vocab_size: size("vocab_size")?,
            hidden_size,
            intermediate_size: intermediate,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            max_position_embeddings: positions.unwrap_or(if is_gpt2 { 1024 } else { 2048 }),
            norm_eps: eps.unwrap_or(if is_gpt2 { 1e-5 } else { 1e-6 }),
            activation: if is_gpt2 { Activation::Gelu } else { Activation::Swiglu },
            original_positions: match &rope {
                Some(Rope { scaling: RopeScaling::Linear { .. }, .. }) => rope::original(fields)?,
                _ => None,
            },
            rope,
            sliding_windows: windows(fields, family, num_hidden_layers)?,
            tie_word_embeddings: tied,
            bos_token_id: fields.ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.ids("eos_token_id")?,
            quantization: quantization::quantization(fields)?,
            json: json.to_owned(),
        })
    }

    /// Takes the end of a text from a `generation_config.json`, if it names one.
    pub(super) fn override_by_generation(&mut self, json: &str) -> Result<(), String> {
        let map = crate::json::object(json)?;
        let fields = Fields::new(&map, "");
        let (bos, eos) = (fields.ids("bos_token_id")?, fields.ids("eos_token_id")?);
        self.bos_token_id = bos.first().copied().or(self.bos_token_id);
        if !eos.is_empty() {
            self.eos_token_ids = eos;
        }
        Ok(())
    }
}

fn family(fields: Fields<'_>) -> Result<&'static Family, String> {
    let names: Vec<&str> = Family::ALL.iter().map(|family| family.model_type).collect();
    let expected = format!("one of {}", names.join(", "));
    let family = fields.text("model_type")?.and_then(Family::by_name);
    let family = family.ok_or_else(|| fields.wrong("model_type", &expected))?;
    let architectures = fields.texts("architectures")?;
    if !architectures.is_empty() && !architectures.iter().any(|name| name == family.architecture) {
        return Err(fields.wrong("architectures", &format!("[\"{}\"]", family.architecture)));
    }
    Ok(family)
}

/// Refuses fields that change the result and that the decoder does not have.
fn expect_supported(fields: Fields<'_>, family: &Family) -> Result<(), String> {
    let flags: &[(&str, bool)] = match family.has_learned_positions {
        true => &[
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
            ("add_cross_attention", false),
        ],
        // A Qwen2 always has biases in q, k and v, whatever this field says.
        false if family.qkv_bias => &[("mlp_bias", false)],
        false => &[("attention_bias", false), ("mlp_bias", false)],
    };
    for &(key, supported) in flags {
        if fields.flag(key)?.is_some_and(|flag| flag != supported) {
            return Err(fields.wrong(key, &format!("{supported}: the other is not supported")));
        }
    }
    let (key, known): (&str, &[&str]) = match family.has_learned_positions {
        true => ("activation_function", &["gelu_new", "gelu_pytorch_tanh"]),
        false => ("hidden_act", &["silu", "swish"]),
    };
    match fields.text(key)? {
        Some(activation) if !known.contains(&activation) => {
            Err(fields.wrong(key, &format!("\"{}\": other activations are not supported", known[0])))
        }
        _ => Ok(()),
    }
}

/// Returns each layer's window. Absent fields have transformers' defaults; an explicit `null` means no window.
fn windows(fields: Fields<'_>, family: &Family, layers: usize) -> Result<Vec<Option<usize>>, String> {
    let flag = fields.flag("use_sliding_window")?;
    let window = match family.window {
        Window::Never => None,
        _ if fields.has("sliding_window") => fields.size("sliding_window")?,
        Window::Always => Some(SLIDING_WINDOW),
        Window::Flagged => flag.filter(|&is_used| is_used).map(|_| SLIDING_WINDOW),
    };
    if window == Some(0) {
        return Err(fields.wrong("sliding_window", "at least 1, or null"));
    }
    if family.has_learned_positions || fields.get("layer_types").is_none() {
        let first = match (family.window, flag) {
            (Window::Always, _) => 0,
            (Window::Flagged, Some(true)) => fields.size("max_window_layers")?.unwrap_or(MAX_WINDOW_LAYERS),
            _ => layers,
        };
        return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
    }
    let types = fields.texts("layer_types")?;
    if types.len() != layers {
        return Err(format!(
            "`layer_types` has {} entries: expected {layers}, one for each layer",
            types.len()
        ));
    }
    if family.window == Window::Always {
        let expected = if window.is_some() { "sliding_attention" } else { "full_attention" };
        if let Some(kind) = types.iter().find(|&kind| kind != expected) {
            let name = family.model_type;
            return Err(format!(
                "`layer_types` has \"{kind}\": expected \"{expected}\" for all layers of a {name} model, as `sliding_window` says"
            ));
        }
    }
    let of = |kind: &String| match (kind.as_str(), window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", _) if family.window == Window::Flagged && flag == Some(false) => {
            Err(fields.wrong("use_sliding_window", "true, as `layer_types` has sliding_attention"))
        }
        ("sliding_attention", Some(window)) => Ok(Some(window)),
        ("sliding_attention", None) => {
            Err(fields.wrong("sliding_window", "a number, as `layer_types` has sliding_attention"))
        }
        _ => {
            Err(format!("`layer_types` has \"{kind}\": expected \"full_attention\" or \"sliding_attention\""))
        }
    };
    types.iter().map(of).collect()
}
