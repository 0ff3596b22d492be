//! `fp8 quantize`: a folder with FP8 weights.

use crate::failure::Failure;
use crate::options::Quantize;
use crate::progress::watch;
use crate::table::bytes;
use fp8_nn::hf::{self, Folder, QuantizeOptions, Quantized};
use serde_json::json;
use std::fmt::Write as _;

/// Quantizes, and returns what is printed.
pub(crate) fn run(options: &Quantize) -> Result<String, Failure> {
    if options.calibrate.is_some() {
        return Err(Failure::input(
            "--calibrate is not available in this version: leave it out for scales of inputs that are found when the model runs",
        ));
    }
    let folder = Folder::open(&options.input)?;
    let settings = QuantizeOptions {
        scheme: options.scheme,
        ignore: options.ignore.clone(),
        allow_ragged: options.allow_ragged,
        threads: options.threads,
        ..Default::default()
    };
    let start = std::time::Instant::now();
    let done = watch(|monitor| hf::quantize(&folder, &options.output, &settings, monitor))?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(if options.json { json_text(options, &done, seconds) } else { sentences(options, &done, seconds) })
}

fn json_text(options: &Quantize, done: &Quantized, seconds: f64) -> String {
    let value = json!({
        "output": options.output.display().to_string(),
        "scheme": options.scheme.name(),
        "matrices": done.matrices,
        "elements": done.elements,
        "ignored": done.ignored,
        "ragged": done.ragged,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "seconds": seconds,
    });
    format!("{value:#}\n")
}

fn sentences(options: &Quantize, done: &Quantized, seconds: f64) -> String {
    let mut text = format!(
        "{}: {} matrices in FP8 ({}), {} instead of {}, in {seconds:.1} s\n",
        options.output.display(),
        done.matrices,
        options.scheme,
        bytes(done.bytes_after),
        bytes(done.bytes_before)
    );
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
    let (out, input) = (options.output.display(), options.input.display());
    let _ = writeln!(text, "what it lost: fp8 inspect {out} --against {input}");
    text
}
