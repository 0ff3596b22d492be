//! Folders that are written: a new one from tensors, and a copy of one with some tensors replaced.

use super::config::Config;
use super::family::HEAD;
use super::folder::Folder;
use super::jobs::{self, Monitor};
use super::output::{Copy, Entry, Layout, Spot};
use super::weights::SINGLE;
use crate::{Error, Result};
use fp8_kernels::Tensor;
use fp8_nn::checkpoint::stream::file_dtype;
use std::collections::BTreeMap;
use std::path::Path;

/// Larger models are written as several files.
const FILE_BYTES: u64 = 5_000_000_000;
/// Bytes that a thread copies at a time.
pub(super) const CHUNK: usize = 4 << 20;

/// Writes a model to the new folder `out`: `config.json`, and its tensors under the names of [`Config::tensors`].
///
/// Tensors are floats and are stored in their own dtype, in files of up to 5 GB. `config.json` is that of `config`, without a
/// `quantization_config`, and with the dtype of the embedding if it names one. The folder appears whole or not at all
/// ([`AtomicFolder`](crate::AtomicFolder)).
///
/// ```
/// use fp8_hf::{self as hf, Folder, WeightInfo, Weights};
/// use fp8_nn::prelude::*;
/// use std::collections::BTreeMap;
/// let place = std::env::temp_dir().join(format!("fp8-save-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let config = hf::Config::from_json(
///     r#"{"model_type": "qwen2", "vocab_size": 4, "hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 1,
///         "num_attention_heads": 1, "tie_word_embeddings": true}"#,
/// )?;
/// let mut tensors = BTreeMap::new();
/// for spec in config.tensors() {
///     let twos = vec![bf16::from_f32(2.0); spec.shape.iter().product()];
///     tensors.insert(spec.name, Tensor::from_vec(twos, spec.shape, &Device::cpu())?);
/// }
/// hf::save(&place.join("model"), &config, &tensors)?;
///
/// let folder = Folder::open(&place.join("model"))?;
/// assert_eq!(hf::Config::read(&place.join("model/config.json"))?, config);
/// assert_eq!(folder.values("model.norm.weight")?, [2.0, 2.0]);
/// let weights: &Weights = &folder.weights;
/// let info: &WeightInfo = weights.info("model.norm.weight").ok_or("missing")?;
/// assert_eq!((info.dtype, &info.shape[..], info.bytes), (hf::Dtype::BF16, &[2][..], 4));
/// let mut bytes = [0; 2];
/// weights.read("model.norm.weight", 2, &mut bytes)?;
/// assert_eq!(bf16::from_le_bytes(bytes).to_f32(), 2.0);
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::File`] for a tensor that is missing, has another shape, is no float, or is none of the model's, and if something
/// exists at `out`; [`Error::Io`] if a file cannot be written. Nothing is left at `out` then.
pub fn save(out: &Path, config: &Config, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let problem = |problem: String| Error::File { path: out.to_owned(), problem };
    let specs = config.tensors();
    let mut sizes = Vec::new();
    for spec in &specs {
        let name = &spec.name;
        let tensor = tensors.get(name).ok_or_else(|| problem(format!("tensor `{name}` is missing")))?;
        expect_shape(name, tensor, &spec.shape).map_err(problem)?;
        expect_float(name, tensor).map_err(problem)?;
        sizes.push((name, tensor, (tensor.shape().iter().product::<usize>() * tensor.dtype().size()) as u64));
    }
    if let Some(name) = tensors.keys().find(|name| !specs.iter().any(|spec| spec.name == **name)) {
        return Err(problem(format!("tensor `{name}` has no place in a {} model", config.family.model_type)));
    }
    let bytes: Vec<u64> = sizes.iter().map(|&(_, _, size)| size).collect();
    let entries: Vec<Entry> = sizes
        .iter()
        .zip(file_names(&bytes))
        .map(|(&(name, tensor, _), file)| entry(file, name, tensor))
        .collect();
    let mut config = config.with_quantization(None)?;
    if let (true, Some((_, first, _))) = (config.names_dtype(), sizes.first()) {
        config = config.with_dtype(first.dtype())?;
    }
    let output = Layout::new(&entries).map_err(problem)?.create(out, None)?;
    let targets = spots(&entries, |name| output.spot(name));
    for (name, spot) in &targets {
        if let Some(tensor) = tensors.get(*name) {
            output.tensor(*spot, tensor)?;
        }
    }
    output.commit(config.json())
}

impl Folder {
    /// Writes a copy of this folder to the new folder `out`, with some tensors replaced. All others keep their bytes, in files
    /// of the same names. `config.json`, tokenizer, chat template and generation files are copied.
    ///
    /// ```
    /// # use fp8_hf::{self as hf, Folder};
    /// # use fp8_nn::prelude::*;
    /// # let place = std::env::temp_dir().join(format!("fp8-save-folder-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let config = hf::Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 4, "hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 1, "tie_word_embeddings": true}"#,
    /// # )?;
    /// # let zeros = |spec: hf::TensorSpec| Ok((spec.name, Tensor::zeros(spec.shape, DType::BF16, &Device::cpu())?));
    /// # hf::save(&place.join("model"), &config, &config.tensors().into_iter().map(zeros).collect::<Result<_>>()?)?;
    /// let folder = Folder::open(&place.join("model"))?;
    /// let norm = Tensor::from_vec(vec![1.0_f32, 2.0], [2], &Device::cpu())?;
    /// folder.save(&place.join("tuned"), &[("model.norm.weight".to_owned(), norm)].into())?;
    /// assert_eq!(Folder::open(&place.join("tuned"))?.values("model.norm.weight")?, [1.0, 2.0]);
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] for a tensor that the folder does not have, has in another shape, or has in FP8, for one that is no
    /// float, if only one of the embedding and its copy `lm_head.weight` is replaced, and if something exists at `out`;
    /// [`Error::Io`] if a file cannot be read or written. Nothing is left at `out` then.
    pub fn save(&self, out: &Path, replaced: &BTreeMap<String, Tensor>) -> Result<()> {
        let refused = |problem: String| self.problem(problem);
        for (name, tensor) in replaced {
            expect_shape(name, tensor, &self.info(name)?.shape).map_err(refused)?;
            expect_float(name, tensor).map_err(refused)?;
            if self.is_quantized(name) || self.is_scale(name) {
                return Err(refused(format!(
                    "`{name}` is FP8: load the values, and quantize the model anew"
                )));
            }
        }
        self.expect_tied_in(replaced)?;
        let mut entries = Vec::new();
        for name in self.weights.names() {
            let info = self.info(name)?;
            let file = self.weights.file_of(name).unwrap_or_default().to_owned();
            entries.push(match replaced.get(name) {
                Some(tensor) => entry(file, name, tensor),
                None => Entry { file, name: name.to_owned(), dtype: info.dtype, shape: info.shape.clone() },
            });
        }
        let output = Layout::new(&entries).map_err(refused)?.create(out, Some(&self.path))?;
        let targets = spots(&entries, |name| output.spot(name));
        let copied = targets.iter().filter(|(name, _)| !replaced.contains_key(**name));
        let copies: Vec<Copy> =
            copied.flat_map(|(name, spot)| Copy::parts(&self.weights, name, *spot, CHUNK)).collect();
        let tensors: Vec<(&Tensor, Spot)> = replaced
            .iter()
            .filter_map(|(name, tensor)| Some((tensor, *targets.get(name.as_str())?)))
            .collect();
        for (tensor, spot) in tensors {
            output.tensor(spot, tensor)?;
        }
        let copy =
            |_: &jobs::Run<'_>, buffer: &mut Vec<u8>, copy: &Copy| copy.run(&self.weights, &output, buffer);
        let monitor = Monitor::default();
        output.flush_during(|| jobs::run(&copies, jobs::threads(None), &monitor, Vec::new, copy))?;
        output.commit(self.config.json())
    }

    /// Refuses to replace one of the embedding and the copy of it that the files of a tied model may have.
    fn expect_tied_in(&self, replaced: &BTreeMap<String, Tensor>) -> Result<()> {
        let Some(table) = self.config.tensors().into_iter().next() else { return Ok(()) };
        let table = self.stored(&table.name);
        let is_tied = self.config.tie_word_embeddings && self.weights.info(HEAD).is_some();
        let is_one = match (replaced.get(table), replaced.get(HEAD)) {
            (Some(one), Some(other)) => one.to_f32_vec()? == other.to_f32_vec()?,
            (None, None) => true,
            _ => false,
        };
        if is_tied && !is_one {
            return Err(self.problem(format!(
                "`{table}` and `{HEAD}` are one matrix (tie_word_embeddings): replace both, by equal values, or none"
            )));
        }
        Ok(())
    }
}

/// Returns the name of the file of each tensor, given their sizes in order.
pub(super) fn file_names(sizes: &[u64]) -> Vec<String> {
    let (mut file, mut bytes) = (0, 0);
    let mut files = Vec::new();
    for &size in sizes {
        if bytes > 0 && bytes + size > FILE_BYTES {
            (file, bytes) = (file + 1, 0);
        }
        bytes += size;
        files.push(file);
    }
    let name = |index: usize| match file {
        0 => SINGLE.to_owned(),
        last => format!("model-{:05}-of-{:05}.safetensors", index + 1, last + 1),
    };
    files.into_iter().map(name).collect()
}

fn entry(file: String, name: &str, tensor: &Tensor) -> Entry {
    Entry { file, name: name.to_owned(), dtype: file_dtype(tensor.dtype()), shape: tensor.shape().to_vec() }
}

fn spots(entries: &[Entry], spot: impl Fn(&str) -> Option<Spot>) -> BTreeMap<&str, Spot> {
    entries.iter().filter_map(|entry| Some((entry.name.as_str(), spot(&entry.name)?))).collect()
}

fn expect_float(name: &str, tensor: &Tensor) -> Result<(), String> {
    match tensor.dtype().is_float() {
        true => Ok(()),
        false => Err(format!("`{name}` is {}: expected f32, bf16 or f16", tensor.dtype())),
    }
}

fn expect_shape(name: &str, tensor: &Tensor, shape: &[usize]) -> Result<(), String> {
    match tensor.shape().to_vec() == shape {
        true => Ok(()),
        false => Err(format!("`{name}` has shape {}: expected {shape:?}", tensor.shape())),
    }
}
