//! The model that a command runs, and how it computes.

use crate::failure::{Failure, about_device};
use crate::table::{count, shortened};
use crate::values::{dtype, threads};
use clap::Args;
use fp8_hf::{Adapter, Folder, Fp8Weights, InputScales, LoadOptions, Quantization, WeightScales};
use fp8_nn::frozen;
use fp8_nn::prelude::*;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The options of commands that run a model.
#[derive(Debug, Args)]
pub(crate) struct ModelOptions {
    /// A Hugging Face folder with its tokenizer, FP8 or not
    pub(crate) model: PathBuf,
    /// The quantization of weights and inputs: checkpoint (as the folder says: its FP8 weights, and inputs as vLLM
    /// quantizes them), off (FP8 weights are dequantized, inputs are not quantized), or quantized again (after dequantizing
    /// FP8 weights) with current, rowwise, rowwise-gw-hp, block, deepseek, mxfp8, nvfp4, delayed (which has no history here and
    /// computes like current), te-v0 (whose scales are all 1 without a history), or a file *.toml
    #[arg(long, value_name = "NAME|FILE.toml", default_value = "checkpoint", value_parser = RecipeName::parse)]
    recipe: RecipeName,
    /// Type of weights and activations where they are not FP8: f32, bf16 or f16
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// A LoRA adapter for the model, as peft writes it: a folder with adapter_config.json and adapter_model.safetensors
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// cpu, or cuda:N for the GPU with index N
    #[arg(long, default_value = "cpu")]
    device: String,
    /// The number of threads (default: one for each core)
    #[arg(long, value_parser = threads, allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,
}

/// A recipe by its name, or in a file.
#[derive(Debug, Clone)]
enum RecipeName {
    Checkpoint,
    Off,
    Preset(&'static str),
    File(PathBuf),
}

/// A folder, and how its model will compute.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) folder: Folder,
    recipe: Recipe,
    adapter: Option<Adapter>,
    device: Device,
    /// The time that opening it took.
    time: Duration,
}

/// A model that is ready to run.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) folder: Folder,
    pub(crate) model: Gpt,
    pub(crate) scaling: Scaling,
    pub(crate) recipe: Recipe,
    /// The time that it took to open the folder and read the model.
    pub(crate) loading: Duration,
}

impl Loaded {
    /// Returns the bytes that the weights take, codes and scales among them.
    pub(crate) fn weight_bytes(&self) -> usize {
        let device = parameters(&self.model).first().map(|parameter| parameter.device().clone());
        device.map_or(0, |device| device.memory_report().now.parameters)
    }
}

impl RecipeName {
    fn parse(text: &str) -> Result<Self, String> {
        match Recipe::NAMES.into_iter().find(|&name| name == text) {
            Some(name) => Ok(Self::Preset(name)),
            None if text == "checkpoint" => Ok(Self::Checkpoint),
            None if text == "off" => Ok(Self::Off),
            None if text.ends_with(".toml") => Ok(Self::File(text.into())),
            None => Err(format!(
                "unknown; the known ones are checkpoint, off, {} and files *.toml",
                Recipe::NAMES.join(", ")
            )),
        }
    }

    /// Returns the recipe, if it does not depend on the folder.
    fn recipe(&self) -> Result<Option<Recipe>, Failure> {
        Ok(Some(match self {
            Self::Checkpoint => return Ok(None),
            Self::Off => Recipe::off(),
            Self::Preset(name) => Recipe::from_name(name).map_err(fp8_nn::Error::from)?,
            Self::File(path) => {
                let refused =
                    |problem: String| Failure::input(format!("--recipe {}: {problem}", path.display()));
                // Opening a pipe would wait for a writer.
                if path.exists() && !path.is_file() {
                    return Err(refused("not a file: expected a recipe in TOML".into()));
                }
                let text = std::fs::read_to_string(path).map_err(|error| {
                    refused(format!(
                        "{error}: expected a recipe in TOML, or one of the names that --help lists"
                    ))
                })?;
                Recipe::from_toml(&text).map_err(|error| refused(error.to_string()))?
            }
        }))
    }
}

impl ModelOptions {
    /// Opens the folder and the device.
    pub(crate) fn open(&self) -> Result<Opened, Failure> {
        let recipe = self.recipe.recipe()?;
        let device = Device::from_name(&self.device).map_err(|error| self.device_failure(&error))?;
        let start = Instant::now();
        let folder = Folder::open(&self.model)?;
        let open = |path: &PathBuf| open_adapter("--adapter ", path, &folder);
        let adapter = self.adapter.as_ref().map(open).transpose()?;
        let recipe = match recipe {
            Some(recipe) => recipe,
            None => folder.recipe()?,
        };
        Ok(Opened { folder, recipe, adapter, device, time: start.elapsed() })
    }

    fn device_failure(&self, error: &fp8_nn::fp8_kernels::Error) -> Failure {
        let text = match error {
            fp8_nn::fp8_kernels::Error::Option { remedy, .. } => remedy.clone(),
            error => about_device(error),
        };
        Failure::input(format!("--device {}: {text}", self.device))
    }

    /// Returns whether activations have 16 bits.
    pub(crate) fn is_narrow(&self) -> bool {
        self.dtype != DType::F32
    }

    /// Returns the file with the recipe, if `--recipe` names one.
    pub(crate) fn recipe_file(&self) -> Option<&PathBuf> {
        match &self.recipe {
            RecipeName::File(path) => Some(path),
            _ => None,
        }
    }

    /// Reads the model, for sequences of at most `longest` tokens.
    pub(crate) fn load(&self, opened: Opened, longest: usize) -> Result<Loaded, Failure> {
        let Opened { folder, recipe, adapter, device, time } = opened;
        let start = Instant::now();
        let fp8 = match self.recipe {
            RecipeName::Checkpoint => Fp8Weights::Keep,
            _ => Fp8Weights::Dequantize,
        };
        let longest = longest.min(folder.config.longest_sequence());
        let options = LoadOptions {
            params_dtype: self.dtype,
            fp8,
            max_seq_length: Some(longest),
            ..Default::default()
        };
        let mut model = folder.load(&options, &device)?;
        if let Some(adapter) = adapter {
            frozen(|| adapter.add_to(&mut model, &folder.config, self.dtype))?;
        }
        let mut scaling = Scaling::new(&model, &device).map_err(fp8_nn::Error::from)?;
        if fp8 == Fp8Weights::Keep {
            folder.load_input_scales(&model, &mut scaling)?;
        }
        device.synchronize().map_err(fp8_nn::Error::from)?;
        Ok(Loaded { folder, model, scaling, recipe, loading: time + start.elapsed() })
    }

    /// Describes how the model computes, in a short text: `f32, recipe off, cpu`.
    pub(crate) fn arithmetic(&self, loaded: &Loaded) -> String {
        let recipe = match (&self.recipe, &loaded.folder.config.quantization) {
            (RecipeName::Off, Some(_)) => "recipe off, weights dequantized".to_owned(),
            (RecipeName::Checkpoint, Some(quantization)) => as_stored(&loaded.folder, quantization),
            (RecipeName::Checkpoint | RecipeName::Off, None) => "recipe off".to_owned(),
            (_, quantization) => {
                let name = match &self.recipe {
                    RecipeName::File(path) => path.display().to_string(),
                    _ => loaded.recipe.to_string(),
                };
                let mut text = format!("recipe {}", shortened(&name));
                text += without_history(&loaded.recipe);
                if quantization.is_some() {
                    text += ", weights dequantized first";
                }
                text
            }
        };
        let adapter =
            self.adapter.as_ref().map(|path| format!(", adapter {}", shortened(&path.display().to_string())));
        format!("{}, {recipe}{}, {}", self.dtype, adapter.unwrap_or_default(), self.device)
    }
}

/// Opens an adapter of the model in `folder`. `option` stands in front of its path in errors.
pub(crate) fn open_adapter(option: &str, path: &Path, folder: &Folder) -> Result<Adapter, Failure> {
    if !path.is_dir() {
        let problem = "expected the folder of a LoRA adapter, as peft writes it";
        return Err(Failure::input(format!("{option}{}: {problem}", path.display())));
    }
    Ok(Adapter::open(path, &folder.config)?)
}

/// Describes how a recipe computes without earlier steps, if that differs from what its name says.
fn without_history(recipe: &Recipe) -> &'static str {
    match (recipe.starts_at_one(), recipe.calibrates_first_step()) {
        (false, false) => "",
        (false, true) => " without history (each tensor takes its own scale)",
        (true, false) => " without history (scale 1: it does not calibrate the first step)",
        (true, true) => {
            " without history (scale 1 where the first step is not calibrated, else each tensor takes its own scale)"
        }
    }
}

/// Describes what an FP8 checkpoint says of its weights and inputs.
fn as_stored(folder: &Folder, quantization: &Quantization) -> String {
    let weights = match quantization.weights {
        WeightScales::Tensor => "one scale per tensor".to_owned(),
        WeightScales::Channel => "one scale per channel".to_owned(),
        WeightScales::Block([rows, cols]) => format!("one scale per {rows}×{cols} block"),
        WeightScales::TensorGroup => "one scale per 16 columns of a row".to_owned(),
        _ => "other scales".to_owned(),
    };
    let format = if quantization.weights == WeightScales::TensorGroup { "NVFP4" } else { "FP8" };
    let mut text = format!("{format} weights as stored, {weights}; inputs {}", inputs(quantization.inputs));
    let linears = folder.config.tensors().into_iter().filter(|tensor| tensor.kind.is_linear());
    match linears.filter(|tensor| !folder.is_quantized(folder.stored(&tensor.name))).count() {
        0 => {}
        others => {
            let _ = write!(text, "; {} not quantized", count(others, "projection"));
        }
    }
    text
}

/// Describes how inputs are quantized.
pub(crate) fn inputs(scales: InputScales) -> String {
    match scales {
        InputScales::None => "in high precision".to_owned(),
        InputScales::Static => "static".to_owned(),
        InputScales::Tensor => "dynamic, one scale".to_owned(),
        InputScales::Token => "dynamic, by token".to_owned(),
        InputScales::Group(columns) => format!("dynamic, by {columns} columns"),
        InputScales::TensorGroup => "in NVFP4".to_owned(),
        _ => "of another kind".to_owned(),
    }
}

/// Runs `work` with so many threads; `None` is one for each core.
pub(crate) fn with_threads<T: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build();
    pool.map_err(|error| Failure::Work(format!("starting threads: {error}")))?.install(work)
}

/// Returns the most memory that this process has used, in bytes, where the system tells it.
pub(crate) fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
