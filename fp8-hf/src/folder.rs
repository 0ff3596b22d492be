//! A Hugging Face folder: configuration and weights that fit each other.

use super::config::{self, Config, InputScales, QuantMethod, Quantization, WeightScales};
use super::family::{Family, HEAD, TensorSpec};
use super::files::{exists, read_text, unreadable};
use super::packed::{PACKED, Packed, PackedTensors};
use super::weights::{WeightInfo, Weights};
use crate::{Error, Result};
use fp8_nn::checkpoint;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub(super) const CONFIG: &str = "config.json";
/// The file in which older versions of ModelOpt describe the quantization that `config.json` does not mention.
pub(super) const HF_QUANT_CONFIG: &str = "hf_quant_config.json";
const GENERATION: &str = "generation_config.json";
/// The remedy for an output projection in a tied model's files that is not the embedding.
pub(super) const UNTIE: &str = "set tie_word_embeddings to false, or remove the tensor";
/// The ends of the names of scales of an FP8 cache for keys and values, which is not supported.
const CACHE_SCALES: [&str; 5] = [".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale"];
/// The tensors that belong to an FP8 weight, by the end of their names.
pub(super) const WEIGHT_SCALES: [&str; 2] = ["weight_scale_inv", "weight_scale"];
pub(super) const INPUT_SCALES: [&str; 2] = ["input_scale", "activation_scale"];

/// An open Hugging Face folder: its configuration, and its weights, which have been checked against each other.
///
/// It may be a checkpoint in FP8 or NVFP4 of any layout that [`Quantization`](super::Quantization) describes. Static scales of inputs are
/// ignored, and copied when the folder is written, if the configuration says that inputs are dynamic. The example of
/// [`save`](crate::save) opens one.
#[derive(Debug)]
pub struct Folder {
    /// The description of the model.
    pub config: Config,
    /// The tensors.
    pub weights: Weights,
    pub(super) path: PathBuf,
    /// The name in the files of each tensor whose specification has another one.
    old_names: bool,
    /// For each weight in FP8 or NVFP4, its scales.
    pub(super) quantized: BTreeMap<String, Scales>,
}

/// The names of the tensors with the scales of a quantized weight.
#[derive(Debug, Clone)]
pub(super) struct Scales {
    pub(super) weight: String,
    pub(super) input: Option<String>,
    pub(super) granularity: WeightScales,
    /// For a weight in NVFP4, the rest of what belongs to it.
    pub(super) packed: Option<Packed>,
}

impl Folder {
    /// Opens the folder at `path`: reads `config.json`, `generation_config.json` and `hf_quant_config.json` and the headers of the weights, and checks
    /// that every tensor of the model is there, with its shape, and no other.
    ///
    /// # Errors
    /// [`Error::File`], which names the file and the field or tensor: one that is missing, one that has another shape
    /// than the configuration says, one that no model of the family has.
    pub fn open(path: &Path) -> Result<Self> {
        let problem = |problem: String| Error::File { path: path.to_owned(), problem };
        let metadata = fs::metadata(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => problem(format!(
                "no such folder: expected a Hugging Face folder with {CONFIG} and safetensors files"
            )),
            _ => unreadable(path, &error),
        })?;
        if !metadata.is_dir() {
            return Err(problem(format!("not a folder: expected one with {CONFIG} and safetensors files")));
        }
        if !exists(&path.join(CONFIG)) && checkpoint::path(path).is_file() {
            return Err(problem(
                "it is a training checkpoint: fp8 export writes it as a Hugging Face folder".into(),
            ));
        }
        let mut config = Config::read(&path.join(CONFIG))?;
        let generation = path.join(GENERATION);
        if exists(&generation) {
            let text = read_text(&generation)?;
            let read = config.override_by_generation(&text);
            read.map_err(|problem| Error::File { path: generation, problem })?;
        }
        let modelopt = path.join(HF_QUANT_CONFIG);
        if config.quantization.is_none() && exists(&modelopt) {
            let text = read_text(&modelopt)?;
            let problem = |problem| Error::File { path: modelopt, problem };
            config = config.with_quantization(Some(&config::modelopt(&text).map_err(problem)?))?;
        }
        let weights = Weights::open(path)?;
        Self::new(path, config, weights).map_err(problem)
    }

    fn new(path: &Path, config: Config, weights: Weights) -> Result<Self, String> {
        let specs = config.tensors();
        let first = specs.first().map_or("", |spec| spec.name.as_str());
        let old_names = config.family.has_learned_positions
            && weights.info(first).is_none()
            && Family::old_name(first).is_some_and(|old| weights.info(old).is_some());
        let mut folder =
            Self { config, weights, path: path.to_owned(), old_names, quantized: BTreeMap::new() };
        let mut expected = BTreeSet::new();
        for spec in &specs {
            let name = folder.stored(&spec.name).to_owned();
            folder.check(spec, &name, &mut expected)?;
            expected.insert(name);
        }
        for name in folder.weights.names().filter(|&name| !expected.contains(name)) {
            if !folder.is_spare(name) {
                return Err(folder.out_of_place(name));
            }
        }
        if let Some(head) = folder.tied_head() {
            let table = specs.first().and_then(|spec| folder.weights.info(folder.stored(&spec.name)));
            if table.is_some_and(|table| table.shape != head.shape) || !is_float(head.dtype) {
                return Err(format!(
                    "`{HEAD}` is {:?} {:?}, but {CONFIG} ties it to the embedding: {UNTIE}",
                    head.dtype, head.shape
                ));
            }
        }
        Ok(folder)
    }

    /// Returns true for a tensor that some files contain although the model does not use it.
    fn is_spare(&self, name: &str) -> bool {
        self.config.family.is_spare(name, self.config.tie_word_embeddings)
            || (self.config.quantization.is_some() && is_of_cache(name))
    }

    /// Says that the model has no such tensor, and what would do.
    fn out_of_place(&self, name: &str) -> String {
        let family = self.config.family.model_type;
        // Without the numbers of layers.
        let parts = |name: &str| {
            let is_number = |part: &&str| part.parse::<usize>().is_ok();
            name.split('.').filter(|part| !is_number(part)).map(str::to_owned).collect::<Vec<_>>()
        };
        let is_of_family = || self.config.tensors().iter().any(|spec| parts(&spec.name) == parts(name));
        let remedy = match name {
            _ if name.ends_with(".bias") && !is_of_family() => {
                format!("a {family} model with this bias is not supported")
            }
            _ if WEIGHT_SCALES.iter().chain(&INPUT_SCALES).chain(&PACKED).any(|end| name.ends_with(end)) => {
                "only the projections of the layers can be quantized".to_owned()
            }
            _ => format!("remove it, or use the {CONFIG} that belongs to these files"),
        };
        format!("tensor `{name}` has no place in a {family} model with this {CONFIG}: {remedy}")
    }

    /// Returns the head that the files of a tied model have all the same.
    pub(super) fn tied_head(&self) -> Option<&WeightInfo> {
        self.weights.info(HEAD).filter(|_| self.config.tie_word_embeddings)
    }

    /// Checks one tensor of the model, and the scales that belong to it.
    fn check(
        &mut self,
        spec: &TensorSpec,
        name: &str,
        expected: &mut BTreeSet<String>,
    ) -> Result<(), String> {
        if let Some(quantization) = &self.config.quantization
            && let Some(found) = PackedTensors::find(&self.weights, quantization, spec, name)?
        {
            let PackedTensors { scale, input, packed } = found;
            expected.extend([packed.codes.clone(), scale.clone(), packed.tensor_scale.clone()]);
            expected.extend(input.clone());
            let granularity = WeightScales::TensorGroup;
            let scales = Scales { weight: scale, input, granularity, packed: Some(packed) };
            self.quantized.insert(name.to_owned(), scales);
            return Ok(());
        }
        let info = self.weights.info(name);
        let info = info.ok_or_else(|| {
            let text = format!("tensor `{name}` is missing: {CONFIG} describes a model with it");
            match name {
                HEAD => text + "; set tie_word_embeddings to true if the embedding serves",
                _ => text,
            }
        })?;
        if info.shape[..] != spec.shape[..] {
            return Err(format!(
                "`{name}` has shape {:?}: {CONFIG} asks for {}, so it belongs to another model",
                info.shape, spec.shape
            ));
        }
        if !is_float(info.dtype) {
            return Err(format!("`{name}` is {:?}: expected F32, BF16, F16 or FP8", info.dtype));
        }
        self.check_scales(spec, name, expected)
    }

    /// Checks the scales that belong to a tensor of the model.
    fn check_scales(
        &mut self,
        spec: &TensorSpec,
        name: &str,
        expected: &mut BTreeSet<String>,
    ) -> Result<(), String> {
        let Some(dtype) = self.weights.info(name).map(|info| info.dtype) else { return Ok(()) };
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let find = |ends: [&str; 2]| {
            let names = ends.map(|end| format!("{module}.{end}"));
            names.into_iter().filter(|name| self.weights.info(name).is_some()).collect::<Vec<_>>()
        };
        let (weight, input) = if spec.kind.is_linear() {
            (find(WEIGHT_SCALES), find(INPUT_SCALES))
        } else {
            (Vec::new(), Vec::new())
        };
        if !is_fp8(dtype) {
            return match weight.first().or(input.first()) {
                None => Ok(()),
                Some(scale) => Err(format!("`{scale}` is the scale of `{name}`, which is {:?}", dtype)),
            };
        }
        let Some(quantization) = &self.config.quantization else {
            return Err(format!("`{name}` is {:?}, but {CONFIG} has no `quantization_config`", dtype));
        };
        if dtype == Dtype::F8_E8M0 {
            return Err(format!("`{name}` is F8_E8M0, which is a dtype of scales: expected F8_E4M3"));
        }
        let scale = match (weight.as_slice(), input.as_slice()) {
            ([scale], [] | [_]) => scale,
            ([], _) if !spec.kind.is_linear() => {
                return Err(format!("`{name}` is FP8: only the projections of the layers can be"));
            }
            ([], _) => {
                return Err(format!("`{name}` is FP8 without a scale: `{module}.weight_scale` is missing"));
            }
            _ => return Err(format!("`{name}` has two scales: {} and its like", weight.join(", "))),
        };
        self.check_layout(spec, name, scale, quantization)?;
        if quantization.inputs == InputScales::Static && input.is_empty() {
            let [name, older] = INPUT_SCALES.map(|end| format!("{module}.{end}"));
            return Err(format!(
                "`{name}` (or `{older}`) is missing: `quantization_config` says that inputs have static scales, so every FP8 \
                 weight needs one"
            ));
        }
        if let Some(input) = input.first() {
            let info = self.weights.info(input).filter(|info| info.shape.iter().all(|&extent| extent == 1));
            if !info.is_some_and(|info| is_float(info.dtype) && !is_fp8(info.dtype)) {
                return Err(format!("`{input}` is no number: expected one scale, in F32, BF16 or F16"));
            }
        }
        expected.insert(scale.clone());
        expected.extend(input.first().cloned());
        let scales = Scales {
            weight: scale.clone(),
            input: input.first().cloned(),
            granularity: quantization.weights,
            packed: None,
        };
        self.quantized.insert(name.to_owned(), scales);
        Ok(())
    }

    /// Checks the shape and the dtype of the scales of a weight.
    fn check_layout(
        &self,
        spec: &TensorSpec,
        name: &str,
        scale: &str,
        quantization: &Quantization,
    ) -> Result<(), String> {
        let granularity = quantization.weights;
        let is_inverse = scale.ends_with(WEIGHT_SCALES[0]);
        let is_fitting = match (quantization.method, granularity) {
            (QuantMethod::CompressedTensors, _) => !is_inverse,
            // Its weights are in NVFP4.
            (QuantMethod::ModelOpt, _) => false,
            (QuantMethod::Fp8, WeightScales::Block(_)) => is_inverse,
            (QuantMethod::Fp8, _) => true,
        };
        let &[rows, cols] = &spec.shape[..] else {
            return Err(format!("`{name}` is FP8 and no matrix"));
        };
        let grid = granularity.grid([rows, cols]);
        let found = self.weights.info(scale).map(|info| (info.shape.clone(), info.dtype));
        let (shape, dtype) = found.unwrap_or((Vec::new(), Dtype::F32));
        let is_right = is_fitting
            && match granularity {
                WeightScales::Tensor => shape.iter().all(|&extent| extent == 1),
                WeightScales::Channel => shape == grid || shape == [rows],
                WeightScales::Block(_) => shape == grid,
                WeightScales::TensorGroup => false,
            };
        if !is_right {
            let text = format!("`{scale}` has shape {shape:?}: `quantization_config` asks for {grid:?}");
            return Err(if is_fitting { text } else { format!("`{scale}` has no place in this layout") });
        }
        if !is_float(dtype) || matches!(dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2) {
            return Err(format!("`{scale}` is {dtype:?}: expected F32, BF16, F16 or F8_E8M0"));
        }
        Ok(())
    }

    /// Returns the name in the files of a tensor of [`Config::tensors`]. It differs for very old GPT-2 files alone.
    #[must_use]
    pub fn stored<'a>(&self, name: &'a str) -> &'a str {
        match Family::old_name(name) {
            Some(old) if self.old_names => old,
            _ => name,
        }
    }

    /// Returns the name of the weight whose codes are in this tensor of the files, or the name itself.
    pub(super) fn logical<'a>(&'a self, stored: &'a str) -> &'a str {
        let name = stored.strip_suffix("_packed").and_then(|name| self.quantized.get_key_value(name));
        name.filter(|(_, scales)| scales.packed.is_some()).map_or(stored, |(name, _)| name)
    }

    /// Returns the names of all tensors, with those of weights in place of their codes'.
    pub(super) fn logical_names(&self) -> impl Iterator<Item = &str> {
        self.weights.names().map(|name| self.logical(name))
    }

    /// Returns the tensor of the files with the codes of a weight, or the weight itself.
    pub(super) fn codes_of<'a>(&'a self, name: &'a str) -> &'a str {
        let packed = self.quantized.get(name).and_then(|scales| scales.packed.as_ref());
        packed.map_or(name, |packed| &packed.codes)
    }

    /// Returns the folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn problem(&self, problem: String) -> Error {
        Error::File { path: self.path.clone(), problem }
    }

    /// Returns dtype and shape of a tensor. A weight in NVFP4 is F4 and has the shape that the model gives it.
    pub(super) fn info(&self, name: &str) -> Result<&WeightInfo> {
        let packed = self.quantized.get(name).and_then(|scales| scales.packed.as_ref());
        packed
            .map(|packed| &packed.info)
            .or_else(|| self.weights.info(name))
            .ok_or_else(|| self.problem(format!("there is no tensor `{name}`")))
    }
}

/// Returns true for the scales of an FP8 cache.
pub(super) fn is_of_cache(name: &str) -> bool {
    name.contains(".self_attn.") && CACHE_SCALES.iter().any(|end| name.ends_with(end))
}

/// Returns true for the dtypes whose values can be read as f32.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) || is_fp8(dtype)
}

/// Returns true for the dtypes of codes and of scales in one byte.
pub(super) fn is_fp8(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F8_E8M0)
}
