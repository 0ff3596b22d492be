//! Adapters that are written as peft writes them.

use super::model::last;
use super::{A, B, CONFIG, Linear, PREFIX, TENSORS, is_named, linears};
use crate::config::Config;
use crate::save_model::writing;
use crate::wholes::{Wholes, on_first};
use crate::{AtomicFolder, Error, Result};
use fp8_nn::checkpoint::stream::{Elements, file_dtype};
use fp8_nn::{Gpt, Layer, Lora, Loras, Parameter, parameters};
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Writes the adapters of a model to the new folder `out` as peft does: `adapter_config.json` and `adapter_model.safetensors`, under
/// Hugging Face's names of modules, in the dtype of the parameters. `config` is that of the folder that the model was loaded from, and
/// `base` its name or path, for programs that look for it. The folder appears whole or not at all.
///
/// ```
/// use fp8_hf::{self as hf, Adapter, Config, save_adapter};
/// use fp8_nn::prelude::*;
/// use fp8_nn::LoraOptions;
///
/// # let place = std::env::temp_dir().join(format!("fp8-save-adapter-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// let config = Config::from_json(
///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
///         "num_attention_heads": 2}"#,
/// )?;
/// let mut rng = fp8_nn::rand::rng();
/// let mut model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut rng)?;
/// // Beside the output projection of each attention.
/// let options = LoraOptions { rank: 4, ..Default::default() };
/// let mut added = Ok(());
/// model.visit_loras_mut(&mut |loras| {
///     if loras.path().ends_with("attention.proj") {
///         added = std::mem::replace(&mut added, Ok(())).and_then(|()| loras.add("o_proj", 0..8, &options, &mut rng));
///     }
/// });
/// added?;
/// save_adapter(&place.join("adapter"), &model, &config, "my-model")?;
///
/// let adapter = Adapter::open(&place.join("adapter"), &config)?;
/// let modules: Vec<&str> = adapter.modules().collect();
/// assert_eq!(modules, ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]);
/// assert_eq!((adapter.num_parameters(), adapter.base()), (2 * (4 * 8 + 8 * 4), Some("my-model")));
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A model without adapters, or with one of rows that are no module of Hugging Face's; a value that is not finite; something exists at `out`; a file that cannot be
/// written; on other ranks than the first of those that share the layers of a model, [`Error::Rank`] if that fails. They call it
/// together, as [`save_model`](crate::save_model).
pub fn save_adapter(out: &Path, model: &Gpt, config: &Config, base: &str) -> Result<()> {
    on_first(model, &writing(out), |wholes| write(out, model, config, base, wholes))
}

fn write(out: &Path, model: &Gpt, config: &Config, base: &str, wholes: &Wholes<'_>) -> Result<()> {
    let problem = |problem: String| Error::File { path: out.to_owned(), problem };
    let mut by_path: HashMap<&str, &Loras> = HashMap::new();
    let mut count = 0;
    model.visit_loras(&mut |loras| {
        count += loras.all().len();
        by_path.insert(loras.path(), loras);
    });
    let all = linears(config);
    let mut modules: Vec<(&Linear, &Lora)> = Vec::new();
    for linear in &all {
        let Some(place) = config.place(&linear.module) else { continue };
        let path = format!("{}.{}", model.path(), place.layer);
        let loras = by_path.get(&*path).map_or(&[][..], |loras| loras.all());
        modules.extend(loras.iter().find(|lora| lora.rows() == place.rows).map(|lora| (linear, lora)));
    }
    if count == 0 {
        return Err(problem("the model has no adapter: add some before it is saved".into()));
    }
    // A layer may train adapters that it does not show.
    let matrices = parameters(model).into_iter().filter(|parameter| parameter.is_adapter()).count();
    if modules.len() < count || 2 * count < matrices {
        return Err(problem("the model has adapters of rows that are no module of its layers".into()));
    }
    let tensors: Vec<(String, &Parameter)> = modules
        .iter()
        .flat_map(|(linear, lora)| {
            let name = |half: &str| format!("{PREFIX}{}{half}", linear.module);
            [(name(A), lora.a()), (name(B), lora.b())]
        })
        .collect();
    let mut bytes = Vec::with_capacity(tensors.len());
    for (name, parameter) in &tensors {
        let whole = wholes.value(parameter)?;
        let values = whole.to_f32_vec()?;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            return Err(problem(format!("`{name}` has a value that is {value}: the training has diverged")));
        }
        let mut data = Vec::new();
        let write = Elements::of(&whole)?.write(&mut data);
        write.map_err(|source| Error::Io { path: out.to_owned(), source })?;
        bytes.push(data);
    }
    let views = tensors.iter().zip(&bytes).map(|((name, parameter), bytes)| {
        let view = TensorView::new(file_dtype(parameter.dtype()), parameter.global_shape().to_vec(), bytes);
        view.map(|view| (name.as_str(), view))
    });
    let views =
        views.collect::<std::result::Result<Vec<_>, _>>().map_err(|error| problem(error.to_string()))?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let file = safetensors::serialize(views, Some(metadata)).map_err(|error| problem(error.to_string()))?;
    let options = serde_json::to_string_pretty(&options(config, &all, &modules, base));
    let options = options.map_err(|error| problem(error.to_string()))?;
    let write = || {
        let folder = AtomicFolder::create(out)?;
        fs::write(folder.path().join(TENSORS), &file)?;
        fs::write(folder.path().join(CONFIG), options + "\n")?;
        folder.commit()
    };
    write().map_err(|source| Error::Io { path: out.to_owned(), source })
}

/// The fields of `adapter_config.json`, of which readers need these.
fn options(config: &Config, all: &[Linear], modules: &[(&Linear, &Lora)], base: &str) -> Value {
    let rank_and_alpha = |lora: &Lora| {
        let rank = lora.a().global_shape().matrix()[0];
        // α = s · r, where s is an f32: nearly an integer is one.
        let alpha = f64::from(lora.scale()) * rank as f64;
        let near = (alpha - alpha.round()).abs() <= 1e-6 * alpha.abs();
        (rank, if near { alpha.round() } else { alpha })
    };
    let (rank, alpha) = modules.first().map_or((1, 1.0), |(_, lora)| rank_and_alpha(lora));
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for (linear, lora) in modules {
        let own = rank_and_alpha(lora);
        if own.0 != rank {
            ranks.insert(linear.module.clone(), json!(own.0));
        }
        if own.1.to_bits() != alpha.to_bits() {
            alphas.insert(linear.module.clone(), number(own.1));
        }
    }
    // A last name stands for all modules that it ends; else whole names do.
    let has = |module: &str| modules.iter().any(|(linear, _)| linear.module == module);
    let mut targets: Vec<&str> = Vec::new();
    for (linear, _) in modules {
        let name = last(&linear.module);
        let stands = all.iter().filter(|other| is_named(&other.module, name)).all(|other| has(&other.module));
        targets.push(if stands { name } else { &linear.module });
    }
    targets.sort_unstable();
    targets.dedup();
    json!({
        "alpha_pattern": alphas,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": config.family.is_transposed,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": number(alpha),
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": ranks,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    })
}

/// An integer where the number is one, as most readers expect of `lora_alpha`.
fn number(value: f64) -> Value {
    let integer = value as i64;
    if integer as f64 == value { json!(integer) } else { json!(value) }
}
