//! Models that are written under the names of Hugging Face.

use super::config::Config;
use super::family::HEAD;
use super::folder::Folder;
use super::jobs::Monitor;
use super::output::{Copy, Entry, Layout};
use super::save::{CHUNK, file_names};
use super::source::{ModelSource, Source};
use super::targets::{Target, float, rounded, targets};
use super::wholes::on_first;
use crate::{Error, Result};
use fp8_kernels::DType;
use fp8_nn::Gpt;
use fp8_nn::checkpoint::stream::file_dtype;
use std::collections::BTreeMap;
use std::path::Path;

/// The parameter of the embedding.
pub(super) const TABLE: &str = "embedding.weight";

/// Writes a model to the new folder `out`: `config.json`, and its tensors under the names of [`Config::tensors`].
///
/// This is the inverse of [`Folder::load`]: parameters that hold several tensors are split, and those that the family stores as
/// in × out are transposed. `dtype` is that of all tensors, f32, bf16 or f16; with `None`, each keeps that of its parameter.
/// Weights that are stored in FP8 codes are dequantized; to write FP8, [`quantize`](super::quantize) the folder.
/// Values that are infinite or NaN are written as they are: a model that went wrong can be looked at.
/// `config.json` is that of `config` with this dtype and without a `quantization_config`. Everything that is no tensor, such as
/// ε and the base of the rotary positions, comes from `config`, which should be the one that the model was made from.
///
/// Tensors are written one by one, in files of up to 5 GB: this needs memory for one parameter besides the model. The folder
/// appears whole or not at all ([`AtomicFolder`](crate::AtomicFolder)). [`Folder::save_model`] keeps what did not change.
///
/// The ranks that share the layers of a model (`LoadOptions::tensor_parallel`) call it together, those of one replica. The first
/// one writes, byte for byte what one process would write, and all have memory for one whole parameter.
///
/// ```
/// use fp8_hf::{self as hf, Config, Folder, LoadOptions};
/// use fp8_nn::prelude::*;
/// let place = std::env::temp_dir().join(format!("fp8-save-model-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let config = Config::from_json(
///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
///         "num_attention_heads": 2}"#,
/// )?;
/// let device = Device::cpu();
/// let model = Gpt::new("model", &config.gpt_options(), &device, &mut fp8_nn::rand::rng())?;
/// hf::save_model(&place.join("out"), &config, &model, None)?;
///
/// let folder = Folder::open(&place.join("out"))?;
/// let again = folder.load(&LoadOptions::default(), &device)?;
/// for (one, other) in parameters(&model).into_iter().zip(parameters(&again)) {
///     assert_eq!(one.tensor().to_f32_vec()?, other.tensor().to_f32_vec()?);
/// }
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::File`] for a model whose parameters are not those of `config`, for a finite value that the dtype cannot hold,
/// such as 70000 in f16, and if something exists at `out`; [`Error::Option`] for a dtype that is no float; [`Error::Io`] if a
/// file cannot be written; [`Error::Rank`] on other ranks than the first if that fails. Nothing is left at `out` then.
pub fn save_model(out: &Path, config: &Config, model: &Gpt, dtype: Option<DType>) -> Result<()> {
    on_first(model, &writing(out), |wholes| {
        write_new(out, config, &ModelSource::new(model, wholes), dtype, None, &Monitor::default()).map(drop)
    })
}

/// Writes a new folder from any source, with the other files of the folder `carried`. Returns the bytes of all tensors.
pub(super) fn write_new(
    out: &Path,
    config: &Config,
    source: &dyn Source,
    dtype: Option<DType>,
    carried: Option<&Path>,
    monitor: &Monitor,
) -> Result<u64> {
    let problem = |problem: String| Error::File { path: out.to_owned(), problem };
    let at = |path: &Path, problem: String| Error::File { path: path.to_owned(), problem };
    expect_float("save_model", dtype)?;
    let targets = targets(config, source).map_err(problem)?;
    let ordered: Vec<(String, &Target, DType)> = config
        .tensors()
        .into_iter()
        .filter_map(|spec| {
            let target = targets.get(&spec.name)?;
            Some((spec.name, target, dtype.unwrap_or(target.info.dtype)))
        })
        .collect();
    let sizes: Vec<u64> = ordered.iter().map(|(_, target, dtype)| target.bytes(*dtype)).collect();
    let entries: Vec<Entry> = ordered
        .iter()
        .zip(file_names(&sizes))
        .map(|((name, target, dtype), file)| entry(file, name, target, *dtype))
        .collect();
    let main = ordered.first().map_or(DType::F32, |(_, _, dtype)| *dtype);
    let config = config.with_quantization(None)?.with_dtype(main)?;
    let output = Layout::new(&entries).map_err(problem)?.create(out, carried)?;
    monitor.start(sizes.iter().sum());
    let done = |bytes: u64| monitor.advance(bytes);
    output.flush_during(|| {
        for (name, target, dtype) in &ordered {
            if let Some(spot) = output.spot(name) {
                let named = |text: String| at(source.file().unwrap_or(out), format!("`{name}` {text}"));
                target.write(source, &output, spot, *dtype, &named, &done)?;
            }
        }
        Ok(())
    })?;
    output.commit(config.json())?;
    Ok(sizes.iter().sum())
}

impl Folder {
    /// Writes a copy of this folder to the new folder `out`, with the values of `model`, a model of its configuration such as one
    /// that [`load`](Self::load) made and that was trained.
    ///
    /// Tensors whose values did not change keep their bytes, in files of the same names, also if the parameters have another
    /// dtype than the files. With a `dtype` (f32, bf16 or f16), all tensors but FP8 weights are written in it; with `None`, each
    /// keeps that of its file. FP8 weights keep their codes if the model has the values of all of them. If one changed,
    /// the folder is written without FP8: [`quantize`](super::quantize) it again. `config.json` says so. All other files, such
    /// as the tokenizer, are copied.
    ///
    /// Tensors are written one by one, which needs memory for one parameter besides the model. Ranks that share the layers of a model
    /// call it together: see [`save_model`](super::save_model).
    ///
    /// ```
    /// # use fp8_hf::{self as hf, Config, Folder, LoadOptions};
    /// # use fp8_nn::prelude::*;
    /// # let place = std::env::temp_dir().join(format!("fp8-save-tuned-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let config = Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 2}"#,
    /// # )?;
    /// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// # hf::save_model(&place.join("model"), &config, &model, Some(DType::BF16))?;
    /// let folder = Folder::open(&place.join("model"))?;
    /// let mut model = folder.load(&LoadOptions { trainable: true, ..Default::default() }, &Device::cpu())?;
    /// for parameter in parameters_mut(&mut model).into_iter().filter(|parameter| parameter.name().ends_with("norm.weight")) {
    ///     parameter.update(|value, _| Ok(*value = ops::scale(value, 2.0)?))?; // in place of training
    /// }
    /// folder.save_model(&place.join("tuned"), &model, None)?;
    ///
    /// let tuned = Folder::open(&place.join("tuned"))?;
    /// assert_eq!(tuned.values("model.norm.weight")?, [2.0; 8]);
    /// assert_eq!(tuned.values("lm_head.weight")?, folder.values("lm_head.weight")?);
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] for a model whose parameters are not those of the configuration, for a tied model whose files have a
    /// head that is not the embedding, for a finite value that its dtype cannot hold, and if something exists at `out`;
    /// [`Error::Option`] for a dtype that is no float; [`Error::Io`] if a file cannot be read or written. Nothing is left at
    /// `out` then. [`Error::Rank`] on other ranks than the first if that fails.
    pub fn save_model(&self, out: &Path, model: &Gpt, dtype: Option<DType>) -> Result<()> {
        on_first(model, &writing(out), |wholes| self.save_from(out, &ModelSource::new(model, wholes), dtype))
    }

    fn save_from(&self, out: &Path, source: &ModelSource<'_>, dtype: Option<DType>) -> Result<()> {
        expect_float("save_model", dtype)?;
        self.expect_tied()?;
        let targets = self.stored_targets(source)?;
        let keeps_fp8 = self.keeps_fp8(&targets, source)?;
        let main = self.main_dtype();
        // `None` is a tensor that keeps its bytes.
        let (mut entries, mut fates) = (Vec::new(), Vec::new());
        for stored in self.weights.names() {
            let file = self.weights.file_of(stored).unwrap_or_default().to_owned();
            let name = self.logical(stored);
            let info = self.info(name)?;
            let fate = match targets.get(name) {
                None if self.is_scale(name) && !keeps_fp8 => continue,
                None => None,
                Some(_) if self.is_quantized(name) && keeps_fp8 => None,
                Some(target) => {
                    let own = float(info.dtype);
                    let written = dtype.or(own).unwrap_or(main);
                    let keeps = own == Some(written)
                        && is_rounded(written, target.info.exact)
                        && self.is_unchanged(name, target, source)?;
                    if keeps { None } else { Some((target, written)) }
                }
            };
            match fate {
                Some((target, dtype)) => {
                    entries.push(entry(file, name, target, dtype));
                    fates.push((name, fate));
                }
                None => {
                    let info = self.weights.info(stored).unwrap_or(info);
                    let (dtype, shape) = (info.dtype, info.shape.clone());
                    entries.push(Entry { file, name: stored.to_owned(), dtype, shape });
                    fates.push((stored, fate));
                }
            }
        }
        let mut config = self.config.clone();
        if !keeps_fp8 {
            config = config.with_quantization(None)?;
        }
        if let Some(dtype) = dtype {
            config = config.with_dtype(dtype)?;
        }
        let output =
            Layout::new(&entries).map_err(|problem| self.problem(problem))?.create(out, Some(&self.path))?;
        output.flush_during(|| {
            let mut buffer = Vec::new();
            for (name, fate) in &fates {
                let Some(spot) = output.spot(name) else { continue };
                match fate {
                    Some((target, dtype)) => {
                        let named = |text: String| Error::File {
                            path: out.to_owned(),
                            problem: format!("`{name}` {text}"),
                        };
                        target.write(source, &output, spot, *dtype, &named, &|_| Ok(()))?;
                    }
                    None => {
                        for copy in Copy::parts(&self.weights, name, spot, CHUNK) {
                            copy.run(&self.weights, &output, &mut buffer)?;
                        }
                    }
                }
            }
            Ok(())
        })?;
        output.commit(config.json())
    }

    /// Returns the tensors of the files that belong to parameters, by their names in the files.
    fn stored_targets(&self, source: &dyn Source) -> Result<BTreeMap<String, Target>> {
        let all = targets(&self.config, source).map_err(|problem| self.problem(problem))?;
        let mut all: BTreeMap<String, Target> =
            all.into_iter().map(|(name, target)| (self.stored(&name).to_owned(), target)).collect();
        // The head that a tied model has no use for is written as its embedding, with which some readers do not replace it.
        if let (None, Some(info)) = (all.get(HEAD), self.weights.info(HEAD)) {
            let table = all.values().find(|target| target.parameter == TABLE);
            if let Some(table) = table.filter(|table| table.shape == info.shape).cloned() {
                all.insert(HEAD.to_owned(), table);
            }
        }
        Ok(all)
    }

    /// Returns whether the model has the values of all FP8 weights.
    fn keeps_fp8(&self, targets: &BTreeMap<String, Target>, source: &dyn Source) -> Result<bool> {
        for name in self.quantized.keys() {
            match targets.get(name) {
                Some(target) if self.is_unchanged(name, target, source)? => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Returns whether a parameter holds what [`load`](Self::load) reads into it.
    fn is_unchanged(&self, name: &str, target: &Target, source: &dyn Source) -> Result<bool> {
        for rows in target.parts() {
            let stored = self.rows(name, rows.clone())?;
            let own = target.read(source, rows)?;
            let is_same =
                |(&own, &stored): (&f32, &f32)| own.to_bits() == rounded(stored, target.info.exact).to_bits();
            if !own.iter().zip(&stored).all(is_same) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns whether a parameter of dtype `parameter` may hold less than a file of dtype `file` does. If it does not, writing its
/// values gives the bytes of the file where nothing changed.
fn is_rounded(file: DType, parameter: DType) -> bool {
    file != parameter && parameter != DType::F32
}

/// Names the work of the first of several ranks, for the others.
pub(super) fn writing(out: &Path) -> String {
    format!("writing {}", out.display())
}

fn entry(file: String, name: &str, target: &Target, dtype: DType) -> Entry {
    Entry { file, name: name.to_owned(), dtype: file_dtype(dtype), shape: target.shape.clone() }
}

pub(super) fn expect_float(part: &str, dtype: Option<DType>) -> Result<()> {
    match dtype {
        Some(dtype) if !dtype.is_float() => Err(Error::Option {
            part: part.into(),
            option: "dtype",
            value: dtype.to_string(),
            remedy: "expected f32, bf16 or f16".into(),
        }),
        _ => Ok(()),
    }
}
