//! FP8 checkpoints that other libraries wrote, byte for byte: the model that they were made of is quantized again.

use super::check::{Check, Outcome, bytes, name, text};
use super::model::Case;
use fp8_hf::{
    self, Dtype, Folder, InputScales, Monitor, QuantMethod, Quantization, QuantizeOptions, Scheme,
    WeightScales, calibrate,
};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The largest relative difference of input scales, which depend on the order of sums.
const INPUT_SCALES: f32 = 1e-5;

/// Quantizes the model of `export/MODEL-*` as its configuration says, and compares all tensors.
pub(super) fn check(case: &Case<'_>) -> Check<Outcome> {
    let theirs = Folder::open(case.path).map_err(text)?;
    let name = name(case.path);
    let (Some(quantization), Some((model, _)), Some(parent)) =
        (&theirs.config.quantization, name.split_once('-'), case.path.parent())
    else {
        return Ok(Outcome::Nothing);
    };
    let source = parent.with_file_name(model);
    if !source.is_dir() {
        return Ok(Outcome::LeftOut("FP8 checkpoints without the model that they were made of"));
    }
    let Some(scheme) = scheme(quantization) else {
        return Ok(Outcome::LeftOut("FP8 checkpoints in a layout that is read but not written"));
    };
    let is_scale = |name: &&str| name.ends_with("_scale") || name.ends_with("_scale_inv");
    for name in theirs.weights.names().filter(is_scale) {
        if theirs.weights.info(name).is_some_and(|info| info.dtype != Dtype::F32) {
            return Ok(Outcome::LeftOut("FP8 checkpoints whose scales are rounded to bf16"));
        }
    }
    let original = Folder::open(&source).map_err(text)?;
    let input_scales = match quantization.inputs {
        InputScales::Static => input_scales(case, &source, &original)?,
        _ => BTreeMap::new(),
    };
    let ignore = quantization.ignored.iter().filter(|&pattern| pattern != "lm_head").cloned().collect();
    let options = QuantizeOptions { scheme, ignore, allow_ragged: true, input_scales, ..Default::default() };
    let place = tempfile::tempdir().map_err(text)?;
    let out = place.path().join("fp8");
    fp8_hf::quantize(&original, &out, &options, &Monitor::default()).map_err(text)?;
    compare(&theirs, &Folder::open(&out).map_err(text)?)?;
    Ok(Outcome::Compared)
}

/// Returns the scheme that writes this layout.
fn scheme(quantization: &Quantization) -> Option<Scheme> {
    match (quantization.method, quantization.weights) {
        (QuantMethod::CompressedTensors, WeightScales::Tensor) => Some(Scheme::Tensor),
        (QuantMethod::CompressedTensors, WeightScales::Channel) => Some(Scheme::Channel),
        (QuantMethod::Fp8, WeightScales::Tensor) => Some(Scheme::Vllm),
        (QuantMethod::Fp8, WeightScales::Block([128, 128])) => Some(Scheme::Block128),
        _ => None,
    }
}

/// Calibrates with the ids of the original model, which the peer took.
fn input_scales(case: &Case<'_>, source: &Path, original: &Folder) -> Check<BTreeMap<String, f32>> {
    let bytes = fs::read(source.join("expected.safetensors")).map_err(text)?;
    let expected = SafeTensors::deserialize(&bytes).map_err(text)?;
    let ids = Case { path: source, expected: &expected, device: case.device }.ids("input_ids")?;
    let windows = ids.to_vec::<i32>().map_err(text)?;
    let windows: Vec<&[i32]> = windows.chunks(ids.shape().last_dim()).collect();
    calibrate(original, &windows, case.device, &Monitor::default()).map_err(text)
}

/// Compares bytes; values where a peer widened what it did not quantize; input scales within a tolerance.
fn compare(theirs: &Folder, ours: &Folder) -> Check {
    if !theirs.weights.names().eq(ours.weights.names()) {
        let all = |folder: &Folder| folder.weights.names().map(str::to_owned).collect::<Vec<_>>();
        let (theirs, ours) = (all(theirs), all(ours));
        let differs = theirs
            .iter()
            .find(|name| !ours.contains(name))
            .or_else(|| ours.iter().find(|name| !theirs.contains(name)));
        return Err(format!("only one of the two has `{}`", differs.map_or("", String::as_str)));
    }
    for name in theirs.weights.names() {
        let (Some(their_info), Some(our_info)) = (theirs.weights.info(name), ours.weights.info(name)) else {
            return Err(format!("`{name}` is missing"));
        };
        if their_info.shape != our_info.shape {
            return Err(format!("`{name}` is {:?}, expected {:?}", our_info.shape, their_info.shape));
        }
        if name.ends_with(".input_scale") {
            let [expected, found] = [theirs, ours].map(|folder| folder.values(name).map_err(text));
            let (expected, found) = (expected?[0], found?[0]);
            let difference = (expected - found).abs();
            if difference.is_nan() || difference > INPUT_SCALES * expected {
                return Err(format!("`{name}` is {found}, expected {expected}"));
            }
            continue;
        }
        let is_equal = if their_info.dtype == our_info.dtype {
            bytes(theirs, name)? == bytes(ours, name)?
        } else {
            theirs.values(name).map_err(text)? == ours.values(name).map_err(text)?
        };
        if !is_equal {
            return Err(format!("`{name}` has other bytes"));
        }
    }
    Ok(())
}
