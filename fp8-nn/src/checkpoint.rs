//! Checkpoints: one safetensors file, named and typed, from which training resumes bit for bit.
//!
//! `DIR/checkpoint.safetensors` holds `model.<parameter>`, `optimizer.<parameter>.{exp_avg,exp_avg_sq,main_param}` and
//! `scaling.<n>.{scale,amax_history}`; what has no tensor stands in the metadata. It is written beside its place, flushed
//! to disk and renamed, so that a reader sees the old file or the new one, whole. It is read, not mapped, and checked
//! completely before anything changes.

mod file;
mod scaling_state;

use crate::optimizer::AdamWState;
use crate::{AdamW, Layer, Result};
use file::{Reader, Writer};
use fp8_kernels::{DType, Tensor};
use fp8_recipe::{Scaling, StateReport};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FILE: &str = "checkpoint.safetensors";
/// The metadata key of the layout's version.
const VERSION_KEY: &str = "fp8.version";
const VERSION: &str = "1";
const STEP_KEY: &str = "fp8.optimizer.step";
/// The caller's own keys are kept apart by this prefix.
const USER: &str = "user.";

/// What [`load`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The caller's metadata, as [`metadata`] returns it.
    pub metadata: BTreeMap<String, String>,
    /// What became of the scaling state: taken over as it was saved, recomputed for another recipe, new, or not used so far.
    /// It is complete for recipes that were made ready by [`Scaling::prepare`] before; what others make of it,
    /// [`Scaling::state_report`] tells after their first scope.
    pub scaling: StateReport,
}

/// Where the checkpoint of a directory lies.
pub fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Writes model, optimizer, scaling state and the caller's metadata into `dir`, which is made if it is not there.
///
/// # Errors
/// A directory or file that cannot be written; the old checkpoint is whole then.
pub fn save(
    dir: &Path,
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    scaling: &Scaling,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let mut writer = Writer::default();
    model
        .visit(&mut |parameter| writer.tensor(&format!("model.{}", parameter.name()), parameter.tensor()))?;
    for (name, state) in &optimizer.state {
        writer.tensor(&format!("optimizer.{name}.exp_avg"), &state.exp_avg)?;
        writer.tensor(&format!("optimizer.{name}.exp_avg_sq"), &state.exp_avg_sq)?;
        if let Some(main_param) = &state.main_param {
            writer.tensor(&format!("optimizer.{name}.main_param"), main_param)?;
        }
    }
    scaling_state::write(&scaling.state()?, &mut writer)?;
    writer.metadata(VERSION_KEY, VERSION);
    writer.metadata(STEP_KEY, &optimizer.steps().to_string());
    metadata.iter().for_each(|(key, value)| writer.metadata(&format!("{USER}{key}"), value));
    writer.save(&path(dir))
}

/// The caller's metadata of the checkpoint in `dir`.
///
/// # Errors
/// A file that cannot be read or is not a checkpoint.
pub fn metadata(dir: &Path) -> Result<BTreeMap<String, String>> {
    let path = path(dir);
    let bytes = file::read(&path)?;
    let reader = open(&path, &bytes)?;
    let user = |(key, value): (&String, &String)| Some((key.strip_prefix(USER)?.to_owned(), value.clone()));
    Ok(reader.all_metadata().iter().filter_map(user).collect())
}

/// Reads the checkpoint in `dir` into a model, optimizer and scaling made with the same options; returns the caller's
/// metadata and what became of the scaling state, which may go on under another recipe. Everything stays where it lies: a recorded step goes on from the checkpoint.
///
/// # Errors
/// A file that cannot be read, is not a checkpoint, or is one of another model: the first difference, with both shapes.
/// Nothing has changed then. A device that fails on the way leaves a part of each.
pub fn load(
    dir: &Path,
    model: &mut (impl Layer + ?Sized),
    optimizer: &mut AdamW,
    scaling: &mut Scaling,
) -> Result<Loaded> {
    let path = path(dir);
    let bytes = file::read(&path)?;
    let reader = open(&path, &bytes)?;
    let mut values = model_values(&reader, model, "model.")?;
    let mut state = BTreeMap::new();
    for (name, value) in &values {
        let read = |part: &str| {
            let key = format!("optimizer.{name}.{part}");
            reader.optional(&key, value.shape(), DType::F32, value.device())
        };
        match (read("exp_avg")?, read("exp_avg_sq")?) {
            (Some(exp_avg), Some(exp_avg_sq)) => {
                let main_param = read("main_param")?;
                let wants = optimizer.has_main_param(value);
                if main_param.is_some() != wants {
                    let [has, want] = [main_param.is_some(), wants].map(|has| if has { "an" } else { "no" });
                    let problem =
                        format!("`{name}` has {has} f32 copy in the optimizer, this one wants {want}");
                    return Err(reader.problem(format!("{problem}: set AdamWOptions::main_params as it was")));
                }
                state.insert(name.clone(), AdamWState { exp_avg, exp_avg_sq, main_param });
            }
            (None, None) => {}
            _ => return Err(reader.problem(format!("only one of `{name}`'s two moments is there"))),
        }
    }
    let step = reader.all_metadata().get(STEP_KEY).and_then(|step| step.parse().ok());
    let step =
        step.ok_or_else(|| reader.problem(format!("metadata `{STEP_KEY}` is missing or not a number")))?;
    let scaling_state = scaling_state::read(&reader)?;
    reader.expect_all_used()?;
    let scaling = scaling.load_state(&scaling_state)?;
    model.visit_mut(&mut |parameter| match values.remove(parameter.name()) {
        Some(value) => parameter.set(value),
        None => Ok(()),
    })?;
    optimizer.resume(model, step, state)?;
    let user = |(key, value): (&String, &String)| Some((key.strip_prefix(USER)?.to_owned(), value.clone()));
    Ok(Loaded { metadata: reader.all_metadata().iter().filter_map(user).collect(), scaling })
}

/// Writes the parameters alone, under their names, to a safetensors file.
///
/// # Errors
/// A file that cannot be written; an old one is whole then.
pub fn save_parameters(path: &Path, model: &(impl Layer + ?Sized)) -> Result<()> {
    let mut writer = Writer::default();
    model.visit(&mut |parameter| writer.tensor(parameter.name(), parameter.tensor()))?;
    writer.save(path)
}

/// Reads the parameters of a safetensors file by their names. The file must hold these and no others. An optimizer that keeps
/// f32 copies of them goes on from those, unless [`AdamW::reload_params`](crate::AdamW::reload_params) is called.
///
/// # Errors
/// As [`load`].
pub fn load_parameters(path: &Path, model: &mut (impl Layer + ?Sized)) -> Result<()> {
    let bytes = file::read(path)?;
    let reader = Reader::new(path, &bytes)?;
    let mut values = model_values(&reader, model, "")?;
    reader.expect_all_used()?;
    model.visit_mut(&mut |parameter| match values.remove(parameter.name()) {
        Some(value) => parameter.set(value),
        None => Ok(()),
    })
}

fn open<'a>(path: &'a Path, bytes: &'a [u8]) -> Result<Reader<'a>> {
    let reader = Reader::new(path, bytes)?;
    match reader.all_metadata().get(VERSION_KEY).map(String::as_str) {
        Some(VERSION) => Ok(reader),
        Some(other) => {
            Err(reader.problem(format!("layout version {other}; this library reads version {VERSION}")))
        }
        None => Err(reader.problem("a safetensors file, but not a training checkpoint".to_owned())),
    }
}

/// Every parameter's value, checked against the model's shapes and dtypes.
fn model_values(
    reader: &Reader<'_>,
    model: &(impl Layer + ?Sized),
    prefix: &str,
) -> Result<BTreeMap<Arc<str>, Tensor>> {
    let mut values = BTreeMap::new();
    model.visit(&mut |parameter| {
        let (key, like) = (format!("{prefix}{}", parameter.name()), parameter.tensor());
        let value = reader.tensor(&key, like.shape(), like.dtype(), like.device())?;
        values.insert(parameter.name().clone(), value);
        Ok(())
    })?;
    Ok(values)
}
