//! `fp8 merge`: an adapter as a part of a model's weights.

use crate::failure::Failure;
use crate::model::{open_adapter, with_threads};
use crate::table::{bytes, count, quoted};
use crate::values::{dtype, scheme, threads};
use crate::{in_fp8, interrupt};
use clap::Args;
use fp8_hf::{Adapter, Folder, Scheme, Survival};
use fp8_nn::prelude::DType;
use serde_json::json;
use std::path::{Path, PathBuf};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 merge SmolLM2-135M adapter SmolLM2-135M-tuned

The sums are computed in f32 and rounded once to the type of the model's files. All other tensors keep their bytes, and the tokenizer, the chat template and generation_config.json are \
copied. A model in FP8 is written without FP8, in the type of its embedding, unless --scheme makes it one again. With --scheme, the sums are \
quantized, and what is printed says how much of the update survives.";

#[derive(Debug, Args)]
pub(crate) struct Merge {
    /// The Hugging Face folder that the adapter was trained for
    base: PathBuf,
    /// The folder of a LoRA adapter, as peft writes it: adapter_config.json and adapter_model.safetensors
    adapter: PathBuf,
    /// The folder to create
    output: PathBuf,
    /// The type to write: f32, bf16 or f16 (default: that of each tensor in the files)
    #[arg(long, value_parser = dtype)]
    dtype: Option<DType>,
    /// Writes the sums in FP8: tensor, channel, block128 or vllm (default: in high precision)
    #[arg(long, value_name = "SCHEME", value_parser = scheme, conflicts_with = "dtype")]
    scheme: Option<Scheme>,
    /// The number of threads (default: one for each core)
    #[arg(long, value_parser = threads, allow_negative_numbers = true)]
    threads: Option<usize>,
    /// Prints JSON instead of sentences
    #[arg(long)]
    json: bool,
}

/// Merges, and returns what is printed.
pub(crate) fn run(options: &Merge) -> Result<String, Failure> {
    let folder = Folder::open(&options.base)?;
    let adapter = open_adapter("", &options.adapter, &folder)?;
    interrupt::note_output(&options.output);
    let survival = with_threads(options.threads, || match options.scheme {
        None => adapter.merge(&folder, &options.output, options.dtype).map(|()| None).map_err(Failure::from),
        Some(scheme) => quantized(&adapter, &folder, &options.output, scheme).map(Some),
    })?;
    let written = Folder::open(&options.output)?;
    let tensors = written.weights.names().filter_map(|name| written.weights.info(name));
    let size: u64 = tensors.map(|info| info.bytes).sum();
    let (modules, values) = (adapter.modules().count(), adapter.num_parameters());
    if options.json {
        let value = json!({
            "output": options.output.display().to_string(),
            "modules": modules,
            "adapter_parameters": values,
            "bytes": size,
            "update_kept": survival.map(|survival| survival.kept),
            "update_noise": survival.map(|survival| survival.noise),
        });
        return Ok(format!("{value:#}\n"));
    }
    let survives = survival.map(|survival| {
        format!(
            "{:.1} % of the update survives in FP8, beside rounding of {:.2} times its size\n",
            100.0 * survival.kept,
            survival.noise
        )
    });
    Ok(format!(
        "{}: {} with an adapter of {} values added, {}\n{}what changed: fp8 inspect {} --against {}\n",
        options.output.display(),
        count(modules, "projection"),
        values,
        bytes(size),
        survives.unwrap_or_default(),
        quoted(&options.output),
        quoted(&options.base),
    ))
}

/// Writes the sums in FP8, and returns how much of the update is left.
fn quantized(adapter: &Adapter, folder: &Folder, out: &Path, scheme: Scheme) -> Result<Survival, Failure> {
    in_fp8::write(out, scheme, |whole| adapter.merge(folder, whole, None))?;
    Ok(adapter.survival(folder, &Folder::open(out)?)?)
}
