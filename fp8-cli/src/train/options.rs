//! The command line: every option with its default, and errors of one sentence.
//!
//! Each value is checked against the range of its own option here. `config.rs` checks what depends on several
//! options, on files or on a checkpoint.

use std::fmt;
use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use fp8_nn::RecomputeLevel;
use fp8_nn::fp8_recipe::Recipe;

use crate::command_line::{self, Parsed, named, with_negative_numbers};
use crate::failure::Failure;
use crate::train::layout::Layout;
use crate::train::numbers::{count, number};

/// Trains a byte-level GPT twice from one seed, in high precision and in FP8, and compares the two.
///
/// Both trainings see the same batches. Progress goes to stderr; a sample and a table to stdout; report.html,
/// steps.csv and summary.json to the report folder.
#[derive(Debug, Clone, Args)]
pub(crate) struct Train {
    #[command(flatten)]
    pub(crate) settings: Settings,

    /// Device to train on: cpu, cuda:N for the GPU with index N, or cuda for the GPU with this process's number on its machine (LOCAL_RANK)
    #[arg(long, default_value = "cpu", value_parser = device)]
    pub(crate) device: DeviceName,

    /// Record a step as a CUDA graph and replay it: the same results, bit for bit, with less work for the host
    #[arg(long)]
    pub(crate) graph: bool,

    #[command(flatten)]
    pub(crate) layout: Layout,

    /// CPU threads; they change the speed and no bit of the results [default: RAYON_NUM_THREADS, or all cores]
    #[arg(long, value_name = "N", value_parser = count::<1024>)]
    pub(crate) threads: Option<usize>,

    /// A file, or a folder whose files (all of them, subfolders too) are joined in path order [default:
    /// plays by Shakespeare, built in]
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) text: Option<PathBuf>,

    /// The folder for report.html, steps.csv and summary.json
    #[arg(long, value_name = "DIR", default_value = "target/train_gpt")]
    pub(crate) report_dir: PathBuf,

    /// A folder for checkpoints: high_precision/ and fp8/, written at the end and on Ctrl-C [default: none]
    #[arg(long, value_name = "DIR")]
    pub(crate) save: Option<PathBuf>,

    /// Stop each training after this step and save it, to `checkpoint` in the report folder if there is no --save
    /// [default: the last step]
    #[arg(long, value_name = "STEP", value_parser = count::<MAX_STEPS>)]
    pub(crate) stop_after: Option<usize>,

    /// Continue from the checkpoints in this folder, which set the model, schedule, seed and text [default: start a new
    /// training]
    #[arg(long, value_name = "DIR")]
    pub(crate) resume: Option<PathBuf>,

    /// Evaluate a part of the held-out text every N steps, for the report's validation curve; 0 for never [default: a
    /// twentieth of the steps]
    #[arg(long, value_name = "N", value_parser = number::<0, MAX_STEPS>)]
    pub(crate) eval_every: Option<usize>,

    /// Skip up to N steps in a row whose loss is not finite, as after a bad batch, before the training counts as diverged.
    /// A skipped step changes no weight; 0 stops at the first
    #[arg(long, value_name = "N", default_value = "10", value_parser = number::<0, MAX_STEPS>)]
    pub(crate) skip_non_finite: usize,

    /// Bytes to generate at the end; 0 for no sample
    #[arg(long, value_name = "BYTES", default_value = "200", value_parser = number::<0, 1_000_000>)]
    pub(crate) sample: usize,

    /// Compare these recipes with high precision: names and files separated by commas, or all. Prints a table of held-out
    /// losses and writes compare.csv to the report folder [default: train with --recipe and write a report]
    #[arg(long, value_name = "RECIPES", value_parser = compared)]
    pub(crate) compare: Option<Compared>,

    /// Seeds of --compare, separated by commas [default: that of --seed]
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = seed)]
    pub(crate) seeds: Vec<u64>,

    /// Measure how exact the FP8 codes of every tensor are, about a hundred times in a training. This takes time, changes no
    /// result, and adds a heat map to the report. Under nvfp4, a tenth of these steps measures without it, too, unless --graph is given
    #[arg(long, conflicts_with = "graph")]
    pub(crate) sqnr: bool,

    /// Recompute this part of each block in backward instead of keeping its results, which needs less memory and more time:
    /// none, norm, activation, attention, mlp or block, each with those before it. It changes no bit of the results
    #[arg(long, value_name = "LEVEL", default_value = "none", value_parser = level)]
    pub(crate) recompute: RecomputeLevel,

    /// Show no progress, only the results
    #[arg(long)]
    pub(crate) quiet: bool,
}

const MAX_STEPS: usize = 1_000_000_000;

/// The options that decide every bit of a training. Checkpoints store them, and a resumed training cannot change them.
#[derive(Debug, Clone, PartialEq, Args)]
pub(crate) struct Settings {
    /// Training steps in all; the learning-rate schedule ends with the last one
    #[arg(long, value_name = "N", default_value = "400", value_parser = count::<MAX_STEPS>)]
    pub(crate) steps: usize,

    /// Kind of model: gpt (LayerNorm, GELU, biases, RoPE), or llama (RMSNorm, SwiGLU, RoPE), whose checkpoints `fp8 export` writes
    /// as Hugging Face folders
    #[arg(long, value_enum, default_value = "gpt", hide_possible_values = true)]
    pub(crate) model: ModelName,

    /// Transformer layers
    #[arg(long, value_name = "N", default_value = "4", value_parser = count::<1024>)]
    pub(crate) layers: usize,

    /// Width of the model; an even multiple of --heads
    #[arg(long, value_name = "N", default_value = "128", value_parser = count::<65_536>)]
    pub(crate) hidden: usize,

    /// Attention heads
    #[arg(long, value_name = "N", default_value = "4", value_parser = count::<4096>)]
    pub(crate) heads: usize,

    /// Bytes in a sequence
    #[arg(long, value_name = "N", default_value = "64", value_parser = count::<65_536>)]
    pub(crate) seq: usize,

    /// Sequences in a batch
    #[arg(long, value_name = "N", default_value = "12", value_parser = count::<65_536>)]
    pub(crate) batch: usize,

    /// Highest learning rate, at the end of a linear warm-up; --schedule says what follows
    #[arg(long, value_name = "RATE", default_value = "1e-3", value_parser = learning_rate, allow_hyphen_values = true)]
    pub(crate) lr: f32,

    /// The learning rate behind the warm-up: constant, or down to a hundredth: linear, cosine, or wsd (constant, then linear in the last
    /// fifth of the steps)
    #[arg(long, value_enum, default_value = "cosine", hide_possible_values = true)]
    pub(crate) schedule: ScheduleName,

    /// Share of elements that are dropped in training: of the embedding, of attention probabilities and of residual branches
    #[arg(long, value_name = "P", default_value = "0", value_parser = probability, allow_hyphen_values = true)]
    pub(crate) dropout: f32,

    /// Seed of the initial weights, the batches, the dropout and the sample
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed)]
    pub(crate) seed: u64,

    /// Type of activations where they are not FP8; f16 trains with a loss scale that adapts
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: Dtype,

    /// FP8 scaling: delayed (from a history of amaxes), current (from each tensor), te-v0, rowwise, rowwise-gw-hp, block,
    /// deepseek or mxfp8 (scales for rows or blocks), nvfp4 (4 bits), none (no FP8 training), or a file with a recipe and its options for all tensors or for some: see fp8-cli/src/train/recipe.toml
    #[arg(long, value_name = "NAME|FILE.toml", default_value = "delayed", value_parser = recipe_name)]
    pub(crate) recipe: RecipeName,

    /// The text of the file that `--recipe` names, once it was read; otherwise empty.
    #[arg(skip)]
    pub(crate) recipe_toml: String,

    /// FP8 formats: hybrid (E4M3 forward, E5M2 backward) or e4m3 (both)
    #[arg(long, value_enum, default_value = "hybrid", hide_possible_values = true)]
    pub(crate) format: FormatName,

    /// Steps in the amax history of delayed scaling
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count::<1_048_576>)]
    pub(crate) history_len: usize,

    /// Divide scales by 2^N, which leaves room below the largest FP8 value; -100 to 100
    #[arg(long, value_name = "N", default_value = "0", value_parser = margin)]
    pub(crate) margin: i32,

    /// Run attention in FP8, too, under recipes with one scale for a tensor; without it, the recipe decides
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, hide_possible_values = true, hide_default_value = true, value_name = "BOOL")]
    pub(crate) fp8_attention: bool,

    /// Run attention in FP8 and let its projections write FP8 for it, under recipes with one scale for a tensor; without it, the recipe decides
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, hide_possible_values = true, hide_default_value = true, value_name = "BOOL")]
    pub(crate) fp8_mha: bool,

    /// Store the weights of FP8 matrix products in FP8 alone, with f32 copies in the optimizer
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set, hide_possible_values = true, hide_default_value = true, value_name = "BOOL")]
    pub(crate) fp8_weights: bool,
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    Cpu,
    Cuda(usize),
    /// The GPU with the index that this process has on its machine.
    CudaOfRank,
}

/// The device of a training, and how its steps are queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) device: DeviceName,
    /// Whether a step is replayed as one CUDA graph.
    pub(crate) graph: bool,
    /// Whether observed steps measure how exact the codes are.
    pub(crate) sqnr: bool,
    /// The part of each block that backward recomputes.
    pub(crate) recompute: RecomputeLevel,
}

/// `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    Bf16,
    F16,
}

/// `--model`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelName {
    Gpt,
    Llama,
}

/// `--schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScheduleName {
    Constant,
    Linear,
    Cosine,
    Wsd,
}

/// `--recipe`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecipeName {
    Delayed,
    Current,
    None,
    /// Another recipe that has a name.
    Preset(&'static str),
    /// A TOML file.
    File(PathBuf),
}

/// `--compare`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Compared(pub(crate) Vec<RecipeName>);

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatName {
    Hybrid,
    E4m3,
}

/// Options that checkpoints of earlier versions do not have. Their defaults are what those versions did.
const ADDED: [&str; 6] = ["fp8-attention", "fp8-mha", "fp8-weights", "dropout", "model", "schedule"];

impl Settings {
    /// Returns every setting as (option name, value). [`Settings::from_values`] reads the same bits back.
    pub(crate) fn values(&self) -> Vec<(&'static str, String)> {
        vec![
            ("steps", self.steps.to_string()),
            ("model", self.model.to_string()),
            ("layers", self.layers.to_string()),
            ("hidden", self.hidden.to_string()),
            ("heads", self.heads.to_string()),
            ("seq", self.seq.to_string()),
            ("batch", self.batch.to_string()),
            ("lr", self.lr.to_string()),
            ("schedule", self.schedule.to_string()),
            ("dropout", self.dropout.to_string()),
            ("seed", self.seed.to_string()),
            ("dtype", self.dtype.to_string()),
            ("recipe", self.recipe.to_string()),
            ("format", self.format.to_string()),
            ("history-len", self.history_len.to_string()),
            ("margin", self.margin.to_string()),
            ("fp8-attention", self.fp8_attention.to_string()),
            ("fp8-mha", self.fp8_mha.to_string()),
            ("fp8-weights", self.fp8_weights.to_string()),
        ]
    }

    /// Parses settings from stored values; `value` returns that of an option.
    pub(crate) fn from_values(value: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let defaults = parse::<String>([])?.0.settings;
        let mut line = Vec::new();
        for (option, _) in defaults.values() {
            let value = match value(option) {
                None if ADDED.contains(&option) => continue,
                value => value.ok_or_else(|| Failure::input(format!("it has no --{option}")))?,
            };
            line.push(format!("--{option}={value}"));
        }
        Ok(parse(line)?.0.settings)
    }
}

/// The options that the command line names, as opposed to defaults.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given(Vec<String>);

impl Given {
    /// The names of options, with underscores.
    pub(crate) fn new<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        Self(names.map(|name| name.replace('_', "-")).collect())
    }

    pub(crate) fn contains(&self, option: &str) -> bool {
        self.0.iter().any(|given| given == option)
    }
}

/// Parses the options of a training.
pub(crate) fn parse<S: Into<String>>(
    options: impl IntoIterator<Item = S>,
) -> Result<(Train, Given), Failure> {
    let command = with_negative_numbers(Train::augment_args(clap::Command::new("fp8 train")));
    let line = std::iter::once("fp8 train".into()).chain(options.into_iter().map(|word| word.into().into()));
    match command_line::parse::<Train>(command, line)? {
        Parsed::Options(options, matches) => Ok((options, Given::new(named(&matches)))),
        Parsed::Help(_) => Err(Failure::input("help was asked for where options were expected")),
    }
}

pub(crate) fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

pub(crate) fn learning_rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        Ok(_) => Err("a learning rate must be finite and above zero (in f32)".to_owned()),
        Err(_) => Err("a learning rate must be a number, finite and above zero".to_owned()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if (0.0..1.0).contains(&p) => Ok(p),
        _ => Err("must be a number of at least 0 and less than 1".to_owned()),
    }
}

fn margin(text: &str) -> Result<i32, String> {
    match text.parse::<i32>() {
        Ok(margin) if (-100..=100).contains(&margin) => Ok(margin),
        _ => Err("must be a whole number from -100 to 100".to_owned()),
    }
}

pub(crate) fn level(text: &str) -> Result<RecomputeLevel, String> {
    let known = || {
        format!("unknown; the known ones are {}", RecomputeLevel::ALL.map(RecomputeLevel::name).join(", "))
    };
    text.parse().map_err(|_| known())
}

pub(crate) fn recipe_name(text: &str) -> Result<RecipeName, String> {
    match text {
        "delayed" => Ok(RecipeName::Delayed),
        "current" => Ok(RecipeName::Current),
        "none" => Ok(RecipeName::None),
        _ if text.ends_with(".toml") => Ok(RecipeName::File(text.into())),
        _ => match Recipe::NAMES.into_iter().find(|&name| name == text) {
            Some(name) => Ok(RecipeName::Preset(name)),
            None => Err(format!(
                "unknown; the known ones are {}, none and files *.toml",
                Recipe::NAMES.join(", ")
            )),
        },
    }
}

fn compared(text: &str) -> Result<Compared, String> {
    let names = match text {
        "all" => Recipe::NAMES.to_vec(),
        list => list.split(',').collect(),
    };
    let recipes: Vec<RecipeName> = names.into_iter().map(recipe_name).collect::<Result<_, _>>()?;
    match recipes.contains(&RecipeName::None) {
        true => Err("high precision is always compared: leave none out".to_owned()),
        false => Ok(Compared(recipes)),
    }
}

pub(crate) fn device(text: &str) -> Result<DeviceName, String> {
    match text {
        "cpu" => return Ok(DeviceName::Cpu),
        "cuda" => return Ok(DeviceName::CudaOfRank),
        _ => {}
    }
    let index = text.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    index
        .map(DeviceName::Cuda)
        .ok_or_else(|| "unknown device; the known ones are cpu, cuda and cuda:N".to_owned())
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::CudaOfRank => f.write_str("cuda"),
        }
    }
}

impl fmt::Display for RecipeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Delayed => f.write_str("delayed"),
            Self::Current => f.write_str("current"),
            Self::None => f.write_str("none"),
            Self::Preset(name) => f.write_str(name),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// Prints the name that clap parses.
macro_rules! display_as_option {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_possible_value().map_or(Err(fmt::Error), |value| f.write_str(value.get_name()))
            }
        }
    )*};
}
display_as_option!(Dtype, FormatName, ModelName, ScheduleName);

#[cfg(test)]
mod tests;
