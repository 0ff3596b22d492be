//! The moments of parameters in files: in f32, bf16, or as FP8 codes with their scales.

use super::reader::Reader;
use super::values::{self, Stored};
use super::writer::Writer;
use crate::optimizer::Rule;
use crate::parameter::SCALE_INV;
use crate::{AdamW, Cut, Layer, MomentDtype, Parameter, Result, parameters};
use fp8_kernels::ops::{self, MOMENT_BLOCK};
use fp8_kernels::{DType, Tensor};
use safetensors::tensor::Dtype;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A JSON list of the parameters without moments, if the optimizer has taken steps: those that are frozen, or were in its last step.
/// Files without such parameters do not have it, and neither do files of earlier versions.
pub(super) const WITHOUT_KEY: &str = "fp8.optimizer.without_moments";
/// The metadata key of the optimizer's name. Files of AdamW do not have it, and neither do files of earlier versions.
const RULE_KEY: &str = "fp8.optimizer";

/// The names of all tensors of a parameter's state.
pub(super) const PARTS: [&str; 5] =
    ["exp_avg", "exp_avg_scale_inv", "exp_avg_sq", "exp_avg_sq_scale_inv", "main_param"];

/// Adds the name of the optimizer.
pub(super) fn write_rule(writer: &mut Writer, rule: Rule) {
    if rule != Rule::default() {
        writer.metadata(RULE_KEY, rule.name());
    }
}

/// Refuses the file of another optimizer.
pub(super) fn expect_rule(reader: &Reader<'_>, rule: Rule) -> Result<()> {
    let saved = reader.all_metadata().get(RULE_KEY).map_or(Rule::default().name(), String::as_str);
    if saved == rule.name() {
        return Ok(());
    }
    let own = rule.name();
    Err(reader
        .problem(format!("it was saved with {saved}, and this optimizer is {own}: load it with {saved}")))
}

/// Returns the dtype that a tensor of an optimizer's state has in files: codes are those of FP8.
pub(super) fn file_dtype_of(tensor: &Tensor) -> Dtype {
    match tensor.dtype() {
        DType::U8 => Dtype::F8_E4M3,
        dtype => super::stream::file_dtype(dtype),
    }
}

/// Returns how a tensor of a parameter's state is cut, if the parameter is. The error says why it cannot be joined.
pub(super) fn cut_of(parameter: &Parameter, part: &str) -> Result<Option<Cut>, String> {
    let Some(cut) = parameter.cut() else { return Ok(None) };
    if !part.ends_with(SCALE_INV) {
        return Ok(Some(cut.clone()));
    }
    let problem = || {
        let name = parameter.name();
        format!(
            "`{name}` is cut over ranks inside of blocks of {MOMENT_BLOCK} elements, which share a scale of its moments in FP8: set \
             AdamWOptions::moments to MomentDtype::BF16 or MomentDtype::F32"
        )
    };
    cut.of_blocks(MOMENT_BLOCK).map(Some).ok_or_else(problem)
}

/// Reads this rank's part of a moment, or of its scales, with the shape and dtype of `current`.
pub(super) fn read(
    reader: &Reader<'_>,
    parameter: &Parameter,
    part: &str,
    current: &Tensor,
) -> Result<Tensor> {
    let key = format!("optimizer.{}.{part}", parameter.name());
    let cut = cut_of(parameter, part).map_err(|problem| reader.problem(problem))?;
    let whole = cut.as_ref().map_or(current.shape(), Cut::global);
    let (stored, dtype) = (file_dtype_of(current), current.dtype());
    reader.part_as(&key, whole, cut.as_ref(), stored, dtype, current.device())
}

/// Returns the names of the trainable parameters whose moments are in the file. After the first step these are all that were not
/// frozen when it was saved.
pub(super) fn expect(
    reader: &Reader<'_>,
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    steps: u64,
) -> Result<BTreeSet<Arc<str>>> {
    let (mut names, without) = (BTreeSet::new(), names_without_moments(reader)?);
    for parameter in parameters(model) {
        let name = parameter.name();
        let may_lack = steps == 0 || !parameter.is_trainable() || without.contains(&**name);
        let wanted = optimizer.options().moments;
        let found = reader.dtype(&format!("optimizer.{name}.exp_avg")).and_then(format_of).unwrap_or(wanted);
        if found != wanted && parameter.is_trainable() {
            let problem =
                format!("`{name}` has moments in {found}, and this optimizer stores them in {wanted}");
            return Err(reader.problem(format!("{problem}: set AdamWOptions::moments as it was")));
        }
        let has = |moment| has_moment(reader, parameter, moment, found);
        let first = has("exp_avg")?;
        let second = if optimizer.rule().has_second_moment() { has("exp_avg_sq")? } else { first };
        match (first, second) {
            (true, true) => {}
            (false, false) if may_lack => continue,
            (false, false) => return Err(reader.problem(missing(name, steps))),
            _ => return Err(reader.problem(format!("only one of `{name}`'s two moments is there"))),
        }
        let has =
            reader.has(&format!("optimizer.{name}.main_param"), parameter.global_shape(), DType::F32)?;
        if !parameter.is_trainable() {
            continue; // the file may have what is not kept
        }
        if wanted == MomentDtype::Fp8 {
            cut_of(parameter, SCALE_INV).map_err(|problem| reader.problem(problem))?;
        }
        let wants = optimizer.has_main_param(parameter);
        let stored = values::expect(reader, &format!("model.{name}"), parameter)?;
        // A weight that is in FP8 here or there continues from what the file has: its f32 copy, or its value.
        let is_fp8 = parameter.fp8().is_some() || matches!(stored, Stored::Codes(..));
        if has != wants && !is_fp8 {
            let [has, want] = [has, wants].map(|has| if has { "an" } else { "no" });
            let problem = format!("`{name}` has {has} f32 copy in the optimizer, this one wants {want}");
            return Err(reader.problem(format!("{problem}: set AdamWOptions::main_params as it was")));
        }
        names.insert(name.clone());
    }
    Ok(names)
}

/// The format of moments that have this dtype in a file.
fn format_of(dtype: Dtype) -> Option<MomentDtype> {
    match dtype {
        Dtype::F32 => Some(MomentDtype::F32),
        Dtype::BF16 => Some(MomentDtype::BF16),
        Dtype::F8_E4M3 => Some(MomentDtype::Fp8),
        _ => None,
    }
}

/// Returns whether the file has this moment of a parameter, with its scales.
fn has_moment(reader: &Reader<'_>, parameter: &Parameter, moment: &str, format: MomentDtype) -> Result<bool> {
    let (name, shape) = (parameter.name(), parameter.global_shape());
    let key = format!("optimizer.{name}.{moment}");
    if format != MomentDtype::Fp8 {
        return reader.has(&key, shape, format.tensor_dtype());
    }
    if !reader.has_as(&key, shape, Dtype::F8_E4M3)? {
        return Ok(false);
    }
    let scales = format!("{key}_scale_inv");
    if reader.has(&scales, &ops::moment_scales(shape), DType::F32)? {
        return Ok(true);
    }
    Err(reader.problem(format!("`{key}` is in FP8, and its scales `{scales}` are missing")))
}

/// Returns the parameters that the file lists as having no moments, because they were frozen.
fn names_without_moments(reader: &Reader<'_>) -> Result<BTreeSet<String>> {
    let Some(text) = reader.all_metadata().get(WITHOUT_KEY) else { return Ok(BTreeSet::new()) };
    serde_json::from_str(text).map_err(|_| {
        reader.problem(format!("metadata `{WITHOUT_KEY}` is {text}: expected a JSON list of names"))
    })
}

/// Describes a parameter whose moments are missing.
pub(super) fn missing(name: &str, steps: u64) -> String {
    let s = if steps == 1 { "" } else { "s" };
    format!(
        "the optimizer has taken {steps} step{s}, but `{name}` has no moments: expected those of every parameter that is \
         trained; freeze it if it was frozen in these steps"
    )
}
