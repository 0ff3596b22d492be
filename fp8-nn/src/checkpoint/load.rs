//! Reads a checkpoint.

use super::layout::{EVENTS, MAX_STEPS, SKIPPED_KEY, STEP_KEY, open, path, user_metadata};
use super::reader::Reader;
use super::scaling_state::Weights;
use super::{gradients, loss_scale, moments, scaling_state, tuned_products, values};
use crate::optimizer::{AdamWState, Counts};
use crate::parameter::LoadedState;
use crate::{AdamW, Error, Layer, Optimizer, Parameter, Result, parameters, parameters_mut};
use fp8_dist::StateDigest;
use fp8_kernels::ops::LossScaleState;
use fp8_recipe::{Scaling, ScalingState, StateReport};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The result of [`load`]. The examples of [`save`](super::save) and [`save_with_options`](super::save_with_options) read its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The caller's metadata, as [`metadata`](super::metadata) returns it.
    pub metadata: BTreeMap<String, String>,
    /// The report on the slots of the scaling state: which of them were restored, recomputed for another recipe, new, or not
    /// used so far. It is complete for recipes that were passed to [`Scaling::prepare`]. Other recipes appear in
    /// [`Scaling::state_report`] after their first scope.
    pub scaling: StateReport,
    /// The parameters whose gradients no step had used when the file was saved, and which [`save_with_options`](super::save_with_options) did not save.
    pub without_gradients: Vec<String>,
}

/// Reads the checkpoint in `dir` into a model, optimizer and scaling made with the same options. Returns the caller's
/// metadata and a report of the scaling state, which may continue under another recipe. See [`save`](super::save) for an example.
///
/// Tensors are written in place, so recorded steps continue from the checkpoint.
///
/// A parameter may be [frozen](Parameter::set_trainable) in `model` and not in the model that was saved, or the other way round.
/// Moments and f32 copies of parameters that are frozen in `model` are not kept: a parameter that is to continue with its moments
/// must be trainable when the file is loaded. Parameters that had no moments because they were frozen start with moments of 0, as
/// [`set_trainable`](Parameter::set_trainable) describes. Files of earlier versions do not say which these are: freeze the same
/// parameters to load them.
///
/// With several ranks, [`load_on`](super::load_on) loads one file on all. Or all call this with the same file, or one loads it and all call
/// [`broadcast_state`](crate::broadcast_state). The next step compares what the ranks have loaded.
///
/// # Errors
/// A file that cannot be read, is not a checkpoint, or is one of another model: the first difference, with both shapes. A
/// trainable parameter without moments although the optimizer had taken steps and the file does not say that the parameter was
/// frozen; a step count above 2⁵³; a parameter that is [cut over ranks](crate::Placement::Cut). Nothing has changed then. If the device fails while the state is
/// written, or another program writes to the file meanwhile, a part of it has changed.
pub fn load(
    dir: &Path,
    model: &mut (impl Layer + ?Sized),
    optimizer: &mut (impl Optimizer + ?Sized),
    scaling: &mut Scaling,
) -> Result<Loaded> {
    for parameter in parameters(model) {
        parameter.expect_whole("load", "call `checkpoint::load_on`, which reads this rank's part")?;
    }
    let (path, optimizer) = (path(dir), optimizer.state_mut());
    Checked::read(&path, model, optimizer)?.load(model, optimizer, scaling)
}

/// A file that fits the model and the optimizer, all of which could be read.
#[derive(Debug)]
pub(super) struct Checked<'a> {
    path: &'a Path,
    pub(super) reader: Reader<'a>,
    counts: Counts,
    loss_scale: Option<LossScaleState>,
    /// The parameters whose moments are loaded.
    moments: BTreeSet<Arc<str>>,
    scaling: ScalingState,
    weights: Weights,
    without_gradients: Vec<String>,
    /// The state of parameters that had none.
    new: BTreeMap<Arc<str>, AdamWState>,
}

impl<'a> Checked<'a> {
    pub(super) fn read(path: &'a Path, model: &(impl Layer + ?Sized), optimizer: &AdamW) -> Result<Self> {
        let reader = open(path)?;
        moments::expect_rule(&reader, optimizer.rule())?;
        expect_parameters(&reader, model)?;
        let (mut counts, loss_scale) = (counts(&reader)?, loss_scale::read(&reader)?);
        let steps = counts.steps;
        counts.updates = loss_scale::read_updates(&reader, steps)?;
        let moments = moments::expect(&reader, model, optimizer, steps)?;
        reader.read_through()?;
        let (scaling, weights) = scaling_state::read(&reader)?;
        let without_gradients = gradients::read(&reader)?;
        reader.expect_all_used()?;
        let new = optimizer.new_state(model, &moments)?;
        Ok(Self { path, reader, counts, loss_scale, moments, scaling, weights, without_gradients, new })
    }

    /// Writes it into the model.
    pub(super) fn load(
        self,
        model: &mut (impl Layer + ?Sized),
        optimizer: &mut AdamW,
        scaling: &mut Scaling,
    ) -> Result<Loaded> {
        let Self { path, reader, counts, moments, without_gradients, .. } = self;
        let report = scaling.load_state(&self.scaling)?;
        let main_param = |parameter: &Parameter| {
            let key = format!("optimizer.{}.main_param", parameter.name());
            reader.dtype(&key).map(|_| key)
        };
        values::read_all(&reader, model, "model.", |_| true, main_param)?;
        scaling_state::bind(scaling, model, &self.weights)?;
        optimizer.set_loss_scale(self.loss_scale)?;
        optimizer.resume(model, counts, self.new, &mut |parameter, part, current| {
            let name = parameter.name();
            match part {
                "main_param" if reader.dtype(&format!("optimizer.{name}.{part}")).is_none() => {
                    values::main_param(&reader, &format!("model.{name}"), parameter)
                }
                _ if !moments.contains(name) => Ok(None),
                _ => moments::read(&reader, parameter, part, current).map(Some),
            }
        })?;
        note_loaded(&reader, model, optimizer, counts);
        tuned_products::apply(&reader, model)?;
        tracing::info!(
            target: EVENTS,
            path = %path.display(),
            step = counts.steps,
            "checkpoint loaded"
        );
        Ok(Loaded { metadata: user_metadata(&reader), scaling: report, without_gradients })
    }
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
