//! `fp8 merge`: an adapter as a part of a model's weights.

use crate::failure::Failure;
use crate::interrupt;
use crate::model::{open_adapter, with_threads};
use crate::table::{bytes, count, quoted};
use crate::values::{dtype, threads};
use clap::Args;
use fp8_hf::Folder;
use fp8_nn::prelude::DType;
use serde_json::json;
use std::path::PathBuf;

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 merge SmolLM2-135M adapter SmolLM2-135M-tuned

The sums are computed in f32 and rounded once to the type of the model's files. All other tensors keep their bytes, and the tokenizer, the chat template and generation_config.json are \
copied. A model in FP8 is written without FP8, in the type of its embedding: fp8 quantize makes it one again.";

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
    with_threads(options.threads, || Ok(adapter.merge(&folder, &options.output, options.dtype)?))?;
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
        });
        return Ok(format!("{value:#}\n"));
    }
    Ok(format!(
        "{}: {} with an adapter of {} values added, {}\nwhat changed: fp8 inspect {} --against {}\n",
        options.output.display(),
        count(modules, "projection"),
        values,
        bytes(size),
        quoted(&options.output),
        quoted(&options.base),
    ))
}
