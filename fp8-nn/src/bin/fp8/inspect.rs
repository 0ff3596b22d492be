//! `fp8 inspect`: what a folder or file holds, and what quantization lost.

use crate::failure::Failure;
use crate::progress::{Unit, watch};
use crate::report;
use crate::table::{bytes, count, decibels, printable, scales, shape, short, table};
use clap::Args;
use fp8_nn::fp8_kernels::AtomicFile;
use fp8_nn::hf::{self, Folder, InputScales, Inspection, TensorInspection, Weights};
use fp8_nn::page::percent;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 inspect SmolLM2-135M-FP8 --against SmolLM2-135M --report report.html

Columns:
  scales       what shares a scale, and how many there are
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
    /// Prints JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// What is inspected, for the heading.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) path: String,
    /// The family, or why the configuration is not understood.
    pub(crate) family: Option<String>,
    pub(crate) scheme: Option<String>,
    pub(crate) against: Option<String>,
}

/// Inspects, and returns what is printed.
pub(crate) fn run(options: &Inspect) -> Result<String, Failure> {
    if let Some(report) = &options.report {
        expect_writable("--report", report)?;
    }
    let original = options.against.as_deref().map(Folder::open).transpose()?;
    let mut subject = Subject {
        path: options.path.display().to_string(),
        family: None,
        scheme: None,
        against: options.against.as_ref().map(|path| path.display().to_string()),
    };
    let found = if options.path.is_file() {
        if original.is_some() {
            return Err(Failure::input("--against compares folders: give a folder instead of a file"));
        }
        let weights = Weights::open(&options.path)?;
        watch(Unit::Bytes, |monitor| hf::inspect_weights(&weights, monitor))?
    } else {
        let folder = Folder::open(&options.path)?;
        subject.family = Some(folder.config.family.model_type.to_owned());
        subject.scheme = scheme(&folder);
        watch(Unit::Bytes, |monitor| hf::inspect(&folder, original.as_ref(), monitor))?
    };
    if let Some(path) = &options.report {
        let written = AtomicFile::create(path).and_then(|mut file| {
            std::io::Write::write_all(&mut file, report::html(&subject, &found).as_bytes())?;
            file.commit()
        });
        written.map_err(|error| Failure::Work(format!("{}: {error}", path.display())))?;
    }
    Ok(if options.json { json_text(&subject, &found) } else { text(&subject, &found) })
}

/// Checks that a file can be created where an option says.
pub(crate) fn expect_writable(option: &str, file: &Path) -> Result<(), Failure> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let refused = |problem: &str| Err(Failure::input(format!("{option} {}: {problem}", file.display())));
    if file.is_dir() || file.file_name().is_none() {
        return refused("expected the name of a file");
    }
    if let Err(error) = AtomicFile::check(file) {
        return refused(&error.to_string());
    }
    if folder.is_none_or(Path::is_dir) { Ok(()) } else { refused("its folder does not exist") }
}

fn scheme(folder: &Folder) -> Option<String> {
    let quantization = folder.config.quantization.as_ref()?;
    let inputs = match quantization.inputs {
        InputScales::None => "in high precision".to_owned(),
        InputScales::Static => "static".to_owned(),
        InputScales::Tensor => "dynamic, one scale".to_owned(),
        InputScales::Token => "dynamic, by token".to_owned(),
        InputScales::Group(columns) => format!("dynamic, by {columns} columns"),
        _ => "of another kind".to_owned(),
    };
    Some(format!("{}, inputs {inputs}", quantization.method.name()))
}

impl Subject {
    /// One line about the whole.
    pub(crate) fn summary(&self, found: &Inspection) -> String {
        let (tensors, files) = (count(found.tensors.len(), "tensor"), count(found.files, "file"));
        let mut line = format!("{tensors}, {} in {files}", bytes(found.bytes));
        for part in [&self.family, &self.scheme].into_iter().flatten() {
            let _ = write!(line, "; {part}");
        }
        line
    }
}

fn text(subject: &Subject, found: &Inspection) -> String {
    let mut text = format!("{}: {}\n", subject.path, subject.summary(found));
    if let (Some(sqnr), Some(against)) = (found.sqnr, &subject.against) {
        let _ = writeln!(text, "SQNR of the FP8 weights against {against}: {} dB", decibels(Some(sqnr)));
    }
    let heading =
        ["tensor", "dtype", "shape", "bytes", "scales", "amax", "saturated %", "underflow %", "SQNR dB"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(found.tensors.iter().map(row));
    text.push('\n');
    text += &table(&rows);
    for tensor in found.tensors.iter().filter(|tensor| tensor.not_finite > 0) {
        let _ =
            writeln!(text, "{}: {} values are infinite or NaN", printable(&tensor.name), tensor.not_finite);
    }
    text
}

/// The cells of a tensor.
pub(crate) fn row(tensor: &TensorInspection) -> Vec<String> {
    vec![
        printable(&tensor.name),
        format!("{:?}", tensor.dtype),
        shape(&tensor.shape),
        bytes(tensor.bytes),
        scales(tensor),
        tensor.amax.map(short).unwrap_or_default(),
        tensor.saturated.map(percent).unwrap_or_default(),
        tensor.underflowed.map(percent).unwrap_or_default(),
        decibels(tensor.sqnr),
    ]
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
            "granularity": tensor.granularity.map(|_| scales(tensor).split(',').next().unwrap_or_default().to_owned()),
            "scales": count,
            "scale_min": least,
            "scale_max": most,
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
        "against": subject.against,
        "files": found.files,
        "bytes": found.bytes,
        "sqnr_db": finite(found.sqnr),
        "tensors": found.tensors.iter().map(tensor).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}
