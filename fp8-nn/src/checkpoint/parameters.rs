//! Files with parameters alone, and loading a part of them.

use super::reader::Reader;
use super::values;
use super::writer::Writer;
use crate::{Error, Layer, Result, parameters};
use fp8_recipe::matches_name;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Options of [`load_parameters_with_options`]. With the defaults it does what [`load_parameters`] does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadParametersOptions {
    /// Patterns of the parameters to load, such as `gpt.blocks.*` or `norm`. `*` stands for any text; a pattern without `*` matches
    /// a name that has it as a part between dots. Other parameters of the model and other tensors of the file are passed over.
    /// Default: none, which selects all.
    pub only: Vec<String>,
    /// The prefix that the names in the file have in front of the model's. Tensors without it are passed over. Default: "".
    /// With "model.", a training checkpoint ([`path`](super::path)) can be read.
    pub prefix: String,
    /// Whether parameters that the file does not have stay as they are. Default: false, which is an error.
    pub allow_missing: bool,
    /// Whether tensors of the file that the model does not have are passed over. Default: false, which is an error.
    pub allow_extra: bool,
}

/// The result of [`load_parameters_with_options`]: what was loaded and what was not. The example of [`load_parameters_with_options`] reads all fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedParameters {
    /// The parameters that were loaded, in the model's order.
    pub loaded: Vec<Arc<str>>,
    /// The selected parameters that the file does not have, in the model's order. They are unchanged.
    pub missing: Vec<Arc<str>>,
    /// The selected tensors of the file that the model does not have, by their names in the file, sorted.
    pub extra: Vec<String>,
}

/// Writes only the parameters, under their names, to a safetensors file.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
///
/// let dir = std::env::temp_dir().join(format!("fp8-doc-parameters-{}", std::process::id()));
/// let fc = |seed| {
///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
///     Linear::new("fc", options, &Device::cpu(), &mut StdRng::seed_from_u64(seed))
/// };
/// # std::fs::create_dir_all(&dir).unwrap();
/// let (first, mut second) = (fc(1)?, fc(2)?);
/// checkpoint::save_parameters(&dir.join("fc.safetensors"), &first)?;
/// checkpoint::load_parameters(&dir.join("fc.safetensors"), &mut second)?;
/// assert_eq!(second.weight().tensor().to_f32_vec()?, first.weight().tensor().to_f32_vec()?);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A parameter that is [cut over ranks](crate::Placement::Cut); a file that cannot be written: as [`save`](super::save).
pub fn save_parameters(path: &Path, model: &(impl Layer + ?Sized)) -> Result<()> {
    let mut writer = Writer::default();
    for parameter in parameters(model) {
        parameter
            .expect_whole("save_parameters", "call `checkpoint::save_on`, which writes whole tensors")?;
        values::write(&mut writer, parameter.name(), parameter)?;
    }
    writer.save(path)
}

/// Reads the parameters of a safetensors file by their names. The file must hold these and no others;
/// [`load_parameters_with_options`] loads a part. See [`save_parameters`] for an example.
///
/// An optimizer that keeps f32 copies continues from those, unless
/// [`AdamW::reload_params`](crate::AdamW::reload_params) is called.
///
/// # Errors
/// As [`load`](super::load).
pub fn load_parameters(path: &Path, model: &mut (impl Layer + ?Sized)) -> Result<()> {
    load_parameters_with_options(path, model, &LoadParametersOptions::default()).map(drop)
}

/// [`load_parameters`] for a file and a model that have only some parameters in common, for instance a model with a new head, or
/// with adapters around pretrained blocks. Returns which parameters were loaded, which the file does not have, and which tensors
/// the model does not have.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let dir = std::env::temp_dir().join(format!("fp8-doc-part-{}", std::process::id()));
/// let fc = |path: &str, out_features| {
///     let options = LinearOptions { in_features: 4, out_features, bias: false, ..Default::default() };
///     Linear::new(path, options, &Device::cpu(), &mut fp8_nn::rand::rng())
/// };
/// # std::fs::create_dir_all(&dir).unwrap();
/// let pretrained = Stack(vec![Box::new(fc("body", 4)?), Box::new(fc("head", 10)?)]);
/// checkpoint::save_parameters(&dir.join("all.safetensors"), &pretrained)?;
///
/// let mut model = Stack(vec![Box::new(fc("body", 4)?), Box::new(fc("classes", 3)?)]);
/// let options =
///     checkpoint::LoadParametersOptions { allow_missing: true, allow_extra: true, ..Default::default() };
/// let checkpoint::LoadedParameters { loaded, missing, extra } =
///     checkpoint::load_parameters_with_options(&dir.join("all.safetensors"), &mut model, &options)?;
/// assert_eq!(loaded, ["body.weight".into()]);
/// assert_eq!(missing, ["classes.weight".into()]); // keeps its initial values
/// assert_eq!(extra, ["head.weight"]);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// As [`load_parameters`], less what the options allow: a parameter of another shape or dtype than in the file is always an error. A
/// pattern of `only` that matches no parameter of the model; a selected parameter that is [cut over ranks](crate::Placement::Cut). Nothing has changed then.
pub fn load_parameters_with_options(
    path: &Path,
    model: &mut (impl Layer + ?Sized),
    options: &LoadParametersOptions,
) -> Result<LoadedParameters> {
    let LoadParametersOptions { only, prefix, allow_missing, allow_extra } = options;
    let is_selected = |name: &str| only.is_empty() || only.iter().any(|pattern| matches_name(pattern, name));
    let (mut names, mut loaded, mut missing) = (BTreeSet::new(), Vec::new(), Vec::new());
    let all = parameters(model);
    if let Some(pattern) = only.iter().find(|pattern| !all.iter().any(|p| matches_name(pattern, p.name()))) {
        return Err(Error::Option {
            part: "load_parameters_with_options".to_owned(),
            option: "only",
            value: format!("\"{pattern}\""),
            remedy: "it matches no parameter of the model: expected a pattern such as \"*.blocks.0.*\" or \"head\""
                .to_owned(),
        });
    }
    let reader = Reader::open(path)?;
    for parameter in all.into_iter().filter(|parameter| is_selected(parameter.name())) {
        let name = parameter.name();
        if !names.insert(name.clone()) {
            return Err(Error::DuplicateParameter(name.clone()));
        }
        let key = format!("{prefix}{name}");
        if *allow_missing && reader.dtype(&key).is_none() {
            missing.push(name.clone());
            continue;
        }
        parameter
            .expect_whole("load_parameters", "call `checkpoint::load_on`, which reads this rank's part")?;
        values::expect(&reader, &key, parameter)?;
        loaded.push(name.clone());
    }
    let extra = reader.unused(|name| name.strip_prefix(prefix.as_str()).is_some_and(is_selected));
    if let (Some(name), false) = (extra.first(), allow_extra) {
        return Err(reader.without_place(name));
    }
    reader.read_through_used()?;
    let chosen: BTreeSet<&Arc<str>> = loaded.iter().collect();
    values::read_all(&reader, model, prefix, |parameter| chosen.contains(parameter.name()), |_| None)?;
    Ok(LoadedParameters { loaded, missing, extra })
}
