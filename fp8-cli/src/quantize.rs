//! `fp8 quantize`: a folder with weights in FP8 or NVFP4.

use crate::eval::SEQ_LENGTH;
use crate::failure::Failure;
use crate::interrupt;
use crate::model::with_threads;
use crate::progress::{Unit, spin, watch};
use crate::table::{bytes, quoted};
use crate::text_input::read_text;
use crate::values::{count, scheme, threads};
use clap::Args;
use fp8_hf::{self as hf, Folder, QuantizeOptions, Quantized, Scheme, Tokenizer};
use fp8_nn::prelude::Device;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 quantize SmolLM2-135M SmolLM2-135M-FP8 --scheme channel --ignore layers.0
  fp8 quantize SmolLM2-135M SmolLM2-135M-FP8 --scheme tensor --calibrate book.txt
  fp8 quantize SmolLM2-135M SmolLM2-135M-NVFP4A16 --scheme nvfp4a16

Schemes:
  tensor    one scale for a matrix, inputs dynamic or static (compressed-tensors: vLLM, transformers)
  channel   one scale for a row, inputs by token (compressed-tensors' FP8_DYNAMIC: vLLM, transformers)
  block128  one scale for a block of 128 x 128, inputs by 128 columns (DeepSeek's: vLLM, transformers)
  vllm      one scale for q, k and v, and for gate and up; inputs dynamic or static (quant_method fp8: vLLM)
  nvfp4     4.5 bits a value, weights and inputs; needs --calibrate (compressed-tensors: vLLM, transformers)
  nvfp4a16  the same weights, inputs in high precision (compressed-tensors: vLLM, transformers)";

#[derive(Debug, Args)]
pub(crate) struct Quantize {
    /// The Hugging Face folder of the model, in f32, bf16 or f16
    input: PathBuf,
    /// The folder to create
    output: PathBuf,
    /// The format: tensor, channel, block128, vllm, nvfp4 or nvfp4a16
    #[arg(long, value_parser = scheme)]
    scheme: Scheme,
    /// Writes static scales of inputs (schemes tensor and vllm; nvfp4 needs them): the model reads this text file, or the files of this folder (- is
    /// standard input), and each layer's scale comes from its largest input. Without it, inputs are dynamic
    #[arg(long, value_name = "FILE|DIR")]
    calibrate: Option<PathBuf>,
    /// The number of tokens of the text that --calibrate reads, in windows of 512 (default: 16384)
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    calibration_tokens: Option<usize>,
    /// Layers that stay as they are: a name in which * stands for any text, or a part of one, such as down_proj or layers.0;
    /// can be repeated
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

/// The number of tokens that calibration reads without `--calibration-tokens`.
const CALIBRATION_TOKENS: usize = 16_384;

/// The times that the two parts of the work took, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    calibrating: Option<f64>,
    quantizing: f64,
}

/// Quantizes, and returns what is printed.
pub(crate) fn run(options: &Quantize) -> Result<String, Failure> {
    if options.calibration_tokens.is_some() && options.calibrate.is_none() {
        let text = "--calibration-tokens requires --calibrate, for example --calibrate book.txt";
        return Err(Failure::input(text));
    }
    interrupt::note_output(&options.output);
    let folder = Folder::open(&options.input)?;
    let mut settings = QuantizeOptions {
        scheme: options.scheme,
        ignore: options.ignore.clone(),
        allow_ragged: options.allow_ragged,
        threads: options.threads,
        ..Default::default()
    };
    if options.scheme == Scheme::Nvfp4 && options.calibrate.is_none() {
        return Err(Failure::input(
            "--scheme nvfp4: it needs the largest inputs of each layer: give a text with --calibrate, or use nvfp4a16, which leaves inputs in \
             high precision",
        ));
    }
    // The scales of inputs are checked when they are known.
    let scheme = if options.scheme == Scheme::Nvfp4 { Scheme::Nvfp4a16 } else { options.scheme };
    QuantizeOptions { scheme, ..settings.clone() }.check(&folder)?;
    let mut times = Times::default();
    if let Some(text) = &options.calibrate {
        let start = Instant::now();
        settings.input_scales = calibrate(options, &folder, text)?;
        times.calibrating = Some(start.elapsed().as_secs_f64());
    }
    let start = Instant::now();
    let done = watch(Unit::Written, |monitor| hf::quantize(&folder, &options.output, &settings, monitor))?;
    times.quantizing = start.elapsed().as_secs_f64();
    Ok(if options.json { json_text(options, &done, times) } else { sentences(options, &done, times) })
}

/// Finds the scales of inputs.
fn calibrate(options: &Quantize, folder: &Folder, text: &Path) -> Result<BTreeMap<String, f32>, Failure> {
    if !options.scheme.takes_input_scales() {
        return Err(Failure::input(format!(
            "--calibrate: the inputs of scheme {} are {}: leave it out, or use scheme tensor, vllm or nvfp4",
            options.scheme,
            if options.scheme.is_nvfp4() { "in high precision" } else { "dynamic" }
        )));
    }
    hf::expect_new(&options.output)?;
    let count = options.calibration_tokens.unwrap_or(CALIBRATION_TOKENS);
    let config = &folder.config;
    let tokens = spin("reading the text", || {
        let text = read_text("--calibrate", text)?;
        Ok(Tokenizer::open(folder.path(), config.vocab_size)?.encode_start(&text, count)?)
    })?;
    if tokens.is_empty() {
        return Err(Failure::input("--calibrate: the text has no tokens"));
    }
    let windows: Vec<&[i32]> = tokens.chunks(SEQ_LENGTH.min(config.longest_sequence())).collect();
    with_threads(options.threads, || {
        let blocks = Unit::Blocks(config.num_hidden_layers as u64);
        watch(blocks, |monitor| hf::calibrate(folder, &windows, &Device::cpu(), monitor))
    })
}

/// Says whether vLLM refuses the folder, in a line.
pub(crate) fn split_groups(done: &Quantized) -> String {
    done.split_groups.first().map_or(String::new(), |group| {
        format!("vLLM will not load this folder: only some of {} are quantized\n", group.join(", "))
    })
}

fn json_text(options: &Quantize, done: &Quantized, times: Times) -> String {
    let value = json!({
        "output": options.output.display().to_string(),
        "scheme": options.scheme.name(),
        "static_inputs": options.calibrate.is_some(),
        "matrices": done.matrices,
        "elements": done.elements,
        "ignored": done.ignored,
        "ragged": done.ragged,
        "split_groups": done.split_groups,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "seconds": times.quantizing,
        "seconds_to_calibrate": times.calibrating,
    });
    format!("{value:#}\n")
}

fn sentences(options: &Quantize, done: &Quantized, times: Times) -> String {
    let mut text = format!(
        "{}: {} matrices in {} ({}{}), {} instead of {}, in {:.1} s",
        options.output.display(),
        done.matrices,
        if options.scheme.is_nvfp4() { "NVFP4" } else { "FP8" },
        options.scheme,
        if options.calibrate.is_some() { ", static inputs" } else { "" },
        bytes(done.bytes_after),
        bytes(done.bytes_before),
        times.quantizing
    );
    if let Some(seconds) = times.calibrating {
        let _ = write!(text, " after {seconds:.1} s of calibration");
    }
    text.push('\n');
    if done.ignored.len() > 1 {
        let _ = writeln!(text, "{} layers stay as they are: {}", done.ignored.len(), done.ignored.join(", "));
    }
    if let Some(first) = done.ragged.first() {
        let _ = writeln!(
            text,
            "{} matrices have ragged blocks, {first} among them: transformers refuses or misreads them",
            done.ragged.len()
        );
    }
    text += &split_groups(done);
    let (out, input) = (quoted(&options.output), quoted(&options.input));
    let _ = writeln!(text, "what it lost: fp8 inspect {out} --against {input}");
    text
}
