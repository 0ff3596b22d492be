//! `fp8 export`: a training checkpoint as a Hugging Face folder.

use crate::failure::Failure;
use crate::interrupt;
use crate::model::with_threads;
use crate::progress::{Unit, watch};
use crate::quantize::split_groups;
use crate::table::{bytes, quoted};
use crate::values::{dtype, scheme, threads};
use clap::Args;
use fp8_hf::{self as hf, Config, ExportOptions, Exported, QuantizeOptions, Scheme};
use fp8_nn::prelude::DType;
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 export run/fp8 model --scheme tensor --static-inputs

The checkpoint is a folder of fp8_nn's checkpoint::save, or a file of save_parameters. It says which model it is if its metadata \
has the key hf.config; if not, --config does.";

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The checkpoint: a folder with checkpoint.safetensors, or a file of parameters
    checkpoint: PathBuf,
    /// The folder to create
    output: PathBuf,
    /// The model's config.json, or a folder that has it, whose tokenizer is copied (default: that of the checkpoint)
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// f32, bf16 or f16, for what is not FP8 (default: that of the parameters)
    #[arg(long, value_parser = dtype)]
    dtype: Option<DType>,
    /// Quantizes weights: tensor, channel, block128, vllm, nvfp4 or nvfp4a16, as fp8 quantize --help explains
    #[arg(long, value_parser = scheme)]
    scheme: Option<Scheme>,
    /// With tensor, vllm and nvfp4, which needs them: static scales of inputs, from the amaxes of training under delayed scaling
    #[arg(long)]
    static_inputs: bool,
    /// With a scheme: layers that stay as they are, as in fp8 quantize; can be repeated
    #[arg(long, value_name = "PATTERN")]
    ignore: Vec<String>,
    /// Lets block128 write matrices whose dimensions are not multiples of 128, and nvfp4 those whose columns are not multiples of 16,
    /// which transformers cannot read
    #[arg(long)]
    allow_ragged: bool,
    /// The number of threads (default: one for each core)
    #[arg(long, value_parser = threads, allow_negative_numbers = true)]
    threads: Option<usize>,
    /// Prints JSON instead of sentences
    #[arg(long)]
    json: bool,
}

/// Exports, and returns what is printed.
pub(crate) fn run(options: &Export) -> Result<String, Failure> {
    let given = [
        ("--static-inputs", options.static_inputs),
        ("--ignore", !options.ignore.is_empty()),
        ("--allow-ragged", options.allow_ragged),
    ];
    if let (None, Some((option, _))) = (options.scheme, given.iter().find(|(_, is_given)| *is_given)) {
        return Err(Failure::input(format!("{option} requires --scheme, for example --scheme tensor")));
    }
    if options.scheme == Some(Scheme::Nvfp4) && !options.static_inputs {
        return Err(Failure::input(
            "--scheme nvfp4: it needs the largest inputs of each layer: add --static-inputs after training under delayed scaling, or use \
             nvfp4a16, which leaves inputs in high precision",
        ));
    }
    let folder = options.config.as_ref().filter(|path| path.is_dir());
    let read = |path: &Path| {
        Config::read(path).map_err(|error| {
            Failure::of_file("--config", "expected a config.json, or a folder that has it", error)
        })
    };
    let config = match (&options.config, folder) {
        (Some(_), Some(folder)) => Some(read(&folder.join("config.json"))?),
        (Some(file), None) => Some(read(file)?),
        (None, _) => None,
    };
    interrupt::note_output(&options.output);
    let settings = ExportOptions {
        config,
        files_of: folder.cloned(),
        dtype: options.dtype,
        fp8: options.scheme.map(|scheme| QuantizeOptions {
            scheme,
            ignore: options.ignore.clone(),
            allow_ragged: options.allow_ragged,
            ..Default::default()
        }),
        static_inputs: options.static_inputs,
    };
    let done = with_threads(options.threads, || {
        watch(Unit::Written, |monitor| hf::export(&options.checkpoint, &options.output, &settings, monitor))
    })?;
    Ok(if options.json { json_text(options, &done) } else { sentences(options, &done) })
}

fn json_text(options: &Export, done: &Exported) -> String {
    let quantized = done.quantized.as_ref();
    let value = json!({
        "output": options.output.display().to_string(),
        "family": done.config.family.model_type,
        "layers": done.config.num_hidden_layers,
        "bytes_before": done.bytes,
        "bytes_after": quantized.map_or(done.bytes, |done| done.bytes_after),
        "scheme": options.scheme.map(Scheme::name),
        "static_inputs": options.static_inputs,
        "matrices": quantized.map_or(0, |done| done.matrices),
        "ignored": quantized.map(|done| &done.ignored),
        "ragged": quantized.map(|done| &done.ragged),
        "split_groups": quantized.map(|done| &done.split_groups),
    });
    format!("{value:#}\n")
}

fn sentences(options: &Export, done: &Exported) -> String {
    let out = options.output.display();
    let (family, layers) = (done.config.family.model_type, done.config.num_hidden_layers);
    let mut text = match (&done.quantized, options.scheme) {
        (Some(quantized), Some(scheme)) => format!(
            "{out}: {family}, {layers} layers, {} matrices in {} ({scheme}, inputs {}), {} instead of {}\n",
            quantized.matrices,
            if scheme.is_nvfp4() { "NVFP4" } else { "FP8" },
            match scheme {
                _ if options.static_inputs => "static",
                Scheme::Nvfp4a16 => "in high precision",
                _ => "dynamic",
            },
            bytes(quantized.bytes_after),
            bytes(done.bytes)
        ),
        _ => format!("{out}: {family}, {layers} layers, {}\n", bytes(done.bytes)),
    };
    if let Some(first) = done.quantized.as_ref().and_then(|done| done.ragged.first()) {
        let _ =
            writeln!(text, "{first} and others have ragged blocks: transformers refuses or misreads them");
    }
    text += &done.quantized.as_ref().map(split_groups).unwrap_or_default();
    let _ = writeln!(text, "what it holds: fp8 inspect {}", quoted(&options.output));
    text
}
