//! `fp8 inspect`: what a folder or file holds, and what quantization lost.

use crate::destination::{Destination, PAGE};
use crate::failure::Failure;
use crate::model::{inputs, with_threads};
use crate::progress::{Unit, watch};
use crate::report;
use crate::subject::{Subject, row, without_fp8};
use crate::table::{decibels, granularity, printable, shortened, table};
use crate::values::threads;
use clap::Args;
use fp8_hf::{self as hf, Config, Folder, Inspection, TensorInspection, Weights};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 inspect SmolLM2-135M-FP8 --against SmolLM2-135M --report report.html

Columns:
  scales       what each scale covers, the number of scales and their range; for static inputs, the scale of the input
  amax         the largest magnitude
  saturated %  values that were clamped; without --against, those with the largest code
  underflow %  values that became zero; without --against, those that are zero
  SQNR dB      10 log10 of the power of the original over that of the error: larger is better";

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A Hugging Face folder, or a safetensors file
    path: PathBuf,
    /// The folder that it was quantized from, to measure the error
    #[arg(long, value_name = "ORIGINAL")]
    against: Option<PathBuf>,
    /// Also writes a page of HTML
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// The number of threads (default: one for each core)
    #[arg(long, value_parser = threads, allow_negative_numbers = true)]
    threads: Option<usize>,
    /// Prints JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Inspects, and returns what is printed.
pub(crate) fn run(options: &Inspect) -> Result<String, Failure> {
    let inputs: Vec<&Path> =
        [Some(&options.path), options.against.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
    let open = |path: &PathBuf| Destination::open("--report", path, PAGE, &inputs);
    let file = options.report.as_ref().map(open).transpose()?;
    let original = options.against.as_deref().map(Folder::open).transpose()?;
    let (subject, found) = with_threads(options.threads, || measure(options, original.as_ref()))?;
    let result = if options.json { json_text(&subject, &found) } else { text(&subject, &found) };
    if let Some(file) = file {
        file.finish(&report::html(&subject, &found), &result)?;
    }
    Ok(result)
}

/// Measures the tensors of the file or folder.
fn measure(options: &Inspect, original: Option<&Folder>) -> Result<(Subject, Inspection), Failure> {
    let mut subject = Subject {
        path: options.path.display().to_string(),
        family: None,
        scheme: None,
        note: None,
        against: options.against.as_ref().map(|path| path.display().to_string()),
    };
    let found = if options.path.is_file() {
        if original.is_some() {
            return Err(Failure::input("--against compares folders: give a folder instead of a file"));
        }
        let weights = Weights::open(&options.path)?;
        watch(Unit::Bytes, |monitor| hf::inspect_weights(&weights, monitor))?
    } else {
        match open_any(&options.path, original.is_some())? {
            Opened::Model(folder) => {
                subject.family = Some(folder.config.family.model_type.to_owned());
                subject.scheme = scheme(&folder);
                watch(Unit::Bytes, |monitor| hf::inspect(&folder, original, monitor))?
            }
            Opened::Tensors(weights, note) => {
                subject.note = Some(note);
                watch(Unit::Bytes, |monitor| hf::inspect_weights(&weights, monitor))?
            }
        }
    };
    Ok((subject, found))
}

/// The contents of an opened folder.
enum Opened {
    /// A model that this library knows.
    Model(Box<Folder>),
    /// Tensors, and why their model is not understood.
    Tensors(Weights, String),
}

/// Opens a folder as a model, or else as the tensors that it holds.
fn open_any(path: &Path, is_compared: bool) -> Result<Opened, Failure> {
    let failure = match Folder::open(path) {
        Ok(folder) => return Ok(Opened::Model(Box::new(folder))),
        Err(error) => Failure::from(error),
    };
    // A configuration that is known belongs to a model whose files are damaged.
    let config = path.join("config.json");
    let is_unknown = config.is_file() && Config::read(&config).is_err();
    match (is_unknown && !is_compared, &failure, Weights::open(path)) {
        (true, Failure::Input(why), Ok(weights)) => {
            let note = format!("this model is not supported, so its tensors are listed as stored: {why}");
            Ok(Opened::Tensors(weights, note))
        }
        _ => Err(failure),
    }
}

fn scheme(folder: &Folder) -> Option<String> {
    let quantization = folder.config.quantization.as_ref()?;
    Some(format!("{}, inputs {}", quantization.method.name(), inputs(quantization.inputs)))
}

fn text(subject: &Subject, found: &Inspection) -> String {
    let mut text = format!("{}: {}\n", subject.path, subject.summary(found));
    match (found.sqnr, &subject.against) {
        (Some(sqnr), Some(against)) => {
            let _ = writeln!(text, "SQNR of the FP8 weights against {against}: {} dB", decibels(Some(sqnr)));
        }
        (None, Some(against)) => {
            let _ = writeln!(text, "{}", without_fp8(against));
        }
        _ => {}
    }
    for note in subject.note.iter().chain(&subject.only_in_original(found)) {
        let _ = writeln!(text, "{}", printable(note));
    }
    let heading =
        ["tensor", "dtype", "shape", "bytes", "scales", "amax", "saturated %", "underflow %", "SQNR dB"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(found.tensors.iter().map(row));
    text.push('\n');
    text += &table(&rows);
    for tensor in found.tensors.iter().filter(|tensor| tensor.not_finite > 0) {
        let _ = writeln!(
            text,
            "{}: {} values are infinite or NaN",
            shortened(&printable(&tensor.name)),
            tensor.not_finite
        );
    }
    text
}

fn json_text(subject: &Subject, found: &Inspection) -> String {
    // JSON has no infinity: an exact tensor has no SQNR and "exact": true.
    let finite = |sqnr: Option<f64>| sqnr.filter(|sqnr| sqnr.is_finite());
    let tensor = |tensor: &TensorInspection| -> Value {
        let (count, least, most) = tensor
            .scales
            .map_or((None, None, None), |(count, least, most)| (Some(count), Some(least), Some(most)));
        json!({
            "name": tensor.name,
            "dtype": format!("{:?}", tensor.dtype),
            "shape": tensor.shape,
            "bytes": tensor.bytes,
            "granularity": tensor.granularity.map(|_| granularity(tensor)),
            "scales": count,
            "scale_min": least,
            "scale_max": most,
            "lost_blocks": tensor.lost_blocks,
            "input_scale": tensor.input_scale,
            "amax": tensor.amax,
            "not_finite": tensor.not_finite,
            "saturated": tensor.saturated,
            "underflowed": tensor.underflowed,
            "sqnr_db": finite(tensor.sqnr),
            "exact": tensor.sqnr.map(|sqnr| sqnr == f64::INFINITY),
        })
    };
    let value = json!({
        "path": subject.path,
        "family": subject.family,
        "scheme": subject.scheme,
        "note": subject.note,
        "against": subject.against,
        "files": found.files,
        "bytes": found.bytes,
        "sqnr_db": finite(found.sqnr),
        "missing": found.missing,
        "tensors": found.tensors.iter().map(tensor).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}
