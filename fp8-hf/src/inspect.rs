//! Inspects checkpoints: what they contain, and what their quantization lost.

use super::config::WeightScales;
use super::folder::{Folder, is_float, is_fp8};
use super::jobs::{self, Monitor};
use super::values::widen;
use super::weights::{WeightInfo, Weights};
use crate::{Error, Result};
use safetensors::Dtype;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Elements that a thread reads at a time.
const CHUNK: usize = 1 << 20;
/// The quotient of an amax and its scale may be this much more than 448, as both divisions are rounded.
const ROUNDING: f32 = 1e-6;

/// The results of [`inspect`], whose example reads them.
#[derive(Debug, Clone, PartialEq)]
pub struct Inspection {
    /// The tensors, worst first: by SQNR if there is an original, else by the share of zero codes, then by name. The tensors
    /// with scales of quantized weights are not listed.
    pub tensors: Vec<TensorInspection>,
    /// The tensors that only the original has, by name, without its own scales. Empty without an original.
    pub missing: Vec<String>,
    /// The number of files.
    pub files: usize,
    /// The bytes of all tensors, scales included.
    pub bytes: u64,
    /// The SQNR of all quantized weights together, in dB; `None` without an original or without such weights.
    pub sqnr: Option<f64>,
}

/// One tensor of an [`Inspection`]. The example of [`inspect`] reads one.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInspection {
    /// The name.
    pub name: String,
    /// The dtype: F4 for a weight in NVFP4.
    pub dtype: Dtype,
    /// The shape, in values.
    pub shape: Vec<usize>,
    /// The bytes, without those of scales.
    pub bytes: u64,
    /// The elements that share a scale; `None` for a tensor that is not quantized.
    pub granularity: Option<WeightScales>,
    /// The number of scales, the smallest and the largest.
    pub scales: Option<(usize, f32, f32)>,
    /// The number of blocks in NVFP4 whose scale is 0, so that all their values are. Without an original, those count whose values may
    /// have been 0 before. `None` for other formats.
    pub lost_blocks: Option<u64>,
    /// The static scale of the layer's input, if the file has one.
    pub input_scale: Option<f32>,
    /// The largest magnitude of the values, dequantized. `None` for integers.
    pub amax: Option<f32>,
    /// The number of values that are infinite or NaN.
    pub not_finite: u64,
    /// The share of saturated values of a quantized weight: those that are clamped, or, without an original, those with the largest
    /// code, which the amax of every scale has.
    pub saturated: Option<f64>,
    /// The share of underflowed values of a quantized weight: those that are stored as zero and are not zero, or, without an
    /// original, those that are stored as zero.
    pub underflowed: Option<f64>,
    /// 10 · log₁₀(Σx² / Σ(x − y)²) in dB, of the original values x and these values y: ∞ if all are equal, −∞ if the original is
    /// zero and these are not, NaN if one of them is NaN. `None` without an original, and for integers.
    pub sqnr: Option<f64>,
}

/// Sums over some elements.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    elements: u64,
    amax: f32,
    not_finite: u64,
    saturated: u64,
    underflowed: u64,
    signal: f64,
    noise: f64,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.amax = self.amax.max(other.amax);
        self.not_finite += other.not_finite;
        self.saturated += other.saturated;
        self.underflowed += other.underflowed;
        self.signal += other.signal;
        self.noise += other.noise;
    }

    fn sqnr(&self) -> f64 {
        if self.noise == 0.0 { f64::INFINITY } else { 10.0 * (self.signal / self.noise).log10() }
    }
}

/// Measures every tensor of `folder`, against those of `original` if there is one, with as many threads as the current pool of rayon
/// has.
///
/// ```
/// use fp8_hf::{self as hf, Folder, Inspection, Monitor, QuantizeOptions, TensorInspection};
/// use fp8_nn::prelude::*;
/// # let place = std::env::temp_dir().join(format!("fp8-inspect-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = hf::Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2}"#,
/// # )?;
/// # let counted = |spec: &hf::TensorSpec| {
/// #     let values = (1..=spec.shape.iter().product()).map(|i: usize| i as f32).collect();
/// #     Ok::<_, Error>((spec.name.clone(), Tensor::from_vec(values, spec.shape, &Device::cpu())?))
/// # };
/// # hf::save(&place.join("model"), &config, &config.tensors().iter().map(counted).collect::<Result<_>>()?)?;
/// let original = Folder::open(&place.join("model"))?;
/// hf::quantize(&original, &place.join("fp8"), &QuantizeOptions::default(), &Monitor::default())?;
/// let fp8 = Folder::open(&place.join("fp8"))?;
/// let found: Inspection = hf::inspect(&fp8, Some(&original), &Monitor::default())?;
/// let worst: &TensorInspection = &found.tensors[0];
/// assert_eq!(worst.dtype, hf::Dtype::F8_E4M3);
/// assert!(worst.sqnr.is_some_and(|sqnr| (25.0..45.0).contains(&sqnr)), "{worst:?}");
/// assert_eq!((worst.saturated, worst.underflowed), (Some(0.0), Some(0.0)));
///
/// let plain = hf::inspect_weights(&hf::Weights::open(&place.join("model"))?, &Monitor::default())?;
/// assert_eq!(plain.tensors.len(), found.tensors.len());
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::File`] if the original lacks a tensor or has it in another shape, or a scale is not finite and positive;
/// [`Error::Io`] if a file cannot be read.
pub fn inspect(folder: &Folder, original: Option<&Folder>, monitor: &Monitor) -> Result<Inspection> {
    if let Some(original) = original {
        for name in folder.config.tensors().iter().map(|spec| folder.stored(&spec.name)) {
            let found = original.info(name).ok().map(|info| &info.shape);
            let shape = &folder.info(name)?.shape;
            if found != Some(shape) {
                let found = found.map_or("is missing".into(), |found| format!("has shape {found:?}"));
                let path = folder.path.display();
                return Err(original.problem(format!(
                    "`{name}` {found}: {path} has it with shape {shape:?}, so this is not its original"
                )));
            }
        }
    }
    measure(&folder.weights, Some(folder), original, monitor)
}

/// Measures every tensor of files that need not be a model that this library knows. FP8 tensors count as their codes. The example
/// of [`inspect`] uses it.
///
/// # Errors
/// [`Error::Io`] if a file cannot be read.
pub fn inspect_weights(weights: &Weights, monitor: &Monitor) -> Result<Inspection> {
    measure(weights, None, None, monitor)
}

/// Some elements of a tensor.
struct Job<'a> {
    tensor: usize,
    name: &'a str,
    elements: Range<usize>,
    /// The columns of a tensor whose values depend on scales, and which is therefore read by rows.
    cols: Option<usize>,
    bytes: u64,
}

/// The files with a tensor, and the folder that dequantizes it, if there is one.
#[derive(Clone, Copy)]
struct Place<'a> {
    weights: &'a Weights,
    folder: Option<&'a Folder>,
}

impl Place<'_> {
    fn is_quantized(&self, name: &str) -> bool {
        self.folder.is_some_and(|folder| folder.quantized.contains_key(name))
    }

    /// Returns dtype and shape of a tensor, or `None` if there is none of this name.
    fn info(&self, name: &str) -> Option<&WeightInfo> {
        match self.folder {
            Some(folder) => folder.info(name).ok(),
            None => self.weights.info(name),
        }
    }

    fn known(&self, name: &str) -> Result<&WeightInfo> {
        let missing = || Error::File { path: name.into(), problem: "there is no such tensor".into() };
        self.info(name).ok_or_else(missing)
    }

    /// The bytes of some elements; for a weight in NVFP4 its codes, one a byte.
    fn codes(&self, job: &Job<'_>, dtype: Dtype) -> Result<Vec<u8>> {
        if let (Some(folder), Some(cols), Dtype::F4) = (self.folder, job.cols, dtype) {
            let rows = job.elements.start / cols..job.elements.end / cols;
            let packed = folder.codes(job.name, rows)?.codes;
            let row = |packed: &[u8]| {
                packed.iter().flat_map(|pair| [pair & 0xF, pair >> 4]).take(cols).collect::<Vec<_>>()
            };
            return Ok(packed.chunks(cols.div_ceil(2)).flat_map(row).collect());
        }
        let size = dtype.bitsize() / 8;
        let mut bytes = vec![0; job.elements.len() * size];
        self.weights.read(job.name, (job.elements.start * size) as u64, &mut bytes)?;
        Ok(bytes)
    }

    fn values(&self, job: &Job<'_>) -> Result<Vec<f32>> {
        if let (Some(folder), Some(cols)) = (self.folder.filter(|_| self.is_quantized(job.name)), job.cols) {
            return folder.rows(job.name, job.elements.start / cols..job.elements.end / cols);
        }
        let dtype = self.known(job.name)?.dtype;
        let bytes = self.codes(job, dtype)?;
        let mut values = vec![0.0; job.elements.len()];
        widen(&bytes, dtype, &mut values);
        Ok(values)
    }
}

fn names_of_scales(folder: Option<&Folder>) -> BTreeSet<&str> {
    folder
        .iter()
        .flat_map(|folder| folder.quantized.values())
        .flat_map(|scales| {
            let of_tensor = scales.packed.as_ref().map(|packed| packed.tensor_scale.as_str());
            [Some(scales.weight.as_str()), scales.input.as_deref(), of_tensor]
        })
        .flatten()
        .collect()
}

fn measure(
    weights: &Weights,
    folder: Option<&Folder>,
    original: Option<&Folder>,
    monitor: &Monitor,
) -> Result<Inspection> {
    let scales = names_of_scales(folder);
    let place = Place { weights, folder };
    let names = weights.names().filter(|name| !scales.contains(name));
    let names: Vec<&str> = names.map(|name| folder.map_or(name, |folder| folder.logical(name))).collect();
    let mut jobs = Vec::new();
    for (tensor, name) in names.iter().copied().enumerate() {
        let Some(info) = place.info(name).filter(|info| has_values(info.dtype)) else { continue };
        let [height, cols] = info.matrix();
        let total = height.saturating_mul(cols);
        let by_row = place.is_quantized(name)
            || original.is_some_and(|original| original.quantized.contains_key(name));
        let cols = by_row.then_some(cols.max(1));
        // A row may be longer than what is read at a time, if only whole rows have values.
        let step = cols.map_or(CHUNK, |cols| (CHUNK / cols).max(1) * cols);
        let bits = info.dtype.bitsize() as u64;
        jobs.extend((0..total).step_by(step).map(|first| {
            let elements = first..first.saturating_add(step).min(total);
            Job { tensor, name, bytes: bits * elements.len() as u64 / 8, elements, cols }
        }));
    }
    monitor.start(jobs.iter().map(|job| job.bytes).sum());
    let parts = Mutex::new(vec![None; jobs.len()]);
    let numbered: Vec<(usize, &Job<'_>)> = jobs.iter().enumerate().collect();
    jobs::run(
        &numbered,
        jobs::threads(None),
        monitor,
        || (),
        |_, (), (index, job)| {
            let sums = sums(place, original, job)?;
            parts.lock().unwrap_or_else(PoisonError::into_inner)[*index] = Some(sums);
            monitor.add(job.bytes);
            Ok(())
        },
    )?;
    // Added in the order of the elements, so that the result does not depend on the threads.
    let mut totals = vec![Sums::default(); names.len()];
    for (job, part) in jobs.iter().zip(parts.into_inner().unwrap_or_else(PoisonError::into_inner)) {
        totals[job.tensor].add(&part.unwrap_or_default());
    }
    let mut all = Sums::default();
    let mut tensors = Vec::new();
    for (name, sums) in names.iter().zip(&totals) {
        let tensor = tensor(place, original, name, sums)?;
        if tensor.granularity.is_some() {
            all.add(sums);
        }
        tensors.push(tensor);
    }
    let worse = |tensor: &TensorInspection| {
        let sqnr = tensor.sqnr.unwrap_or(f64::INFINITY);
        (if sqnr.is_nan() { f64::NEG_INFINITY } else { sqnr }, -tensor.underflowed.unwrap_or(-1.0))
    };
    tensors.sort_by(|a, b| {
        let (a, b) = (worse(a), worse(b));
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    let scales = names_of_scales(original);
    let is_missing = |name: &&str| place.info(name).is_none() && !scales.contains(name);
    let missing = original.into_iter().flat_map(Folder::logical_names).filter(is_missing);
    let missing = missing.map(str::to_owned).collect();
    let bytes = weights.names().filter_map(|name| weights.info(name)).map(|info| info.bytes).sum();
    let sqnr = original.filter(|_| all.elements > 0).map(|_| all.sqnr());
    Ok(Inspection { tensors, missing, files: weights.num_files(), bytes, sqnr })
}

fn tensor(place: Place<'_>, original: Option<&Folder>, name: &str, sums: &Sums) -> Result<TensorInspection> {
    let info = place.known(name)?;
    let quantized = place.folder.and_then(|folder| Some((folder, folder.quantized.get(name)?)));
    let mut range = None;
    let mut input_scale = None;
    let mut lost_blocks = None;
    if let Some((folder, scales)) = quantized {
        let values = match &scales.packed {
            None => folder.scales(&scales.weight)?,
            Some(_) => folder.codes(name, 0..0)?.scales,
        };
        let lost = values.iter().filter(|&&scale| scale == 0.0).count() as u64;
        lost_blocks = scales.packed.as_ref().map(|_| lost);
        let least = values.iter().copied().fold(f32::INFINITY, f32::min);
        range = Some((values.len(), least, values.iter().copied().fold(0.0, f32::max)));
        if let Some(input) = &scales.input {
            input_scale = folder.scales(input)?.first().copied();
        }
    }
    let share = |count: u64| count as f64 / sums.elements.max(1) as f64;
    let has_codes = matches!(info.dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F4);
    let is_compared = has_values(info.dtype) && original.is_some_and(|original| original.info(name).is_ok());
    Ok(TensorInspection {
        name: name.to_owned(),
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: info.bytes,
        granularity: quantized.map(|(_, scales)| scales.granularity),
        scales: range,
        lost_blocks,
        input_scale,
        amax: has_values(info.dtype).then_some(sums.amax),
        not_finite: sums.not_finite,
        saturated: has_codes.then(|| share(sums.saturated)),
        underflowed: has_codes.then(|| share(sums.underflowed)),
        sqnr: is_compared.then(|| sums.sqnr()),
    })
}

/// Returns true for the dtypes of tensors that have values, F4 with scales among them.
fn has_values(dtype: Dtype) -> bool {
    is_float(dtype) || dtype == Dtype::F4
}

fn sums(place: Place<'_>, original: Option<&Folder>, job: &Job<'_>) -> Result<Sums> {
    let info = place.known(job.name)?;
    let values = place.values(job)?;
    let codes = if is_fp8(info.dtype) || info.dtype == Dtype::F4 {
        place.codes(job, info.dtype)?
    } else {
        Vec::new()
    };
    let before = match original.filter(|original| original.info(job.name).is_ok()) {
        Some(original) => Place { weights: &original.weights, folder: Some(original) }.values(job)?,
        None => Vec::new(),
    };
    let (largest, magnitude) = match info.dtype {
        Dtype::F4 => (0x7, 0x7),
        Dtype::F8_E5M2 => (0x7B, 0x7F),
        _ => (0x7E, 0x7F),
    };
    let mut sums = Sums { elements: values.len() as u64, ..Default::default() };
    for (index, &value) in values.iter().enumerate() {
        if value.is_finite() {
            sums.amax = sums.amax.max(value.abs());
        } else {
            sums.not_finite += 1;
        }
        let before = before.get(index).copied();
        if let Some(code) = codes.get(index).map(|code| code & magnitude) {
            // The largest code of 4 bits is 6, to which values below 7 are rounded.
            let most = if info.dtype == Dtype::F4 { 7.0 / 6.0 } else { 1.0 + ROUNDING };
            let is_clamped = before.is_none_or(|before| before.abs() > value.abs() * most);
            sums.saturated += u64::from(code == largest && is_clamped);
            let is_zero = code == 0 || (info.dtype == Dtype::F4 && value == 0.0);
            sums.underflowed += u64::from(is_zero && before.is_none_or(|before| before != 0.0));
        }
        if let Some(before) = before {
            let (before, error) = (f64::from(before), f64::from(before) - f64::from(value));
            sums.signal += before * before;
            sums.noise += error * error;
        }
    }
    Ok(sums)
}
