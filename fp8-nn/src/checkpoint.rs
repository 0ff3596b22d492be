//! Checkpoints: one safetensors file with named, typed tensors, from which training resumes bit for bit.
//!
//! | tensors of `DIR/checkpoint.safetensors` | |
//! |---|---|
//! | `model.<parameter>` | the parameters |
//! | `optimizer.<parameter>.{exp_avg,exp_avg_sq}_scale_inv` | the scales of moments in FP8 |
//! | `optimizer.<parameter>.{exp_avg,exp_avg_sq,main_param}` | AdamW's moments, and its f32 copies of bf16, f16 and FP8 parameters; frozen parameters have neither |
//! | `loss_scaler.{scale,growth_tracker,skipped_steps}` | the state of the optimizer's [`LossScaler`](crate::LossScaler), if it has one |
//! | `optimizer_updates` | the steps that count in the bias correction, if skipped ones do not |
//! | `scaling.<n>.{scale,amax_history}` | the scaling state of each recipe and direction |
//!
//! Everything else is in the metadata, including the caller's own.
//!
//! [`save`] writes a temporary file in the same folder, flushes it to disk and renames it
//! ([`AtomicFile`](fp8_kernels::AtomicFile)), so a reader sees the whole old file or the whole new one. The next save removes
//! temporary files of programs that were killed while they saved.
//!
//! [`load`] reads the file twice, with read calls. The first pass checks everything: the header, names, shapes and dtypes
//! against the model, the scaling state, the step count, and that every byte can be read. Only the second pass changes
//! anything. A save that replaces the file in between is harmless, since the old file remains open. If another program writes
//! into the open file, the second pass finds other bytes than the first and returns an error, which says that a part of the
//! file has been loaded.
//!
//! Both need memory for one tensor besides what is saved or loaded.

mod file;
mod finite;
mod gradients;
mod loss_scale;
mod moments;
mod parameters;
pub(crate) mod scaling_state;
pub mod stream;
mod values;

use crate::optimizer::Counts;
use crate::parameter::LoadedState;
use crate::{AdamW, Error, Layer, Optimizer, Parameter, Result, parameters, parameters_mut};
use file::{Reader, Writer};
pub use finite::expect_finite;
use fp8_dist::StateDigest;
use fp8_recipe::{Scaling, ScalingState, StateReport};
pub use parameters::{
    LoadParametersOptions, LoadedParameters, load_parameters, load_parameters_with_options, save_parameters,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const FILE: &str = "checkpoint.safetensors";
/// The metadata key of the layout's version.
const VERSION_KEY: &str = "fp8.version";
const VERSION: &str = "1";
const STEP_KEY: &str = "fp8.optimizer.step";
/// The metadata key of the number of skipped steps. Files without it count as having none.
const SKIPPED_KEY: &str = "fp8.optimizer.skipped";
/// The largest step count that is loaded: f64, in which the bias corrections are computed, has all integers up to it.
const MAX_STEPS: u64 = 1 << f64::MANTISSA_DIGITS;
/// The caller's own keys are kept apart by this prefix.
const USER: &str = "user.";

/// The result of [`load`]. The examples of [`save`] and [`save_with_options`] read its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The caller's metadata, as [`metadata`] returns it.
    pub metadata: BTreeMap<String, String>,
    /// The report on the slots of the scaling state: which of them were restored, recomputed for another recipe, new, or not
    /// used so far. It is complete for recipes that were passed to [`Scaling::prepare`]. Other recipes appear in
    /// [`Scaling::state_report`] after their first scope.
    pub scaling: StateReport,
    /// The parameters whose gradients no step had used when the file was saved, and which [`save_with_options`] did not save.
    pub without_gradients: Vec<String>,
}

/// Options of [`save_with_options`].
///
/// ```
/// use fp8_nn::checkpoint::SaveOptions;
/// assert_eq!(SaveOptions::default(), SaveOptions { without_gradients: false });
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Whether to save although there are gradients that no optimizer step has used. They are not saved, and [`Loaded`] lists their
    /// parameters. Default: false, which refuses to save then.
    pub without_gradients: bool,
}

/// Returns the path of the checkpoint file in a folder, `DIR/checkpoint.safetensors`. See [`save`] for an example.
pub fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Writes model, optimizer, scaling state and the caller's metadata into `dir`, which is created if it does not exist.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
///
/// let dir = std::env::temp_dir().join(format!("fp8-doc-save-{}", std::process::id()));
/// let fc = |seed| {
///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
///     Linear::new("fc", options, &Device::cpu(), &mut StdRng::seed_from_u64(seed))
/// };
/// let (mut model, mut optimizer) = (fc(1)?, AdamW::new(AdamWOptions::default())?);
/// let scaling = Scaling::new(&model, &Device::cpu())?;
/// optimizer.step(&mut model, 1e-3)?;
/// let metadata = [("text".to_owned(), "position 4096".to_owned())].into();
/// checkpoint::save(&dir, &model, &optimizer, &scaling, &metadata)?;
///
/// let (mut other, mut resumed) = (fc(2)?, AdamW::new(AdamWOptions::default())?);
/// let mut scaling = Scaling::new(&other, &Device::cpu())?;
/// let checkpoint::Loaded { metadata: loaded, scaling: report, .. } =
///     checkpoint::load(&dir, &mut other, &mut resumed, &mut scaling)?;
/// assert_eq!((resumed.steps(), &loaded), (1, &metadata));
/// assert!(report.is_plain()); // no scale was recomputed or lost
/// assert_eq!(other.weight().tensor().to_f32_vec()?, model.weight().tensor().to_f32_vec()?);
/// assert_eq!(checkpoint::metadata(&dir)?, metadata); // reads only the header
/// assert!(checkpoint::path(&dir).is_file());
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// Moments and f32 copies of [frozen](Parameter::set_trainable) parameters are not saved. Neither are gradients: call it after the
/// optimizer's step, or before the first microbatch of a step.
///
/// # Errors
/// A gradient to which something was added that no step has used yet: take the step or call [`zero_grad`](crate::zero_grad) first,
/// or use [`save_with_options`]. Steps are [`AdamW::step`], also one that was skipped because of its gradients, and
/// [`Parameter::update`]. A parameter without moments although the optimizer has taken steps and the parameter was never frozen in one; moments of a
/// parameter that the model does not have: [`load`] would refuse the file. A folder or file that cannot be written. In all these
/// cases the old checkpoint is untouched. A folder that cannot be flushed to disk: the new checkpoint is in place, and the error
/// says so.
pub fn save(
    dir: &Path,
    model: &(impl Layer + ?Sized),
    optimizer: &(impl Optimizer + ?Sized),
    scaling: &Scaling,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    save_with_options(dir, model, optimizer, scaling, metadata, &SaveOptions::default())
}

/// Does what [`save`] does, with options.
///
/// ```
/// use fp8_nn::checkpoint::SaveOptions;
/// use fp8_nn::prelude::*;
///
/// let dir = std::env::temp_dir().join(format!("fp8-doc-save-with-{}", std::process::id()));
/// let options = LinearOptions { in_features: 4, out_features: 4, bias: false, ..Default::default() };
/// let mut model = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let (mut optimizer, mut scaling) = (AdamW::new(AdamWOptions::default())?, Scaling::new(&model, &Device::cpu())?);
/// parameters_mut(&mut model)[0].accumulate(&Tensor::full(1.0, [4, 4], DType::F32, &Device::cpu())?)?;
///
/// let refused = checkpoint::save(&dir, &model, &optimizer, &scaling, &Default::default()).unwrap_err();
/// assert!(refused.to_string().contains("the gradient of `fc.weight`"));
/// let options = SaveOptions { without_gradients: true };
/// checkpoint::save_with_options(&dir, &model, &optimizer, &scaling, &Default::default(), &options)?;
/// let loaded = checkpoint::load(&dir, &mut model, &mut optimizer, &mut scaling)?;
/// assert_eq!(loaded.without_gradients, ["fc.weight"]);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// Those of [`save`], except that gradients are no reason to refuse with [`SaveOptions::without_gradients`].
pub fn save_with_options(
    dir: &Path,
    model: &(impl Layer + ?Sized),
    optimizer: &(impl Optimizer + ?Sized),
    scaling: &Scaling,
    metadata: &BTreeMap<String, String>,
    options: &SaveOptions,
) -> Result<()> {
    let optimizer = optimizer.state();
    let (mut writer, mut names, counts) = (Writer::default(), BTreeSet::new(), optimizer.counts()?);
    let steps = counts.steps;
    let problem = |problem: String| Error::Checkpoint { path: path(dir), problem };
    let parameters = parameters(model);
    let unused = gradients::unused(&parameters);
    if let Some(refusal) = gradients::refusal(&unused).filter(|_| !options.without_gradients) {
        return Err(problem(refusal));
    }
    for parameter in &parameters {
        let name = parameter.name();
        values::write(&mut writer, &format!("model.{name}"), parameter)?;
        names.insert(name);
    }
    let mut without = Vec::new();
    for parameter in &parameters {
        let name = parameter.name();
        let state = optimizer.state_of(parameter);
        match state {
            None if steps > 0 && !optimizer.may_lack_state(parameter) => {
                return Err(problem(moments::missing(name, steps)));
            }
            None => without.push(&**name),
            Some(_) => {}
        }
        for (part, tensor) in state.iter().flat_map(|state| state.parts()) {
            writer.tensor_as(&format!("optimizer.{name}.{part}"), moments::file_dtype_of(tensor), tensor)?;
        }
    }
    if let Some(name) = optimizer.state.keys().find(|name| !names.contains(name)) {
        let text = format!("the optimizer has moments of `{name}`, which is no parameter of this model");
        return Err(problem(format!("{text}: save the model that it trains")));
    }
    scaling_state::write(&scaling.state()?, model, &mut writer)?;
    writer.metadata(VERSION_KEY, VERSION);
    writer.metadata(STEP_KEY, &steps.to_string());
    moments::write_rule(&mut writer, optimizer.rule());
    writer.metadata(SKIPPED_KEY, &counts.skipped.to_string());
    if steps > 0 && !without.is_empty() {
        writer.metadata(moments::WITHOUT_KEY, &serde_json::Value::from(without).to_string());
    }
    gradients::write(unused, &mut writer);
    loss_scale::write(counts.updates, optimizer.loss_scale()?, &mut writer)?;
    metadata.iter().for_each(|(key, value)| writer.metadata(&format!("{USER}{key}"), value));
    let path = path(dir);
    writer.save(&path)?;
    tracing::info!(path = %path.display(), step = steps, "checkpoint written");
    Ok(())
}

/// Returns the caller's metadata of the checkpoint in `dir`. It reads only the header
/// of the file. See [`save`] for an example.
///
/// # Errors
/// A file that cannot be read or is not a checkpoint.
pub fn metadata(dir: &Path) -> Result<BTreeMap<String, String>> {
    Ok(user_metadata(&open(&path(dir))?))
}

/// Reads the checkpoint in `dir` into a model, optimizer and scaling made with the same options. Returns the caller's
/// metadata and a report of the scaling state, which may continue under another recipe. See [`save`] for an example.
///
/// Tensors are written in place, so recorded steps continue from the checkpoint.
///
/// A parameter may be [frozen](Parameter::set_trainable) in `model` and not in the model that was saved, or the other way round.
/// Moments and f32 copies of parameters that are frozen in `model` are not kept: a parameter that is to continue with its moments
/// must be trainable when the file is loaded. Parameters that had no moments because they were frozen start with moments of 0, as
/// [`set_trainable`](Parameter::set_trainable) describes. Files of earlier versions do not say which these are: freeze the same
/// parameters to load them.
///
/// With several ranks, either all load the same file, or one loads it and all call
/// [`broadcast_state`](crate::broadcast_state). The next step compares what the ranks have loaded.
///
/// # Errors
/// A file that cannot be read, is not a checkpoint, or is one of another model: the first difference, with both shapes. A
/// trainable parameter without moments although the optimizer had taken steps and the file does not say that the parameter was
/// frozen; a step count above 2⁵³. Nothing has changed then. If the device fails while the state is
/// written, or another program writes to the file meanwhile, a part of it has changed.
pub fn load(
    dir: &Path,
    model: &mut (impl Layer + ?Sized),
    optimizer: &mut (impl Optimizer + ?Sized),
    scaling: &mut Scaling,
) -> Result<Loaded> {
    let (path, optimizer) = (path(dir), optimizer.state_mut());
    let reader = open(&path)?;
    moments::expect_rule(&reader, optimizer.rule())?;
    expect_parameters(&reader, model)?;
    let (mut counts, loss_scale) = (counts(&reader)?, loss_scale::read(&reader)?);
    let steps = counts.steps;
    counts.updates = loss_scale::read_updates(&reader, steps)?;
    let moments = moments::expect(&reader, model, optimizer, steps)?;
    reader.read_through()?;
    let (scaling_state, weights) = scaling_state::read(&reader)?;
    let without_gradients = gradients::read(&reader)?;
    reader.expect_all_used()?;
    let new = optimizer.new_state(model, &moments)?;

    // Everything was checked. From here on it is written into the model.
    let report = scaling.load_state(&scaling_state)?;
    values::read_all(
        &reader,
        model,
        "model.",
        |_| true,
        |parameter| {
            let key = main_param_key(parameter);
            reader.dtype(&key).map(|_| key)
        },
    )?;
    scaling_state::bind(scaling, model, &weights)?;
    optimizer.set_loss_scale(loss_scale)?;
    optimizer.resume(model, counts, new, &mut |parameter, part, current| {
        let name = parameter.name();
        let key = format!("optimizer.{name}.{part}");
        match part {
            "main_param" if reader.dtype(&key).is_none() => {
                values::main_param(&reader, &format!("model.{name}"), parameter)
            }
            _ if !moments.contains(name) => Ok(None),
            _ => moments::read(&reader, &key, current).map(Some),
        }
    })?;
    note_loaded(&reader, model, optimizer, counts);
    tracing::info!(path = %path.display(), step = steps, "checkpoint loaded");
    Ok(Loaded { metadata: user_metadata(&reader), scaling: report, without_gradients })
}

/// Stores digests of the loaded optimizer state in the parameters, for ranks to compare. A file from before the first step
/// has no such state.
fn note_loaded(reader: &Reader<'_>, model: &mut (impl Layer + ?Sized), optimizer: &AdamW, counts: Counts) {
    let (life, mut has_first) = (optimizer.life(), false);
    for parameter in parameters_mut(model) {
        let name = parameter.name().clone();
        let digest = |key: &str, what: String| {
            Some(StateDigest::new(format!("{what}, as it was loaded,"), [reader.hash(key)?.to_le_bytes()]))
        };
        let kept: &[&str] = if parameter.is_trainable() { &moments::PARTS } else { &[] };
        let part = |part: &str| digest(&format!("optimizer.{name}.{part}"), format!("`{part}` of `{name}`"));
        let mut parts: Vec<_> = kept.iter().copied().filter_map(part).collect();
        let has_state = counts.steps > 0 || !parts.is_empty();
        // The first parameter also stands for what there is once.
        if !std::mem::replace(&mut has_first, true) {
            parts.extend(loss_scale::NAMES.iter().filter_map(|key| digest(key, format!("`{key}`"))));
        }
        let loaded = has_state.then(|| LoadedState { optimizer: life.clone(), parts, counts });
        parameter.agreement_mut().set_loaded(loaded);
    }
}

/// Reads the caller's metadata and the scaling state of a checkpoint's file ([`path`]), without its tensors. `None` if
/// [`save_parameters`] wrote the file, which then has neither.
///
/// ```
/// use fp8_nn::{checkpoint, prelude::*};
/// # let dir = std::env::temp_dir().join(format!("fp8-describe-{}", std::process::id()));
/// let options = LinearOptions { in_features: 16, out_features: 16, ..Default::default() };
/// let fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let (scaling, optimizer) = (Scaling::new(&fc, &Device::cpu())?, AdamW::new(AdamWOptions::default())?);
/// let metadata = [("data".to_owned(), "plays".to_owned())].into();
/// checkpoint::save(&dir, &fc, &optimizer, &scaling, &metadata)?;
///
/// let (read, state) = checkpoint::describe(&checkpoint::path(&dir))?.ok_or("parameters alone")?;
/// assert_eq!((read, state), (metadata, scaling.state()?));
/// # std::fs::remove_dir_all(dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A file that cannot be read, or is no checkpoint of this version.
pub fn describe(path: &Path) -> Result<Option<(BTreeMap<String, String>, ScalingState)>> {
    if !Reader::open(path)?.all_metadata().contains_key(VERSION_KEY) {
        return Ok(None);
    }
    let reader = open(path)?;
    Ok(Some((user_metadata(&reader), scaling_state::read(&reader)?.0)))
}

fn open(path: &Path) -> Result<Reader<'_>> {
    let reader = Reader::open(path)?;
    match reader.all_metadata().get(VERSION_KEY).map(String::as_str) {
        Some(VERSION) => Ok(reader),
        Some(other) => {
            Err(reader.problem(format!("layout version {other}; this library reads version {VERSION}")))
        }
        None => Err(reader.problem("a safetensors file, but not a training checkpoint".to_owned())),
    }
}

fn user_metadata(reader: &Reader<'_>) -> BTreeMap<String, String> {
    let user = |(key, value): (&String, &String)| Some((key.strip_prefix(USER)?.to_owned(), value.clone()));
    reader.all_metadata().iter().filter_map(user).collect()
}

/// Returns the number of steps of the optimizer, and how many of them were skipped.
fn counts(reader: &Reader<'_>) -> Result<Counts> {
    let count = |key: &str, missing: Option<u64>, most: u64| {
        let Some(text) = reader.all_metadata().get(key) else {
            return missing.ok_or_else(|| reader.problem(format!("metadata `{key}` is missing")));
        };
        match text.parse() {
            Ok(count) if count <= most => Ok(count),
            _ => Err(reader.problem(format!("metadata `{key}` is {text}: expected a number up to {most}"))),
        }
    };
    let steps = count(STEP_KEY, None, MAX_STEPS)?;
    Ok(Counts { steps, skipped: count(SKIPPED_KEY, Some(0), steps)?, updates: None })
}

/// Returns an error unless the file has every parameter, with the model's shape and dtype.
fn expect_parameters(reader: &Reader<'_>, model: &(impl Layer + ?Sized)) -> Result<()> {
    let mut names = BTreeSet::new();
    for parameter in parameters(model) {
        let name = parameter.name();
        if !names.insert(name) {
            return Err(Error::DuplicateParameter(name.clone()));
        }
        values::expect(reader, &format!("model.{name}"), parameter)?;
    }
    Ok(())
}

fn main_param_key(parameter: &Parameter) -> String {
    format!("optimizer.{}.main_param", parameter.name())
}
