//! Writes a checkpoint.

use super::layout::{EVENTS, SKIPPED_KEY, STEP_KEY, USER, VERSION, VERSION_KEY, path};
use super::writer::Writer;
use super::{gradients, loss_scale, moments, scaling_state, tuned_products, values};
use crate::{AdamW, Error, Layer, Optimizer, Result, parameters};
use fp8_recipe::Scaling;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Options of [`save_with_options`].
///
/// ```
/// use fp8_nn::checkpoint::SaveOptions;
/// assert_eq!(SaveOptions::default(), SaveOptions { without_gradients: false });
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Whether to save although there are gradients that no optimizer step has used. They are not saved, and [`Loaded`](super::Loaded) lists their
    /// parameters. Default: false, which refuses to save then.
    pub without_gradients: bool,
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
/// Moments and f32 copies of [frozen](crate::Parameter::set_trainable) parameters are not saved. Neither are gradients: call it after the
/// optimizer's step, or before the first microbatch of a step.
///
/// # Errors
/// A gradient to which something was added that no step has used yet: take the step or call [`zero_grad`](crate::zero_grad) first,
/// or use [`save_with_options`]. Steps are [`AdamW::step`](crate::AdamW::step), also one that was skipped because of its gradients, and
/// [`Parameter::update`](crate::Parameter::update). A parameter without moments although the optimizer has taken steps and the parameter was never frozen in one; moments of a
/// parameter that the model does not have: [`load`](super::load) would refuse the file. A parameter that is
/// [cut over ranks](crate::Placement::Cut): see [`save_on`](super::save_on). A folder or file that cannot be written. In all these
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
    for parameter in parameters(model) {
        parameter.expect_whole("save", "call `checkpoint::save_on`, which writes whole tensors")?;
    }
    let (path, optimizer) = (path(dir), optimizer.state());
    contents(&path, model, optimizer, scaling, metadata, options)?.save(&path)?;
    note_saved(&path, optimizer);
    Ok(())
}

pub(super) fn note_saved(path: &Path, optimizer: &AdamW) {
    tracing::info!(target: EVENTS, path = %path.display(), step = optimizer.steps(), "checkpoint written");
}

/// Returns what the file at `path` will have. Nothing has been written then.
pub(super) fn contents(
    path: &Path,
    model: &(impl Layer + ?Sized),
    optimizer: &AdamW,
    scaling: &Scaling,
    metadata: &BTreeMap<String, String>,
    options: &SaveOptions,
) -> Result<Writer> {
    let (mut writer, mut names, counts) = (Writer::default(), BTreeSet::new(), optimizer.counts()?);
    let steps = counts.steps;
    let problem = |problem: String| Error::Checkpoint { path: path.to_owned(), problem };
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
            let (key, dtype) = (format!("optimizer.{name}.{part}"), moments::file_dtype_of(tensor));
            let cut = moments::cut_of(parameter, part).map_err(problem)?;
            writer.of_parameter(&key, dtype, tensor, parameter, cut)?;
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
    tuned_products::write(model, &mut writer);
    loss_scale::write(counts.updates, optimizer.loss_scale()?, &mut writer)?;
    metadata.iter().for_each(|(key, value)| writer.metadata(&format!("{USER}{key}"), value));
    Ok(writer)
}
