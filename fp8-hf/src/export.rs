//! Checkpoints of training, written as Hugging Face folders.

use super::checkpoint_source::CheckpointSource;
use super::config::Config;
use super::folder::Folder;
use super::jobs::Monitor;
use super::output;
use super::plan::{Matrix, Plan, expect_quantizable};
use super::quantize::{Quantized, quantize};
use super::quantize_options::QuantizeOptions;
use super::save_model::write_new;
use super::static_inputs::{input_scales, refused};
use super::targets::targets;
use super::weights::Weights;
use crate::{Error, Result};
use fp8_kernels::DType;
use fp8_nn::checkpoint;
use safetensors::Dtype;
use std::path::{Path, PathBuf};

/// The key of a model's configuration in the metadata of checkpoints.
const CONFIG_KEY: &str = "hf.config";

impl Config {
    /// Returns the entry of a checkpoint's metadata with which [`export`] knows the model: the key `hf.config`, and the text of
    /// `config.json`. The example of [`export`] uses it.
    #[must_use]
    pub fn metadata(&self) -> (String, String) {
        (CONFIG_KEY.to_owned(), self.json().to_owned())
    }
}

/// Options of [`export`], whose example uses them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExportOptions {
    /// The configuration of the model. Default: `None`, the one in the checkpoint's metadata ([`Config::metadata`]).
    pub config: Option<Config>,
    /// A Hugging Face folder whose tokenizer and other files are copied. Default: `None`.
    pub files_of: Option<PathBuf>,
    /// The dtype of tensors that are not FP8: f32, bf16 or f16. f32 takes the optimizer's f32 copies, where it has some. Default:
    /// `None`, that of the parameters.
    pub dtype: Option<DType>,
    /// The quantization of weights. Default: `None`, not quantized.
    pub fp8: Option<QuantizeOptions>,
    /// Whether inputs have static scales, from the amax histories of training under delayed scaling: the largest amax of the
    /// window / 448. It needs `fp8` with [`Scheme::Tensor`](super::Scheme::Tensor), [`Scheme::Vllm`](super::Scheme::Vllm) or [`Scheme::Nvfp4`](super::Scheme::Nvfp4).
    /// Default: false.
    pub static_inputs: bool,
}

/// The results of [`export`], whose example reads one.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// The configuration of the model, without a `quantization_config`.
    pub config: Config,
    /// The bytes of all tensors in high precision.
    pub bytes: u64,
    /// The results of the quantization, if there was one.
    pub quantized: Option<Quantized>,
}

/// Writes the model of a training checkpoint to the new Hugging Face folder `out`, in high precision, FP8 or NVFP4.
///
/// `checkpoint` is a folder that [`checkpoint::save`] wrote, or a file of [`checkpoint::save_parameters`], with a
/// [`Gpt`](fp8_nn::Gpt). Its configuration comes from the checkpoint's metadata, where [`Config::metadata`] puts it, or from the
/// options. Weights that the checkpoint has in FP8 or NVFP4 are written from the optimizer's f32 copies, or dequantized.
///
/// Tensors are read and written part by part, so that memory does not grow with the model. With FP8 a temporary folder beside
/// `out` holds the model in high precision meanwhile. `out` appears whole or not at all ([`AtomicFolder`](crate::AtomicFolder)).
///
/// ```
/// use fp8_hf::{self as hf, Config, ExportOptions, Exported, Folder, Monitor, QuantizeOptions, Scheme};
/// use fp8_nn::prelude::*;
/// let place = std::env::temp_dir().join(format!("fp8-export-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let config = Config::from_json(
///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
///         "num_attention_heads": 2}"#,
/// )?;
/// let (device, ids) = (Device::cpu(), Tensor::from_vec(vec![1i32, 2, 3, 4], [1, 4], &Device::cpu())?);
/// let mut model = Gpt::new("gpt", &config.gpt_options(), &device, &mut fp8_nn::rand::rng())?;
/// let (mut scaling, mut optimizer) = (Scaling::new(&model, &device)?, AdamW::new(AdamWOptions::default())?);
/// let (_, saved) = scaling.in_autocast(&DelayedScaling::default().into(), |cx| model.loss(cx, &ids, &ids))?;
/// scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
/// optimizer.step(&mut model, 1e-3)?;
/// checkpoint::save(&place.join("trained"), &model, &optimizer, &scaling, &[config.metadata()].into())?;
///
/// let options = ExportOptions {
///     fp8: Some(QuantizeOptions { scheme: Scheme::Tensor, ..Default::default() }),
///     static_inputs: true,
///     ..Default::default()
/// };
/// let done: Exported = hf::export(&place.join("trained"), &place.join("out"), &options, &Monitor::default())?;
/// assert_eq!(done.quantized.map(|done| done.matrices), Some(7));
/// let weight = Folder::open(&place.join("out"))?.codes("model.layers.0.mlp.down_proj.weight", 0..1)?;
/// assert!(weight.input_scale.is_some());
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::File`] if the checkpoint cannot be read, does not contain a [`Gpt`](fp8_nn::Gpt) or one of another
/// configuration, has a value that is infinite or NaN or that the dtype cannot hold, if neither it nor the options say which model
/// it is, and if something exists at `out`; [`Error::Option`] for static inputs without a
/// history, and those of [`quantize`]; [`Error::Io`] if a file cannot be read or written. Nothing is left at `out` then.
pub fn export(checkpoint: &Path, out: &Path, options: &ExportOptions, monitor: &Monitor) -> Result<Exported> {
    let file = file(checkpoint)?;
    let problem = |problem: String| Error::File { path: file.clone(), problem };
    let found = checkpoint::describe(&file)?;
    let weights = Weights::open(&file)?;
    // Programs may put it into a file of parameters, whose metadata is their own.
    let stated = match &found {
        Some((metadata, _)) => metadata.get(CONFIG_KEY),
        None => weights.metadata().get(CONFIG_KEY),
    };
    let config = match (&options.config, stated) {
        (Some(config), _) => config.with_quantization(None)?,
        (None, Some(text)) => Config::from_json(text)
            .map_err(|error| problem(format!("its metadata `{CONFIG_KEY}`: {error}")))?
            .with_quantization(None)?,
        (None, None) => {
            return Err(problem(format!(
                "it does not say which model it is: give a config.json (--config), or save it with `{CONFIG_KEY}` in its \
                 metadata (hf::Config::metadata)"
            )));
        }
    };
    let source = CheckpointSource::new(&file, weights, found.is_some(), options.dtype).map_err(problem)?;
    targets(&config, &source).map_err(problem)?;
    let Some(fp8) = &options.fp8 else {
        if options.static_inputs {
            return Err(refused("true", "expected a scheme, tensor or vllm, with it".into()));
        }
        let bytes = write_new(out, &config, &source, options.dtype, options.files_of.as_deref(), monitor)?;
        return Ok(Exported { config, bytes, quantized: None });
    };
    let mut fp8 = fp8.clone();
    if options.static_inputs {
        if !fp8.scheme.takes_input_scales() {
            let of_inputs = if fp8.scheme.is_nvfp4() { "in high precision" } else { "dynamic" };
            let remedy =
                format!("inputs are {of_inputs} with scheme {}: use tensor, vllm or nvfp4", fp8.scheme);
            return Err(refused("true", remedy));
        }
        let state = found.map(|(_, state)| state).unwrap_or_default();
        fp8.input_scales = input_scales(&state, &config, &source.path, &fp8.ignore)?;
    }
    // Checked first: what follows writes the whole model.
    expect_quantizable(&config).map_err(problem)?;
    Plan::of(&config, &fp8, |spec| {
        Ok(Matrix { name: spec.name.clone(), shape: spec.shape.matrix(), dtype: Dtype::F32 })
    })?;
    let stage = output::atomic_folder(out)?;
    let whole = stage.path().join("model");
    let staged = || {
        let bytes = write_new(&whole, &config, &source, options.dtype, options.files_of.as_deref(), monitor)?;
        Ok((bytes, quantize(&Folder::open(&whole)?, out, &fp8, monitor)?))
    };
    // The temporary folder is gone when an error is read: a wrong value is in the checkpoint, a full disk around `out`.
    let (bytes, quantized) = staged().map_err(|error| match error {
        Error::File { path, problem } if path.starts_with(&whole) => {
            Error::File { path: file.clone(), problem }
        }
        Error::Io { path, source } if path.starts_with(&whole) => Error::Io { path: out.to_owned(), source },
        error => error,
    })?;
    Ok(Exported { config, bytes, quantized: Some(quantized) })
}

/// Returns the file of a checkpoint: the one in a folder, or the file itself.
fn file(checkpoint: &Path) -> Result<PathBuf> {
    let problem = |problem: String| Err(Error::File { path: checkpoint.to_owned(), problem });
    if checkpoint.is_file() {
        return Ok(checkpoint.to_owned());
    }
    let expected = "expected a folder that checkpoint::save wrote, or a file of checkpoint::save_parameters";
    if !checkpoint.is_dir() {
        return problem(format!("no such file or folder: {expected}"));
    }
    let file = checkpoint::path(checkpoint);
    if file.is_file() {
        return Ok(file);
    }
    let below = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        checkpoint::path(&entry.path()).is_file().then(|| entry.file_name().to_string_lossy().into_owned())
    };
    let mut others: Vec<String> =
        std::fs::read_dir(checkpoint).into_iter().flatten().filter_map(below).collect();
    others.sort();
    match others.as_slice() {
        [] => problem(format!("it has no checkpoint.safetensors: {expected}")),
        others => problem(format!(
            "it has no checkpoint.safetensors, but its folders {} do: name one of them",
            others.join(", ")
        )),
    }
}
