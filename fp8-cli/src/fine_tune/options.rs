//! The options of a fine-tuning, with their defaults.

use crate::train::layout::Layout;
use crate::train::numbers::{count, number};
use crate::train::options::{
    DeviceName, Dtype, RecipeName, ScheduleName, device, learning_rate, level, recipe_name, seed,
};
use crate::values::scheme;
use clap::{ArgAction, Args};
use fp8_hf::data::{LossOn, Pack, TooLong};
use fp8_hf::{Scheme, Warmup};
use fp8_nn::RecomputeLevel;
use fp8_nn::prelude::{DType, MomentDtype};
use std::fmt;
use std::path::PathBuf;

pub(crate) const MAX_STEPS: usize = 1_000_000_000;

/// Fine-tunes a Hugging Face model in FP8, whole or by a LoRA adapter.
///
/// The folder --out gets config.toml, log.jsonl, checkpoints, report.html and the result in final/. Progress goes to stderr.
#[derive(Debug, Clone, Args)]
pub(crate) struct FineTune {
    /// A Hugging Face folder with its tokenizer
    #[arg(value_name = "MODEL")]
    pub(crate) base: Option<PathBuf>,

    /// Texts, JSON lines (text; prompt and completion; messages), or tokens of llm.c or nanoGPT (*.bin): files, or folders of them. A
    /// folder with train.jsonl and valid.jsonl has both parts
    #[arg(long, value_name = "FILE|DIR", num_args = 1.., action = ArgAction::Append)]
    pub(crate) data: Vec<PathBuf>,

    /// The folder to create, for everything that is written
    #[arg(long, value_name = "RUN")]
    pub(crate) out: Option<PathBuf>,

    /// Reads options from a TOML file, by their names without dashes in front; the command line wins [default: none]
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) config: Option<PathBuf>,

    /// Go on with the run in this folder, behind its newest checkpoint [default: start a new run]
    #[arg(long, value_name = "RUN")]
    pub(crate) resume: Option<PathBuf>,

    /// Data to measure the validation loss on: a file or folder, or a share of --data such as 0.05 [default: none]
    #[arg(long, value_name = "FILE|SHARE")]
    pub(crate) validation: Option<ValidationName>,

    /// The tokens that are learned: all, or answers (completions, and what the assistant says) [default: answers where there are some]
    #[arg(long, value_name = "all|answers", value_parser = loss_on)]
    pub(crate) loss: Option<LossOn>,

    /// The way in which samples fill sequences: whole (in order, none is cut in two), stream (joined, and cut every --seq tokens), or best-fit (the
    /// longest first) [default: whole for answers, stream for texts and tokens]
    #[arg(long, value_name = "whole|stream|best-fit", value_parser = pack)]
    pub(crate) pack: Option<Pack>,

    /// One sample in a sequence
    #[arg(long, conflicts_with = "pack")]
    pub(crate) no_pack: bool,

    /// Let documents in a sequence of --pack stream read those before them
    #[arg(long)]
    pub(crate) cross_documents: bool,

    /// A sample with more than --seq tokens: drop, cut or split it [default: drop answers, cut texts]
    #[arg(long, value_name = "drop|cut|split", value_parser = too_long)]
    pub(crate) too_long: Option<TooLong>,

    /// Tokens in a sequence [default: 2048, or the longest of the model if that is shorter]
    #[arg(long, value_name = "N", value_parser = count::<{ 1 << 24 }>)]
    pub(crate) seq: Option<usize>,

    /// Sequences in a step, over all micro-batches and processes
    #[arg(long, value_name = "N", default_value = "8", value_parser = count::<65_536>)]
    pub(crate) batch: usize,

    /// Micro-batches in which each process computes its part of a step, one after the other; more need less memory [default: as many
    /// as keep a micro-batch at 4096 tokens]
    #[arg(long, value_name = "N", value_parser = count::<65_536>)]
    pub(crate) accumulate: Option<usize>,

    /// Passes over the data, in another order each time
    #[arg(long, value_name = "N", default_value = "1", value_parser = count::<1_000_000>, conflicts_with = "steps")]
    pub(crate) epochs: usize,

    /// Steps in all, in place of --epochs
    #[arg(long, value_name = "N", value_parser = count::<MAX_STEPS>)]
    pub(crate) steps: Option<usize>,

    /// Highest learning rate [default: 1e-5; with an adapter 2e-4]
    #[arg(long, value_name = "RATE", value_parser = learning_rate, allow_hyphen_values = true)]
    pub(crate) lr: Option<f32>,

    /// The learning rate behind the warm-up: constant, or down: linear, cosine, or wsd (in the last fifth of the steps)
    #[arg(long, value_enum, default_value = "cosine", hide_possible_values = true)]
    pub(crate) schedule: ScheduleName,

    /// The steps in which the learning rate rises: a share such as 0.05, or a whole number of steps
    #[arg(long, value_name = "SHARE|N", default_value = "0.05", value_parser = warmup)]
    pub(crate) warmup: WarmupName,

    /// The last learning rate as a share of the highest
    #[arg(long, value_name = "SHARE", default_value = "0.1", value_parser = share)]
    pub(crate) min_lr: f32,

    /// Seed of the order of the data, of new adapters, and of what --validation SHARE takes
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed)]
    pub(crate) seed: u64,

    /// adamw, lion (by the sign of a momentum; needs a rate of a third to a tenth), or sgd (with a momentum of --beta1)
    #[arg(long, value_name = "NAME", default_value = "adamw", value_parser = optimizer)]
    pub(crate) optimizer: OptimizerName,

    /// β1 of AdamW and Lion, and the momentum of SGD
    #[arg(long, value_name = "B", default_value = "0.9", value_parser = decay)]
    pub(crate) beta1: f32,

    /// β2 of AdamW and Lion [default: 0.95; Lion 0.99]
    #[arg(long, value_name = "B", value_parser = decay)]
    pub(crate) beta2: Option<f32>,

    /// ε of AdamW
    #[arg(long, value_name = "E", default_value = "1e-8", value_parser = not_negative)]
    pub(crate) eps: f32,

    /// Weight decay of matrices
    #[arg(long, value_name = "W", default_value = "0", value_parser = not_negative)]
    pub(crate) weight_decay: f32,

    /// Format of the optimizer's moments: f32, bf16 or fp8, for AdamW of 8, 4 or 2 bytes a parameter
    #[arg(long, value_name = "f32|bf16|fp8", default_value = "f32", value_parser = moments)]
    pub(crate) moments: MomentDtype,

    /// Type of the trained model's parameters: f32 or bf16, which has f32 copies in the optimizer
    #[arg(long, value_name = "f32|bf16", default_value = "f32", value_parser = params)]
    pub(crate) params: DType,

    /// Round --params bf16 stochastically in place of keeping f32 copies
    #[arg(long)]
    pub(crate) stochastic_rounding: bool,

    /// Scale gradients down to this norm; 0: never
    #[arg(long, value_name = "NORM", default_value = "1", value_parser = not_negative)]
    pub(crate) clip: f32,

    /// A learning rate or weight decay of some tensors' own: PATTERN:lr=FACTOR, PATTERN:decay=W, or both, by Hugging Face's names
    #[arg(long, value_name = "GROUP", action = ArgAction::Append, value_parser = group)]
    pub(crate) group: Vec<Group>,

    /// Do not train these tensors, by Hugging Face's names: embed_tokens, "model.layers.0.*"
    #[arg(long, value_name = "PATTERN", num_args = 1.., action = ArgAction::Append)]
    pub(crate) freeze: Vec<String>,

    /// The recipe of the blocks: current, rowwise, rowwise-gw-hp, block, deepseek, mxfp8, nvfp4, delayed, te-v0, none (high precision), or a file
    /// *.toml [default: current; beside an adapter that of an FP8 model's files]
    #[arg(long, value_name = "NAME|FILE.toml", value_parser = recipe_name)]
    pub(crate) recipe: Option<RecipeName>,

    /// Type of activations: f32, bf16 or f16
    #[arg(long, value_enum, default_value = "f32", hide_possible_values = true)]
    pub(crate) dtype: Dtype,

    /// Keep the trained weights of the blocks in FP8, with f32 values in the optimizer alone
    #[arg(long)]
    pub(crate) fp8_weights: bool,

    /// Recompute this part of each block in backward: none, norm, activation, attention, mlp or block, each with those before it
    #[arg(long, value_name = "LEVEL", default_value = "none", value_parser = level)]
    pub(crate) recompute: RecomputeLevel,

    /// Train a LoRA adapter of this rank beside the frozen model [default: train the model]
    #[arg(long, value_name = "RANK", value_parser = count::<65_536>, conflicts_with = "adapter")]
    pub(crate) lora: Option<usize>,

    /// α of the adapter [default: twice the rank]
    #[arg(long, value_name = "A", value_parser = positive)]
    pub(crate) lora_alpha: Option<f64>,

    /// The modules with an adapter: names such as q_proj v_proj, or one regular expression [default: all Linears but the head]
    #[arg(long, value_name = "PATTERN", num_args = 1.., action = ArgAction::Append)]
    pub(crate) lora_targets: Vec<String>,

    /// Modules without one
    #[arg(long, value_name = "PATTERN", num_args = 1.., action = ArgAction::Append)]
    pub(crate) lora_exclude: Vec<String>,

    /// The layers with one, from 0 [default: all]
    #[arg(long, value_name = "N", num_args = 1.., action = ArgAction::Append, value_parser = number::<0, 1_000_000>)]
    pub(crate) lora_layers: Vec<usize>,

    /// A rank of their own for some modules: PATTERN=RANK
    #[arg(long, value_name = "PATTERN=RANK", num_args = 1.., action = ArgAction::Append, value_parser = rank_of)]
    pub(crate) rank_pattern: Vec<(String, usize)>,

    /// An α of their own for some modules: PATTERN=A
    #[arg(long, value_name = "PATTERN=A", num_args = 1.., action = ArgAction::Append, value_parser = alpha_of)]
    pub(crate) alpha_pattern: Vec<(String, f64)>,

    /// Multiply the adapter by α / √rank in place of α / rank
    #[arg(long)]
    pub(crate) rslora: bool,

    /// Type of the adapter's matrices: f32 or bf16
    #[arg(long, value_name = "f32|bf16", default_value = "f32", value_parser = lora_dtype)]
    pub(crate) lora_dtype: DType,

    /// Go on training the adapter in this folder, as peft writes it
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,

    /// Write the tuned model in FP8: tensor, channel, block128 or vllm; none: in high precision [default: none]
    #[arg(long, value_name = "SCHEME", value_parser = export)]
    pub(crate) export: Option<ExportName>,

    /// Device to train on: cpu, cuda:N, or cuda for the GPU with this process's number on its machine
    #[arg(long, default_value = "cpu", value_parser = device)]
    pub(crate) device: DeviceName,

    /// Record a step as a CUDA graph and replay it
    #[arg(long)]
    pub(crate) graph: bool,

    #[command(flatten)]
    pub(crate) layout: Layout,

    /// CPU threads; they change no bit of the results [default: RAYON_NUM_THREADS, or all cores]
    #[arg(long, value_name = "N", value_parser = count::<1024>)]
    pub(crate) threads: Option<usize>,

    /// Measure the validation loss every N steps; 0: at the end alone [default: a tenth of the steps]
    #[arg(long, value_name = "N", value_parser = number::<0, MAX_STEPS>)]
    pub(crate) eval_every: Option<usize>,

    /// Measure it on at most so many sequences
    #[arg(long, value_name = "N", default_value = "128", value_parser = count::<MAX_STEPS>)]
    pub(crate) eval_sequences: usize,

    /// Write a checkpoint every N steps; 0: by time alone
    #[arg(long, value_name = "N", default_value = "0", value_parser = number::<0, MAX_STEPS>)]
    pub(crate) checkpoint_every: usize,

    /// Write a checkpoint after so many minutes
    #[arg(long, value_name = "M", default_value = "10", value_parser = positive)]
    pub(crate) checkpoint_minutes: f64,

    /// Keep the newest N checkpoints, and the one with the lowest validation loss
    #[arg(long, value_name = "N", default_value = "2", value_parser = count::<1_000_000>)]
    pub(crate) keep: usize,

    /// Skip steps whose gradients are not finite, and end at N in a row
    #[arg(long, value_name = "N", default_value = "10", value_parser = count::<MAX_STEPS>)]
    pub(crate) skip_non_finite: usize,

    /// Read headers and data, print the plan and one sample, and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Take one step of the plan, and print the time of the whole
    #[arg(long)]
    pub(crate) time: bool,

    /// Print a line of JSON for each step and the result, in place of sentences
    #[arg(long)]
    pub(crate) json: bool,

    /// Show no progress, only the result
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// `--validation`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ValidationName {
    Share(f64),
    File(PathBuf),
}

/// `--warmup`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WarmupName(pub(crate) Warmup);

/// `--optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OptimizerName {
    AdamW,
    Lion,
    Sgd,
}

/// `--export`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ExportName(pub(crate) Option<Scheme>);

/// `--group`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Group {
    pub(crate) pattern: String,
    pub(crate) lr: f32,
    pub(crate) decay: Option<f32>,
}

impl std::str::FromStr for ValidationName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(share) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            Ok(_) => Err("a share must be more than 0 and less than 1".into()),
            Err(_) => Ok(Self::File(text.into())),
        }
    }
}

impl fmt::Display for ValidationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Share(share) => share.fmt(f),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl fmt::Display for WarmupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            // A share has a dot, by which it is known.
            Warmup::Share(share) => write!(f, "{share:?}"),
            Warmup::Steps(steps) => steps.fmt(f),
        }
    }
}

impl fmt::Display for ExportName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.map_or("none", Scheme::name))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:lr={}", self.pattern, self.lr)?;
        self.decay.map_or(Ok(()), |decay| write!(f, ",decay={decay}"))
    }
}

/// One of some names, each with its value.
fn one_of<T: Copy>(text: &str, known: &[(&str, T)]) -> Result<T, String> {
    let names = || known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let found = known.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| *value).ok_or_else(|| format!("unknown; the known ones are {}", names()))
}

/// The name of a value.
pub(super) fn name_of<T: PartialEq>(value: &T, known: &[(&'static str, T)]) -> &'static str {
    known.iter().find(|(_, other)| other == value).map_or("", |(name, _)| name)
}

pub(super) const LOSSES: [(&str, LossOn); 2] = [("all", LossOn::All), ("answers", LossOn::Answers)];
pub(super) const PACKS: [(&str, Pack); 3] =
    [("whole", Pack::Whole), ("stream", Pack::Stream), ("best-fit", Pack::BestFit)];
pub(super) const TOO_LONG: [(&str, TooLong); 3] =
    [("drop", TooLong::Drop), ("cut", TooLong::Cut), ("split", TooLong::Split)];

pub(super) const MOMENTS: [(&str, MomentDtype); 3] =
    [("f32", MomentDtype::F32), ("bf16", MomentDtype::BF16), ("fp8", MomentDtype::Fp8)];
pub(super) const PARAMS: [(&str, DType); 2] = [("f32", DType::F32), ("bf16", DType::BF16)];

pub(super) const OPTIMIZERS: [(&str, OptimizerName); 3] =
    [("adamw", OptimizerName::AdamW), ("lion", OptimizerName::Lion), ("sgd", OptimizerName::Sgd)];

fn optimizer(text: &str) -> Result<OptimizerName, String> {
    one_of(text, &OPTIMIZERS)
}

fn moments(text: &str) -> Result<MomentDtype, String> {
    one_of(text, &MOMENTS)
}

fn params(text: &str) -> Result<DType, String> {
    one_of(text, &PARAMS)
}

fn export(text: &str) -> Result<ExportName, String> {
    if text == "none" {
        return Ok(ExportName(None));
    }
    scheme(text).map(|scheme| ExportName(Some(scheme))).map_err(|known| format!("{known}, and none"))
}

fn lora_dtype(text: &str) -> Result<DType, String> {
    one_of(text, &PARAMS)
}

fn loss_on(text: &str) -> Result<LossOn, String> {
    one_of(text, &LOSSES)
}

fn pack(text: &str) -> Result<Pack, String> {
    one_of(text, &PACKS)
}

fn too_long(text: &str) -> Result<TooLong, String> {
    one_of(text, &TOO_LONG)
}

fn float<T: std::str::FromStr>(
    text: &str,
    expected: &str,
    is_right: impl Fn(&T) -> bool,
) -> Result<T, String> {
    text.parse().ok().filter(is_right).ok_or_else(|| format!("must be {expected}"))
}

fn warmup(text: &str) -> Result<WarmupName, String> {
    if let Ok(steps) = text.parse::<u64>() {
        return Ok(WarmupName(Warmup::Steps(steps)));
    }
    let share = float(text, "a share from 0 to 1 such as 0.05, or a whole number of steps", |share| {
        (0.0..=1.0).contains(share)
    })?;
    Ok(WarmupName(Warmup::Share(share)))
}

fn share(text: &str) -> Result<f32, String> {
    float(text, "a number from 0 to 1", |share| (0.0..=1.0).contains(share))
}

fn decay(text: &str) -> Result<f32, String> {
    float(text, "a number of at least 0 and less than 1", |decay| (0.0..1.0).contains(decay))
}

fn not_negative(text: &str) -> Result<f32, String> {
    float(text, "a finite number of at least 0", |number: &f32| *number >= 0.0 && number.is_finite())
}

fn positive(text: &str) -> Result<f64, String> {
    float(text, "a finite number above 0", |number: &f64| *number > 0.0 && number.is_finite())
}

/// Splits PATTERN=VALUE at the last sign.
fn pair(text: &str) -> Result<(&str, &str), String> {
    text.rsplit_once('=')
        .filter(|(pattern, _)| !pattern.is_empty())
        .ok_or_else(|| "must be PATTERN=NUMBER".into())
}

fn rank_of(text: &str) -> Result<(String, usize), String> {
    let (pattern, rank) = pair(text)?;
    Ok((pattern.to_owned(), count::<65_536>(rank)?))
}

fn alpha_of(text: &str) -> Result<(String, f64), String> {
    let (pattern, alpha) = pair(text)?;
    Ok((pattern.to_owned(), positive(alpha)?))
}

fn group(text: &str) -> Result<Group, String> {
    const EXPECTED: &str = "must be PATTERN:lr=FACTOR, PATTERN:decay=W, or PATTERN:lr=FACTOR,decay=W";
    let (pattern, rates) = text.rsplit_once(':').ok_or(EXPECTED)?;
    let mut group = Group { pattern: pattern.to_owned(), lr: 1.0, decay: None };
    if pattern.is_empty() {
        return Err(EXPECTED.into());
    }
    for rate in rates.split(',') {
        match rate.split_once('=') {
            Some(("lr", factor)) => group.lr = not_negative(factor)?,
            Some(("decay", decay)) => group.decay = Some(not_negative(decay)?),
            _ => return Err(EXPECTED.into()),
        }
    }
    Ok(group)
}

/// Options that a run may be resumed with, whatever it had. They change the results at most by rounding.
pub(crate) const FREE: [&str; 15] = [
    "accumulate",
    "checkpoint-every",
    "checkpoint-minutes",
    "device",
    "dp",
    "eval-every",
    "eval-sequences",
    "export",
    "graph",
    "keep",
    "recompute",
    "sequence-parallel",
    "skip-non-finite",
    "threads",
    "tp",
];

/// The options of the layout, which replace that of a run together.
pub(crate) const OF_LAYOUT: [&str; 3] = ["dp", "sequence-parallel", "tp"];

/// Options with paths, which may have moved. What is there is compared with what the run had.
pub(crate) const PLACES: [&str; 4] = ["adapter", "data", "model", "validation"];

/// Options that no file has, or that are no part of a run.
pub(crate) const OF_PROGRAM: [&str; 7] = ["config", "dry-run", "help", "json", "quiet", "resume", "time"];

/// Options of adapters that are made, beside the rank.
pub(crate) const OF_NEW_ADAPTERS: [&str; 7] =
    ["alpha-pattern", "lora-alpha", "lora-exclude", "lora-layers", "lora-targets", "rank-pattern", "rslora"];
