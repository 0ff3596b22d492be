//! Fine-tunes a model that people have, in high precision and in FP8, beside losses of PyTorch.
//!
//! The windows, the initial adapters and the options are those of a script that did the same in PyTorch and wrote its losses:
//! `run.safetensors` has `train` [steps, tokens + 1] and `held_out`, and `run.json` a list of runs, each with its log.

use crate::result::Result;
use fp8_hf::data::Sequence;
use fp8_hf::{Adapter, Folder, Trainer, TrainerOptions};
use fp8_nn::prelude::*;
use fp8_nn::{AnyOptimizerOptions, Schedule};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[derive(clap::Args)]
pub(crate) struct RealTraining {
    /// A Hugging Face folder in f32
    model: PathBuf,
    /// The folder with run.safetensors and run.json
    windows: PathBuf,
    /// Steps of each run, to which the schedule belongs
    #[arg(long, default_value_t = 60)]
    steps: usize,
    /// Runs: full or lora, a dash, and off or a recipe
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "full-off,lora-off,full-current,lora-current,full-delayed,lora-delayed,full-block,lora-block"
    )]
    runs: Vec<String>,
    /// Steps that are taken; what is then printed is no result but the time of a step
    #[arg(long)]
    only: Option<usize>,
    /// Threads
    #[arg(long)]
    threads: Option<usize>,
}

const RANK: usize = 16;
const ALPHA: usize = 32;
const MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

pub(crate) fn run(options: &RealTraining) -> Result<ExitCode> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.unwrap_or(0)).build()?;
    let text = |error: Box<dyn std::error::Error>| error.to_string();
    pool.install(|| options.runs.iter().try_for_each(|name| one(options, name).map_err(text)))?;
    Ok(ExitCode::SUCCESS)
}

fn one(options: &RealTraining, name: &str) -> Result {
    let (kind, recipe) = name.split_once('-').ok_or("expected full-RECIPE or lora-RECIPE")?;
    let is_lora = kind == "lora";
    let file = fs::read(options.windows.join("run.safetensors"))?;
    let file = SafeTensors::deserialize(&file)?;
    let (train, held_out) = (windows(&file, "train")?, windows(&file, "held_out")?);
    let folder = Folder::open(&options.model)?;
    let place = tempfile::tempdir()?;
    let adapter = is_lora.then(|| first_adapter(&folder, place.path())).transpose()?;
    let recipe = if recipe == "off" { Recipe::off() } else { Recipe::from_name(recipe)? };
    let (lr, weight_decay) = if is_lora { (1e-3, 0.0) } else { (1e-4, 0.1) };
    let seq = train.first().map_or(0, |window| window.ids.len());
    let optimizer = AnyOptimizerOptions::AdamW(AdamWOptions { weight_decay, ..Default::default() });
    let trainer = TrainerOptions { recipe, seq, optimizer, ..Default::default() };
    let mut trainer = Trainer::new(folder, adapter, &trainer, &Device::cpu(), None)?;
    Device::cpu().reset_peak_memory();
    let schedule = Schedule::cosine(lr, 6, options.steps as u64, 0.1)?;
    let before = trainer.evaluate(held_out.len(), &mut |index| Ok(held_out[index].clone()))?.loss;
    let (mut losses, mut seconds) = (Vec::new(), Vec::new());
    for (step, window) in train.iter().enumerate().take(options.only.unwrap_or(options.steps)) {
        let start = Instant::now();
        let done = trainer.step(1, &mut |_| Ok(window.clone()), schedule.lr(step as u64))?;
        seconds.push(start.elapsed().as_secs_f64());
        losses.push(done.loss);
    }
    let after = trainer.evaluate(held_out.len(), &mut |index| Ok(held_out[index].clone()))?.loss;
    seconds.sort_by(f64::total_cmp);
    let memory = trainer.peak_memory();
    let mut line = json!({
        "run": name,
        "steps": losses.len(),
        "held_out_before": before,
        "held_out_after": after,
        "loss_first": losses.first(),
        "loss_last": losses.last(),
        "seconds_per_step_median": seconds.get(seconds.len() / 2),
        "seconds_per_step_min": seconds.first(),
        "memory": {
            "parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer,
            "saved": memory.saved, "temporary": memory.temporary,
        },
    });
    if name.ends_with("-off") {
        let (distance, count) = distance(&options.windows, kind, options.steps, &losses)?;
        line["largest_distance_of_a_loss"] = json!(distance);
        line["compared_losses"] = json!(count);
    }
    println!("{line}");
    Ok(())
}

/// Returns the largest relative distance of the losses from those of PyTorch, and how many were compared.
fn distance(folder: &Path, kind: &str, steps: usize, losses: &[f64]) -> Result<(f64, usize)> {
    let recorded: Value = serde_json::from_str(&fs::read_to_string(folder.join("run.json"))?)?;
    let log = recorded["runs"][format!("{kind}_f32, {steps} steps")]["log"].as_array().cloned();
    let pairs = log.unwrap_or_default().into_iter().zip(losses);
    let distances: Vec<f64> =
        pairs.filter_map(|(line, loss)| Some((loss / line["loss"].as_f64()? - 1.0).abs())).collect();
    Ok((distances.iter().copied().fold(0.0, f64::max), distances.len()))
}

fn windows(file: &SafeTensors<'_>, name: &str) -> Result<Vec<Sequence>> {
    let tensor = file.tensor(name)?;
    let &[_, length] = tensor.shape() else { return Err(format!("`{name}` has no windows").into()) };
    let ids: Vec<i32> = match tensor.dtype() {
        Dtype::I32 => tensor.data().as_chunks::<4>().0.iter().map(|&id| i32::from_le_bytes(id)).collect(),
        Dtype::U16 => {
            tensor.data().as_chunks::<2>().0.iter().map(|&id| u16::from_le_bytes(id).into()).collect()
        }
        other => return Err(format!("`{name}` is {other:?}").into()),
    };
    let sequence = |window: &[i32]| Sequence {
        ids: window[..length - 1].to_vec(),
        targets: window[1..].to_vec(),
        lengths: vec![length - 1],
    };
    Ok(ids.chunks(length).map(sequence).collect())
}

/// The adapter that the script begins with: A of the i-th module, by layers, from SplitMix64 with seed i, and B = 0.
fn first_adapter(folder: &Folder, place: &Path) -> Result<Adapter> {
    let specs = folder.config.tensors();
    let mut tensors: Vec<(String, [usize; 2], Vec<u8>)> = Vec::new();
    let mut index = 0;
    for layer in 0..folder.config.num_hidden_layers {
        for module in MODULES {
            let name = format!("model.layers.{layer}.{module}");
            let weight = format!("{name}.weight");
            let spec = specs.iter().find(|spec| spec.name == weight).ok_or("a module is missing")?;
            let [rows, cols] = spec.shape.matrix();
            let bound = 1.0 / (cols as f64).sqrt();
            let a =
                split_mix(index, RANK * cols).flat_map(|x| (((2.0 * x - 1.0) * bound) as f32).to_le_bytes());
            tensors.push((format!("base_model.model.{name}.lora_A.weight"), [RANK, cols], a.collect()));
            tensors.push((
                format!("base_model.model.{name}.lora_B.weight"),
                [rows, RANK],
                vec![0; 4 * rows * RANK],
            ));
            index += 1;
        }
    }
    let views: HashMap<&str, TensorView<'_>> = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(Dtype::F32, shape.to_vec(), bytes)?)))
        .collect::<Result<_>>()?;
    fs::write(place.join("adapter_model.safetensors"), safetensors::serialize(views, None)?)?;
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": MODULES.map(|module| module.rsplit('.').next()),
    });
    fs::write(place.join("adapter_config.json"), config.to_string())?;
    Ok(Adapter::open(place, &folder.config)?)
}

/// Numbers from 0 to 1 of SplitMix64.
fn split_mix(seed: u64, count: usize) -> impl Iterator<Item = f64> {
    (1..=count as u64).map(move |n| {
        let mut z = seed.wrapping_add(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    })
}
