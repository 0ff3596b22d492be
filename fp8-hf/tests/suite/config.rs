//! `config.json` in both spellings, what is refused, and what is kept.

use crate::folders::{full, golden};
use fp8_hf::{Config, Family, Folder, InputScales, Rope, RopeScaling, WeightScales};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::PathBuf;

/// The configurations of every model, as transformers 5 and 4 write them.
fn both(model: &str) -> [Config; 2] {
    ["config.json", "config.v4.json"]
        .map(|file| Config::read(&golden().join("configs").join(model).join(file)).unwrap())
}

#[test]
fn both_spellings_describe_the_same_model() {
    let mut models = 0;
    for entry in fs::read_dir(golden().join("configs")).unwrap() {
        let model = entry.unwrap().file_name().into_string().unwrap();
        let [new, old] = both(&model);
        assert_ne!(new.json(), old.json());
        // Everything but the text.
        let debug = |config: &Config| format!("{config:?}").split(", json: ").next().unwrap().to_owned();
        assert_eq!(debug(&new), debug(&old), "{model}");
        models += 1;
    }
    assert_eq!(models, 11);
}

#[test]
fn fields_have_the_values_of_the_table() {
    // model, hidden, heads, kv, head_dim, layers, ffn, vocab, tied, eps, θ
    let table = [
        ("llama_mha", [32, 4, 4, 8, 3, 80, 65], false, 1e-6, 1e4),
        ("llama_gqa_tied", [32, 4, 2, 8, 2, 64, 96], true, 1e-5, 1e5),
        ("llama_bf16", [32, 4, 2, 8, 2, 272, 264], true, 1e-5, 1e4),
        ("llama_llama3", [48, 3, 1, 16, 2, 64, 64], false, 1e-5, 5e5),
        ("llama_linear", [32, 4, 4, 8, 2, 64, 64], false, 1e-6, 1e4),
        ("llama_yarn", [32, 2, 1, 16, 2, 64, 64], false, 1e-6, 1e4),
        ("llama_head_dim", [40, 4, 2, 16, 2, 72, 70], false, 1e-6, 1e4),
        ("qwen2", [40, 4, 2, 10, 2, 80, 80], true, 1e-6, 1e6),
        ("qwen3", [32, 4, 2, 16, 2, 48, 66], false, 1e-6, 1e6),
        ("mistral_window", [32, 4, 2, 8, 3, 64, 72], false, 1e-5, 1e4),
        ("gpt2", [32, 4, 4, 8, 2, 128, 64], true, 1e-5, 0.0),
    ];
    for (model, sizes, tied, eps, theta) in table {
        for config in both(model) {
            let found = [
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.num_hidden_layers,
                config.intermediate_size,
                config.vocab_size,
            ];
            assert_eq!((found, config.tie_word_embeddings, config.norm_eps), (sizes, tied, eps), "{model}");
            assert_eq!(config.rope.as_ref().map_or(0.0, |rope| rope.theta), theta, "{model}");
            assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(0), &[0][..]), "{model}");
            let window = (model == "mistral_window").then_some(7);
            assert_eq!(config.sliding_windows, vec![window; config.num_hidden_layers], "{model}");
        }
    }
    let scaling = |model: &str| both(model)[1].rope.clone().unwrap().scaling;
    assert_eq!(scaling("llama_linear"), RopeScaling::Linear { factor: 4.0 });
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    assert_eq!(scaling("llama_llama3"), llama3);
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
        original_max_position: 32,
    };
    assert_eq!(scaling("llama_yarn"), yarn);
}

const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}"#;

/// A configuration with some fields changed; `null` stays.
fn with(changes: &Value) -> String {
    let mut map: Map<String, Value> = serde_json::from_str(LLAMA).unwrap();
    map.extend(changes.as_object().unwrap().clone());
    Value::from(map).to_string()
}

fn parsed(changes: &Value) -> Config {
    Config::from_json(&with(changes)).unwrap()
}

#[test]
fn absent_fields_and_null_have_the_defaults() {
    for changes in [
        json!({}),
        json!({"num_key_value_heads": null, "head_dim": null, "rope_scaling": null, "eos_token_id": null}),
    ] {
        let config = parsed(&changes);
        assert_eq!((config.num_key_value_heads, config.head_dim, config.norm_eps), (2, 4, 1e-6));
        assert_eq!(config.rope, Some(Rope { theta: 10000.0, scaling: RopeScaling::None }));
        assert!(
            !config.tie_word_embeddings && config.eos_token_ids.is_empty() && config.quantization.is_none()
        );
    }
    assert_eq!(parsed(&json!({"model_type": "qwen3"})).head_dim, 128);
    assert_eq!(parsed(&json!({"eos_token_id": [3, 5]})).eos_token_ids, [3, 5]);
}

#[test]
fn yarn_has_every_field() {
    let of = |extra: Value| {
        let mut scaling = json!({"type": "yarn", "factor": 8.0});
        scaling.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        match parsed(&json!({"rope_scaling": scaling})).rope.unwrap().scaling {
            RopeScaling::Yarn {
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
                original_max_position,
                ..
            } => (beta_fast, beta_slow, truncate, attention_factor, original_max_position),
            other => panic!("{other:?}"),
        }
    };
    let m = |scale: f64| 0.1 * scale * 8f64.ln() + 1.0;
    assert_eq!(of(json!({})), (32.0, 1.0, true, m(1.0), 64));
    assert_eq!(
        of(json!({"beta_fast": 16, "beta_slow": 2, "truncate": false})),
        (16.0, 2.0, false, m(1.0), 64)
    );
    assert_eq!(
        of(json!({"attention_factor": 1.5, "original_max_position_embeddings": 32})),
        (32.0, 1.0, true, 1.5, 32)
    );
    assert_eq!(of(json!({"mscale": 1.0, "mscale_all_dim": 0.5})).3, m(1.0) / m(0.5));
    assert_eq!(of(json!({"mscale": 0.7, "mscale_all_dim": 0.0})).3, m(1.0));
}

#[test]
fn the_longest_sequence_is_that_of_the_extended_model() {
    let longest = |scaling: Value| parsed(&json!({"rope_scaling": scaling})).longest_sequence();
    assert_eq!(longest(json!(null)), 64);
    let original = "original_max_position_embeddings";
    assert_eq!(longest(json!({"type": "linear", "factor": 2.5})), 160);
    assert_eq!(longest(json!({"type": "linear", "factor": 2.0, original: 32})), 64);
    assert_eq!(longest(json!({"type": "linear", "factor": 1e300})), 1 << 31);
    assert_eq!(longest(json!({"type": "yarn", "factor": 4.0, original: 32})), 128);
    assert_eq!(longest(json!({"type": "yarn", "factor": 4.0})), 256);
    let llama3 =
        json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, original: 4});
    assert_eq!(longest(llama3), 64);
}

#[test]
fn windows_follow_the_rule_of_each_family() {
    let windows = |changes: Value| parsed(&changes).sliding_windows;
    let kinds = json!(["full_attention", "sliding_attention"]);
    assert_eq!(windows(json!({"sliding_window": 9})), [None, None]);
    assert_eq!(windows(json!({"model_type": "mistral", "sliding_window": 9})), [Some(9); 2]);
    assert_eq!(windows(json!({"model_type": "qwen2", "sliding_window": 9})), [None, None]);
    let by_type = json!({"model_type": "qwen2", "sliding_window": 9, "layer_types": kinds});
    assert_eq!(windows(by_type), [None, Some(9)]);
    let flagged = json!({"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(flagged), [None, Some(9)]);
    // An absent field has transformers' default; `null` means no window.
    assert_eq!(windows(json!({"model_type": "mistral"})), [Some(4096); 2]);
    assert_eq!(windows(json!({"model_type": "mistral", "sliding_window": null})), [None; 2]);
    let all = json!({"model_type": "mistral", "layer_types": ["sliding_attention", "sliding_attention"]});
    assert_eq!(windows(all), [Some(4096); 2]);
    let flagged =
        |first: Value| json!({"model_type": "qwen3", "use_sliding_window": true, "max_window_layers": first});
    assert_eq!(windows(flagged(json!(0))), [Some(4096); 2]);
    assert_eq!(windows(flagged(json!(null))), [None; 2]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (changes, text) in [
        (
            json!({"model_type": "gemma3"}),
            "`model_type` is \"gemma3\": expected one of llama, mistral, qwen2, qwen3, gpt2",
        ),
        (json!({"model_type": null}), "`model_type` is nothing: expected one of llama"),
        (
            json!({"architectures": ["LlamaForSequenceClassification"]}),
            "`architectures` is [\"LlamaForSequenceClassification\"]: expected [\"LlamaForCausalLM\"]",
        ),
        (json!({"hidden_size": null}), "`hidden_size` is missing"),
        (json!({"hidden_size": "8"}), "`hidden_size` is \"8\": expected an integer"),
        (json!({"hidden_size": -8}), "`hidden_size` is -8: expected an integer"),
        (json!({"hidden_size": 0}), "`hidden_size` is 0: expected at least 1"),
        (json!({"vocab_size": 1u64 << 33}), "`vocab_size` is 8589934592: expected at most 2³¹"),
        (json!({"num_hidden_layers": 1_000_000}), "`num_hidden_layers` is 1000000: expected at most 10000"),
        (
            json!({"num_attention_heads": 3}),
            "`num_attention_heads` is 3: expected a divisor of the model's width, 8",
        ),
        (
            json!({"num_key_value_heads": 3}),
            "`num_key_value_heads` is 3: expected a divisor of num_attention_heads, 2",
        ),
        (json!({"head_dim": 5}), "`head_dim` is 5: expected an even number"),
        (
            json!({"model_type": "mistral", "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}),
            "`layer_types` has \"full_attention\": expected \"sliding_attention\" for all layers of a mistral model, as \
             `sliding_window` says",
        ),
        (json!({"attention_bias": true}), "`attention_bias` is true: expected false"),
        (
            json!({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
            "`rope_theta` is 500000.0: expected 10000, as `rope_parameters.rope_theta` is: versions of transformers differ",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}}),
            "`rope_scaling.attn_factor` is not supported: transformers ignores it: remove it, or give its value as \
             `attention_factor`",
        ),
        (
            json!({"quantization_config": {"quant_method": "fp8", "scale_fmt": "e5m3"}}),
            "`quantization_config.scale_fmt` is \"e5m3\": expected \"ue8m0\", or null for f32 scales",
        ),
        (
            json!({"quantization_config": {"quant_method": "fp8", "modules_to_convert": ["down_proj"]}}),
            "`quantization_config.modules_to_convert` is [\"down_proj\"]: expected null",
        ),
        (
            json!({"compression_config": {"quant_method": "compressed-tensors", "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float",
                "strategy": "channel", "dynamic": true}}}}}),
            "`compression_config.config_groups.weights.dynamic` is true: expected false: the scales of weights are in",
        ),
        (json!({"mlp_bias": true}), "`mlp_bias` is true: expected false"),
        (json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\": expected \"silu\""),
        (json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5: expected 1"),
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "`rope_scaling.type` is \"dynamic\": expected \"default\", \"linear\"",
        ),
        (
            json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
            "`rope_scaling.rope_type` is \"longrope\"",
        ),
        (
            json!({"rope_parameters": {"rope_type": "linear"}}),
            "`rope_parameters.factor` is missing: linear needs it",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "`rope_parameters.full_attention` is not supported",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 0}}),
            "`rope_scaling.factor` is 0: expected a number greater than 0",
        ),
        (json!({"rms_norm_eps": "1e-6"}), "`rms_norm_eps` is \"1e-6\": expected a number"),
        (json!({"tie_word_embeddings": 1}), "`tie_word_embeddings` is 1: expected true or false"),
        (json!({"eos_token_id": -1}), "`eos_token_id` is -1: expected a token id"),
        (
            json!({"model_type": "mistral", "sliding_window": 0}),
            "`sliding_window` is 0: expected at least 1, or null",
        ),
        (json!({"layer_types": ["full_attention"]}), "`layer_types` has 1 entries: expected 2"),
        (
            json!({"layer_types": ["full_attention", "chunked_attention"]}),
            "`layer_types` has \"chunked_attention\"",
        ),
        (
            json!({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}),
            "`sliding_window` is nothing: expected a number",
        ),
        (
            json!({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": false, "layer_types": ["full_attention", "sliding_attention"]}),
            "`use_sliding_window` is false: expected true",
        ),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "`quantization_config.quant_method` is \"gptq\": expected \"compressed-tensors\", \"fp8\" or \"modelopt\"",
        ),
        (
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}),
            "`quantization_config.weight_block_size` is [128]: expected two positive integers",
        ),
        (
            json!({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}),
            "`quantization_config.format` is \"pack-quantized\": expected \"float-quantized\"",
        ),
        (
            json!({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}}),
            "`quantization_config.kv_cache_scheme` is \"static\": expected null, which keeps the KV cache in high precision",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "`rope_type` is both \"yarn\" and \"default\" in `rope_scaling` and `rope_parameters`: give one of the two",
        ),
        (
            json!({"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"rope_theta": 6.0}}),
            "`rope_theta` is both 6.0 and 5.0",
        ),
        (
            json!({"original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}}),
            "`original_max_position_embeddings` is 8: expected 9, as `rope_scaling.original_max_position_embeddings` is",
        ),
    ] {
        let error = Config::from_json(&with(&changes)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("config.json: {text}")), "{changes}: {error}");
    }
    let gpt2 = r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "scale_attn_by_inverse_layer_idx": true}"#;
    let error = Config::from_json(gpt2).unwrap_err().to_string();
    assert_eq!(
        error,
        "config.json: `scale_attn_by_inverse_layer_idx` is true: expected false: the other is not supported"
    );
    let wide = r#"{"model_type": "gpt2", "n_embd": 2147483648, "n_layer": 1, "n_head": 2, "vocab_size": 16}"#;
    let error = Config::from_json(wide).unwrap_err().to_string();
    assert_eq!(
        error,
        "config.json: `n_embd` is 2147483648: expected at most 2²⁹, as `n_inner` is four times as much"
    );
    for text in ["", "[]", "{", "{\"model_type\": \"llama\"} x"] {
        let error = Config::from_json(text).unwrap_err().to_string();
        assert!(error.starts_with("config.json: not a JSON object"), "{error}");
    }
    let twice = LLAMA.replace("\"vocab_size\": 16", "\"vocab_size\": 16, \"vocab_size\": 17");
    assert_eq!(Config::from_json(&twice).unwrap_err().to_string(), "config.json: `vocab_size` occurs twice");
    let twice =
        LLAMA.replacen('{', r#"{"rope_scaling": {"type": "linear", "factor": 2.0, "factor": 4.0},"#, 1);
    let error = Config::from_json(&twice).unwrap_err().to_string();
    assert_eq!(error, "config.json: `rope_scaling.factor` occurs twice");
}

#[test]
fn spellings_that_agree_and_quantizations_under_other_names_are_read() {
    let linear = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0});
    let both = parsed(&json!({"rope_parameters": linear, "rope_scaling": {"type": "linear", "factor": 2.0}}));
    assert_eq!(both.rope, parsed(&json!({ "rope_parameters": linear })).rope);

    let numbers = json!({"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"rope_theta": 10000}});
    assert_eq!(parsed(&numbers).rope.unwrap().theta, 10000.0);
    let aliases = json!({"rope_scaling": {"type": "linear", "rope_type": "default"}});
    assert_eq!(parsed(&aliases).rope.unwrap().scaling, RopeScaling::None);

    let numbers = json!({"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"rope_theta": 10000}});
    assert_eq!(parsed(&numbers).rope.unwrap().theta, 10000.0);
    let aliases = json!({"rope_scaling": {"type": "linear", "rope_type": "default"}});
    assert_eq!(parsed(&aliases).rope.unwrap().scaling, RopeScaling::None);

    let group =
        json!({"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}});
    for format in ["float-quantized", "naive-quantized"] {
        let quantization = json!({
            "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
            "sparsity_config": {"format": "dense", "global_sparsity": 0.1}, "kv_cache_scheme": null,
        });
        // The second is the name in old files of Neural Magic.
        for key in ["quantization_config", "compression_config"] {
            let found = parsed(&json!({ key: quantization })).quantization.unwrap();
            assert_eq!((found.weights, found.inputs), (WeightScales::Channel, InputScales::None));
        }
    }
    for (scale_fmt, powers) in [(json!(null), false), (json!("ue8m0"), true)] {
        let quantization = json!({"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": scale_fmt, "weight_block_size": [128, 128]});
        let found = parsed(&json!({ "quantization_config": quantization })).quantization.unwrap();
        assert_eq!((found.power_2_scales, found.inputs), (powers, InputScales::Group(128)));
    }
}

#[test]
fn fields_that_change_nothing_are_accepted() {
    // Qwen2 has biases in q, k and v in any case.
    for attention_bias in [true, false] {
        let config = parsed(&json!({"model_type": "qwen2", "attention_bias": attention_bias}));
        assert_eq!(config.gpt_options().layer.qkv_bias, Some(true));
    }
    let theta = json!({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}});
    assert_eq!(parsed(&theta).rope.unwrap().theta, 5e5);
}

#[test]
fn tensors_are_those_of_the_files() {
    let mut folders: Vec<PathBuf> =
        ["llama_mha", "llama_gqa_tied", "llama_bf16"].map(|model| golden().join(model)).into();
    if let Some(full) = full() {
        folders.extend(
            Family::ALL.iter().map(|family| full.join(family.model_type)).filter(|path| path.exists()),
        );
        folders.extend(
            ["llama_linear", "llama_llama3", "llama_yarn", "llama_head_dim", "mistral_window"]
                .map(|model| full.join(model)),
        );
    }
    for path in folders {
        let folder = Folder::open(&path).unwrap();
        let mut specs: Vec<String> = folder.config.tensors().into_iter().map(|spec| spec.name).collect();
        specs.sort();
        let names: Vec<&str> = folder.weights.names().collect();
        assert_eq!(specs, names, "{}", path.display());
    }
}

#[test]
fn the_end_of_a_text_comes_from_the_generation_config() {
    let place = tempfile::tempdir().unwrap();
    crate::folders::copy(&golden().join("llama_gqa_tied"), place.path());
    fs::write(place.path().join("generation_config.json"), r#"{"eos_token_id": [7, 9]}"#).unwrap();
    assert_eq!(Folder::open(place.path()).unwrap().config.eos_token_ids, [7, 9]);
    let text = r#"{"eos_token_id": 7, "eos_token_id": 9}"#;
    fs::write(place.path().join("generation_config.json"), text).unwrap();
    let error = Folder::open(place.path()).unwrap_err().to_string();
    assert!(error.ends_with("generation_config.json: `eos_token_id` occurs twice"), "{error}");
    fs::write(place.path().join("generation_config.json"), r#"{"eos_token_id": "x"}"#).unwrap();
    let error = Folder::open(place.path()).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "generation_config.json: `eos_token_id` is \"x\": expected a token id or a list of them"
        ),
        "{error}"
    );
}

/// Python's json writes `Infinity`, `-Infinity` and `NaN`, and reads them.
#[test]
fn numbers_of_python_are_read_where_they_do_not_matter() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("model");
    crate::folders::copy(&golden().join("llama_bf16"), &folder);
    let add = |file: &str, fields: &str| {
        let path = folder.join(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen('{', &format!("{{{fields},"), 1)).unwrap();
    };
    let before = Folder::open(&folder).unwrap();
    add(
        "config.json",
        r#""time_step_limit": [0.0, Infinity], "low": -Infinity, "none": NaN, "text": "Infinity""#,
    );
    add("generation_config.json", r#""penalty": Infinity"#);
    let opened = Folder::open(&folder).unwrap();
    assert_eq!(opened.config.tensors(), before.config.tensors());
    // What is written keeps them.
    crate::folders::quantize(&folder, &place.path().join("fp8"), fp8_hf::Scheme::Channel);
    let written = fs::read_to_string(place.path().join("fp8/config.json")).unwrap();
    assert!(written.contains("[0.0, Infinity]") && written.contains("\"low\": -Infinity"), "{written}");
    assert!(Folder::open(&place.path().join("fp8")).unwrap().config.quantization.is_some());

    add("config.json", r#""use_sliding_window": Infinity"#);
    let error = Folder::open(&folder).unwrap_err().to_string();
    assert!(error.ends_with("`use_sliding_window` is \"Infinity\": expected true or false"), "{error}");
}
