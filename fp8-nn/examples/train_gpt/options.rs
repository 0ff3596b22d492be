//! The command line: every option with its default, and errors of one sentence.
//!
//! Each value is checked against the range of its own option here. `config.rs` checks what depends on several
//! options, on files or on a checkpoint.

use std::error::Error as _;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, ValueEnum};

use crate::failure::Failure;

/// Trains a byte-level GPT twice from one seed, in high precision and in FP8, and compares the two.
///
/// Both trainings see the same batches. Progress goes to stderr; a sample and a table to stdout; report.html,
/// steps.csv and summary.json to the report folder.
#[derive(Debug, Clone, Parser)]
#[command(name = "train_gpt", version, max_term_width = 110)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) settings: Settings,

    /// Where to compute: cpu, or cuda:N for the GPU with index N
    #[arg(long, default_value = "cpu", value_parser = device)]
    pub(crate) device: DeviceName,

    /// Record a step as one CUDA graph after the first steps, and replay it: the same bits with less work for the host
    #[arg(long)]
    pub(crate) graph: bool,

    /// CPU threads; they change the speed, not one bit of the results [default: RAYON_NUM_THREADS, or all cores]
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

    /// End each training after this step, and save (without --save: to `checkpoint` in the report folder)
    /// [default: train to the last step]
    #[arg(long, value_name = "STEP", value_parser = count::<MAX_STEPS>)]
    pub(crate) stop_after: Option<usize>,

    /// Go on from the checkpoints in this folder: model, schedule, seed, text and data position come from them
    /// [default: start anew]
    #[arg(long, value_name = "DIR")]
    pub(crate) resume: Option<PathBuf>,

    /// Evaluate a part of the held-out text every N steps, for the report's validation curve; 0 for never [default: a
    /// twentieth of the steps]
    #[arg(long, value_name = "N", value_parser = number::<0, MAX_STEPS>)]
    pub(crate) eval_every: Option<usize>,

    /// How many bytes to generate at the end; 0 for no sample
    #[arg(long, value_name = "BYTES", default_value = "200", value_parser = number::<0, 1_000_000>)]
    pub(crate) sample: usize,

    /// Show no progress, only the results
    #[arg(long)]
    pub(crate) quiet: bool,
}

const MAX_STEPS: usize = 1_000_000_000;

/// What decides every bit of a training: kept in checkpoints, refused when a resumed training's differ.
#[derive(Debug, Clone, PartialEq, Args)]
pub(crate) struct Settings {
    /// Training steps in all; they rule the learning-rate schedule
    #[arg(long, value_name = "N", default_value = "400", value_parser = count::<MAX_STEPS>)]
    pub(crate) steps: usize,

    /// Transformer layers
    #[arg(long, value_name = "N", default_value = "4", value_parser = count::<1024>)]
    pub(crate) layers: usize,

    /// Width of the model; divisible by --heads
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

    /// Highest learning rate: reached by a linear warm-up, left on a cosine down to a hundredth
    #[arg(long, value_name = "RATE", default_value = "1e-3", value_parser = learning_rate, allow_hyphen_values = true)]
    pub(crate) lr: f32,

    /// Seed of the initial weights, the batches and the sample
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed)]
    pub(crate) seed: u64,

    /// Type of activations where they are not FP8
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: Dtype,

    /// FP8 scaling: delayed (from a history of amaxes), current (from each tensor), none (no FP8 training)
    #[arg(long, value_enum, default_value = "delayed", hide_possible_values = true)]
    pub(crate) recipe: RecipeName,

    /// FP8 formats: hybrid (E4M3 forward, E5M2 backward) or e4m3 (both)
    #[arg(long, value_enum, default_value = "hybrid", hide_possible_values = true)]
    pub(crate) format: FormatName,

    /// Steps in the amax history of delayed scaling
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count::<1_048_576>)]
    pub(crate) history_len: usize,

    /// Scales are divided by 2^margin: room below the largest FP8 value
    #[arg(long, value_name = "N", default_value = "0", value_parser = margin)]
    pub(crate) margin: i32,
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    Cpu,
    Cuda(usize),
}

/// Where a training computes, and how it queues its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) device: DeviceName,
    /// As one graph.
    pub(crate) graph: bool,
}

/// `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    Bf16,
}

/// `--recipe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecipeName {
    Delayed,
    Current,
    None,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatName {
    Hybrid,
    E4m3,
}

impl Settings {
    /// Every setting as (option name, value), which [`Settings::from_values`] reads back to the same bits.
    pub(crate) fn values(&self) -> Vec<(&'static str, String)> {
        vec![
            ("steps", self.steps.to_string()),
            ("layers", self.layers.to_string()),
            ("hidden", self.hidden.to_string()),
            ("heads", self.heads.to_string()),
            ("seq", self.seq.to_string()),
            ("batch", self.batch.to_string()),
            ("lr", self.lr.to_string()),
            ("seed", self.seed.to_string()),
            ("dtype", self.dtype.to_string()),
            ("recipe", self.recipe.to_string()),
            ("format", self.format.to_string()),
            ("history-len", self.history_len.to_string()),
            ("margin", self.margin.to_string()),
        ]
    }

    /// Settings from stored values; `value` gives the one of an option.
    pub(crate) fn from_values(value: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let defaults = parse_from(["train_gpt"])?.0.settings;
        let mut line = vec!["train_gpt".to_owned()];
        for (option, _) in defaults.values() {
            let value =
                value(option).ok_or_else(|| Failure::input(format!("it does not tell its --{option}")))?;
            line.push(format!("--{option}={value}"));
        }
        Ok(parse_from(line)?.0.settings)
    }
}

/// The options that the command line itself names, as opposed to defaults.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given(Vec<String>);

impl Given {
    pub(crate) fn contains(&self, option: &str) -> bool {
        self.0.iter().any(|given| given.replace('_', "-") == option)
    }
}

/// What a command line asks for.
#[derive(Debug)]
pub(crate) enum Request {
    /// Train with these options.
    Train(Box<Options>, Given),
    /// Print this text (help or version).
    Print(String),
}

/// Parses a whole command line, program name included.
pub(crate) fn parse<I, T>(line: I) -> Result<Request, Failure>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    // A negative number is a wrong value, not an unknown option.
    let command = Options::command().mut_args(|arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    });
    let matches = match command.try_get_matches_from(line) {
        Ok(matches) => matches,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(Request::Print(error.to_string()));
        }
        Err(error) => return Err(Failure::input(sentence(&error))),
    };
    let options = Options::from_arg_matches(&matches).map_err(|error| Failure::input(sentence(&error)))?;
    let from_line = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let given = matches.ids().filter(from_line).map(|id| id.as_str().to_owned()).collect();
    Ok(Request::Train(Box::new(options), Given(given)))
}

/// [`parse`] for a line that asks for a training.
pub(crate) fn parse_from<I, T>(line: I) -> Result<(Options, Given), Failure>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    match parse(line)? {
        Request::Train(options, given) => Ok((*options, given)),
        Request::Print(_) => Err(Failure::input("help was asked for where options were expected")),
    }
}

/// A clap error as one sentence.
fn sentence(error: &clap::Error) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let option = text(ContextKind::InvalidArg).split_whitespace().next().unwrap_or_default();
    let value = text(ContextKind::InvalidValue);
    match (error.kind(), error.get(ContextKind::ValidValue)) {
        (ErrorKind::UnknownArgument, _) if text(ContextKind::SuggestedArg).is_empty() => {
            format!("unknown option {option}; --help lists the options")
        }
        (ErrorKind::UnknownArgument, _) => {
            format!("unknown option {option}; did you mean {}?", text(ContextKind::SuggestedArg))
        }
        (ErrorKind::InvalidValue, _) if value.is_empty() => format!("{option} needs a value"),
        (ErrorKind::InvalidValue, Some(ContextValue::Strings(known))) => {
            format!("{option} {value}: unknown; the known ones are {}", known.join(", "))
        }
        (ErrorKind::ValueValidation, _) => match error.source() {
            Some(source) => format!("{option} {value}: {source}"),
            None => format!("{option} {value}: not a value of this option"),
        },
        _ => {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
        }
    }
}

fn number<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse::<u128>() {
        Ok(number) if number < MIN as u128 => Err(format!("must be at least {MIN}")),
        Ok(number) if number > MAX as u128 => Err(format!("must be at most {MAX}")),
        Ok(number) => usize::try_from(number).map_err(|_| format!("must be at most {MAX}")),
        Err(_) => Err(format!("must be a whole number from {MIN} to {MAX}")),
    }
}

fn count<const MAX: usize>(text: &str) -> Result<usize, String> {
    number::<1, MAX>(text)
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

fn learning_rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        Ok(_) => Err("a learning rate must be finite and above zero (in f32)".to_owned()),
        Err(_) => Err("a learning rate must be a number, finite and above zero".to_owned()),
    }
}

fn margin(text: &str) -> Result<i32, String> {
    match text.parse::<i32>() {
        Ok(margin) if (-64..=64).contains(&margin) => Ok(margin),
        _ => Err("must be a whole number from -64 to 64".to_owned()),
    }
}

fn device(text: &str) -> Result<DeviceName, String> {
    if text == "cpu" {
        return Ok(DeviceName::Cpu);
    }
    let index = text.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    index.map(DeviceName::Cuda).ok_or_else(|| "unknown device; the known ones are cpu and cuda:N".to_owned())
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// The name clap gave the variant, so that what is printed parses.
macro_rules! display_as_option {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_possible_value().map_or(Err(fmt::Error), |value| f.write_str(value.get_name()))
            }
        }
    )*};
}
display_as_option!(Dtype, RecipeName, FormatName);

#[cfg(test)]
mod tests;
