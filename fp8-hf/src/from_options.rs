//! The configuration of a model that was made from options.

use super::config::{Config, RopeScaling};
use crate::{Error, Result};
use fp8_kernels::DType;
use fp8_kernels::ops::{Activation, Norm};
use fp8_nn::{GptOptions, NormOptions};
use serde_json::{Map, Value, json};

impl Config {
    /// Returns the configuration of a [`Gpt`](fp8_nn::Gpt) with these options, if a family of Hugging Face has such models:
    ///
    /// - RMSNorm, SwiGLU, RoPE and no bias: Llama; Mistral with a sliding window in all layers; Qwen3 with `qk_norm`;
    ///   Qwen2 with a bias in `qkv` alone. The last two may have windows in some layers.
    /// - `learned_positions`, LayerNorm, GELU and biases: GPT-2.
    ///
    /// This is the inverse of [`gpt_options`](Self::gpt_options). Options that change training alone, such as dropout, have no
    /// place in it. The ids of special tokens are not set.
    ///
    /// ```
    /// use fp8_hf::Config;
    /// use fp8_nn::prelude::*;
    /// let llama = GptOptions {
    ///     vocab_size: 256,
    ///     num_layers: 2,
    ///     layer: TransformerLayerOptions {
    ///         hidden_size: 32,
    ///         ffn_hidden_size: 128,
    ///         attention: AttentionOptions {
    ///             num_attention_heads: 4,
    ///             max_seq_length: 64,
    ///             ..Default::default()
    ///         },
    ///         activation: Activation::Swiglu,
    ///         norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
    ///         bias: false,
    ///         ..Default::default()
    ///     },
    ///     ..Default::default()
    /// };
    /// let config = Config::from_gpt_options(&llama)?;
    /// assert_eq!((config.family.model_type, config.intermediate_size, config.norm_eps), ("llama", 128, 1e-5));
    /// let mut biased = llama.clone();
    /// biased.layer.bias = true;
    /// let error = Config::from_gpt_options(&biased).unwrap_err().to_string();
    /// assert!(error.starts_with("hf::Config: bias = true: expected false"), "{error}");
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`], which names the first option that no such family has; sizes that no model can have.
    pub fn from_gpt_options(options: &GptOptions) -> Result<Self> {
        let is_gpt2 = options.learned_positions;
        expect_family(options, is_gpt2)?;
        let heads = options.layer.attention.num_attention_heads;
        let head_dim =
            options.layer.attention.kv_channels.unwrap_or(options.layer.hidden_size / heads.max(1));
        let inner = options.layer.ffn_hidden_size;
        // The shortest decimal of the f32, so that 1e-5 stays 1e-5.
        let eps: f64 =
            options.layer.norm.eps.to_string().parse().unwrap_or(f64::from(options.layer.norm.eps));
        let dtype = match options.layer.params_dtype {
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            _ => "float32",
        };
        let mut fields = Map::new();
        let mut set = |key: &str, value: Value| drop(fields.insert(key.to_owned(), value));
        set("vocab_size", json!(options.vocab_size));
        set("tie_word_embeddings", json!(options.tie_word_embeddings));
        set("torch_dtype", json!(dtype));
        let family = if is_gpt2 {
            set("n_embd", json!(options.layer.hidden_size));
            set("n_layer", json!(options.num_layers));
            set("n_head", json!(heads));
            set("n_positions", json!(options.layer.attention.max_seq_length));
            set("n_inner", json!(inner));
            set("layer_norm_epsilon", json!(eps));
            set("activation_function", json!("gelu_new"));
            "gpt2"
        } else {
            set("hidden_size", json!(options.layer.hidden_size));
            set("intermediate_size", json!(inner));
            set("num_hidden_layers", json!(options.num_layers));
            set("num_attention_heads", json!(heads));
            set("num_key_value_heads", json!(options.layer.attention.num_gqa_groups.unwrap_or(heads)));
            set("head_dim", json!(head_dim));
            set("max_position_embeddings", json!(options.layer.attention.max_seq_length));
            set("rms_norm_eps", json!(eps));
            set("hidden_act", json!("silu"));
            set("rope_theta", json!(options.layer.attention.rope_base));
            set("rope_scaling", rope_scaling(options.layer.attention.rope_scaling));
            let windows = &options.sliding_windows;
            let window = windows.iter().flatten().next().copied();
            let family = match (options.layer.qkv_bias, options.layer.attention.qk_norm.is_some(), window) {
                (Some(true), ..) => "qwen2",
                (_, true, _) => "qwen3",
                (_, _, Some(_)) => "mistral",
                _ => "llama",
            };
            if let Some(window) = window {
                set("sliding_window", json!(window));
                if family != "mistral" {
                    let kind = |window: &Option<usize>| match window {
                        Some(_) => "sliding_attention",
                        None => "full_attention",
                    };
                    set("use_sliding_window", json!(true));
                    set("layer_types", json!(windows.iter().map(kind).collect::<Vec<_>>()));
                }
            }
            family
        };
        set("model_type", json!(family));
        let architecture = super::Family::by_name(family).map_or("", |family| family.architecture);
        set("architectures", json!([architecture]));
        Self::from_json(&format!("{:#}\n", Value::from(fields)))
    }
}

/// Refuses options that no family has.
fn expect_family(options: &GptOptions, is_gpt2: bool) -> Result<()> {
    let refused = |option: &'static str, value: String, expected: &str| {
        let with = match is_gpt2 {
            true => "a GPT-2 of Hugging Face has learned_positions, LayerNorm, Gelu and bias",
            false => "a Llama of Hugging Face has RmsNorm, Swiglu, RoPE and no bias",
        };
        let remedy = format!("expected {expected}: {with}");
        Err(Error::Option { part: "hf::Config".into(), option, value, remedy })
    };
    let (norm, activation) =
        if is_gpt2 { (Norm::LayerNorm, Activation::Gelu) } else { (Norm::RmsNorm, Activation::Swiglu) };
    if options.layer.norm.normalization != norm {
        return refused("norm", format!("{:?}", options.layer.norm.normalization), &format!("{norm:?}"));
    }
    if options.layer.norm.zero_centered_gamma {
        return refused("zero_centered_gamma", "true".into(), "false");
    }
    if options.layer.activation != activation {
        return refused("activation", format!("{:?}", options.layer.activation), &format!("{activation:?}"));
    }
    if options.layer.bias != is_gpt2 {
        return refused("bias", options.layer.bias.to_string(), &is_gpt2.to_string());
    }
    expect_plain(options, &refused)?;
    let windows = &options.sliding_windows;
    let is_windowed = windows.iter().any(Option::is_some);
    if is_gpt2 {
        let heads = options.layer.attention.num_attention_heads;
        if options.layer.qkv_bias == Some(false) {
            return refused("qkv_bias", "false".into(), "true");
        }
        if options.layer.attention.qk_norm.is_some() {
            return refused("qk_norm", "true".into(), "false");
        }
        if let Some(groups) = options.layer.attention.num_gqa_groups.filter(|&groups| groups != heads) {
            return refused("num_gqa_groups", groups.to_string(), &format!("{heads}, as there are heads"));
        }
        let width = options.layer.hidden_size / heads.max(1);
        if let Some(size) = options.layer.attention.kv_channels.filter(|&size| size != width) {
            return refused("kv_channels", size.to_string(), &format!("{width}, hidden_size / heads"));
        }
        if is_windowed {
            return refused("sliding_windows", format!("{windows:?}"), "none");
        }
        return Ok(());
    }
    if options.layer.qkv_bias == Some(true) && options.layer.attention.qk_norm.is_some() {
        return refused("qk_norm", "true with qkv_bias".into(), "one of the two");
    }
    let mut all = windows.iter().flatten();
    let first = all.next();
    if all.any(|window| Some(window) != first) {
        return refused("sliding_windows", format!("{windows:?}"), "one length");
    }
    let is_qwen = options.layer.qkv_bias == Some(true) || options.layer.attention.qk_norm.is_some();
    if is_windowed && !is_qwen && windows.contains(&None) {
        return refused("sliding_windows", format!("{windows:?}"), "one in all layers, or in none");
    }
    Ok(())
}

/// Refuses what no family has, whatever its norm and activation.
fn expect_plain(
    options: &GptOptions,
    refused: &dyn Fn(&'static str, String, &str) -> Result<()>,
) -> Result<()> {
    let layer = &options.layer;
    let attention = &layer.attention;
    let flags = [
        ("parallel_attention_mlp", layer.parallel_attention_mlp),
        ("output_layernorm", layer.output_layernorm),
        ("apply_residual_connection_post_layernorm", layer.apply_residual_connection_post_layernorm),
    ];
    if let Some((option, _)) = flags.into_iter().find(|(_, is_set)| *is_set) {
        return refused(option, "true".into(), "false");
    }
    if let Some(scale) = attention.softmax_scale {
        return refused("softmax_scale", scale.to_string(), "none");
    }
    if attention.window.0.is_some() {
        return refused(
            "window",
            format!("{:?}", attention.window),
            "none, and sliding_windows in its place",
        );
    }
    let of_heads = NormOptions { normalization: Norm::RmsNorm, ..layer.norm };
    if let Some(norm) = attention.qk_norm.filter(|norm| *norm != of_heads) {
        return refused("qk_norm", format!("{norm:?}"), &format!("{of_heads:?}"));
    }
    Ok(())
}

/// The field `rope_scaling`, as transformers 4 spells it, which 5 reads, too.
fn rope_scaling(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position,
            attention_factor,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": original_max_position,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
    }
}
