//! The command line.

use crate::failure::Failure;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};
use fp8_nn::fp8_kernels::DType;
use fp8_nn::hf::Scheme;
use std::error::Error as _;
use std::ffi::OsString;
use std::path::PathBuf;

/// Looks at Hugging Face folders, quantizes them to FP8, and makes them of checkpoints. Needs no Python and no GPU.
#[derive(Debug, Parser)]
#[command(name = "fp8", version, arg_required_else_help = true, disable_help_subcommand = true)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

/// What is asked for.
#[derive(Debug)]
pub(crate) enum Request {
    /// A text, such as the help.
    Print(String),
    Run(Command),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the tensors of a folder or a safetensors file, and measures what quantization lost
    #[command(after_help = INSPECT_EXAMPLE)]
    Inspect(Inspect),
    /// Writes a folder with FP8 weights, for vLLM and transformers
    #[command(after_help = QUANTIZE_EXAMPLE)]
    Quantize(Quantize),
    /// Writes a training checkpoint as a folder, in high precision or in FP8
    #[command(after_help = EXPORT_EXAMPLE)]
    Export(Export),
}

const INSPECT_EXAMPLE: &str = "\
Example:
  fp8 inspect SmolLM2-135M-FP8 --against SmolLM2-135M --report report.html

Columns:
  scales       what shares a scale, and how many there are
  amax         the largest magnitude
  saturated %  values that were clamped; without --against, those with the largest code
  underflow %  values that became zero; without --against, those that are zero
  SQNR dB      10 log10 of the power of the original over that of the error: larger is better";

const QUANTIZE_EXAMPLE: &str = "\
Example:
  fp8 quantize SmolLM2-135M SmolLM2-135M-FP8 --scheme channel --ignore layers.0

Schemes:
  tensor    one scale for a matrix, inputs dynamic (compressed-tensors: vLLM, transformers)
  channel   one scale for a row, inputs by token (compressed-tensors' FP8_DYNAMIC: vLLM, transformers)
  block128  one scale for a block of 128 x 128, inputs by 128 columns (DeepSeek's: vLLM, transformers)
  vllm      one scale for q, k and v, and for gate and up; inputs dynamic (quant_method fp8: vLLM)";

const EXPORT_EXAMPLE: &str = "\
Example:
  fp8 export run/fp8 model --scheme tensor --static-inputs

The checkpoint is a folder of fp8_nn's checkpoint::save, or a file of save_parameters. It says which model it is if its metadata
has the key hf.config; if not, --config does.";

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The checkpoint: a folder with checkpoint.safetensors, or a file of parameters
    pub(crate) checkpoint: PathBuf,
    /// The folder to create
    pub(crate) output: PathBuf,
    /// The model's config.json, or a folder that has it, whose tokenizer is copied (default: that of the checkpoint)
    #[arg(long, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    /// f32, bf16 or f16, for what is not FP8 (default: that of the parameters)
    #[arg(long, value_parser = dtype)]
    pub(crate) dtype: Option<DType>,
    /// Quantizes weights: tensor, channel, block128 or vllm, as fp8 quantize --help explains
    #[arg(long, value_parser = scheme)]
    pub(crate) scheme: Option<Scheme>,
    /// With tensor and vllm: static scales of inputs, from the amaxes of training under delayed scaling
    #[arg(long)]
    pub(crate) static_inputs: bool,
    /// With a scheme: layers that stay as they are, as in fp8 quantize; can be repeated
    #[arg(long, value_name = "PATTERN")]
    pub(crate) ignore: Vec<String>,
    /// Lets block128 write matrices whose sides are no multiples of 128, which transformers cannot read
    #[arg(long)]
    pub(crate) allow_ragged: bool,
    /// Prints JSON instead of sentences
    #[arg(long)]
    pub(crate) json: bool,
}

fn dtype(name: &str) -> Result<DType, String> {
    let all = [DType::F32, DType::BF16, DType::F16];
    all.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| "expected f32, bf16 or f16".into())
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A Hugging Face folder, or a safetensors file
    pub(crate) path: PathBuf,
    /// The folder that it was quantized from, to measure the error
    #[arg(long, value_name = "ORIGINAL")]
    pub(crate) against: Option<PathBuf>,
    /// Also writes a page of HTML
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Prints JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Quantize {
    /// The Hugging Face folder of the model, in f32, bf16 or f16
    pub(crate) input: PathBuf,
    /// The folder to create
    pub(crate) output: PathBuf,
    /// The format: tensor, channel, block128 or vllm
    #[arg(long, value_parser = scheme)]
    pub(crate) scheme: Scheme,
    /// Text to find static scales of inputs with
    #[arg(long, value_name = "TEXT", hide = true)]
    pub(crate) calibrate: Option<PathBuf>,
    /// Layers that stay as they are: a name in which * stands for any text, or a part of one, such as down_proj or layers.0;
    /// can be repeated
    #[arg(long, value_name = "PATTERN")]
    pub(crate) ignore: Vec<String>,
    /// Lets block128 write matrices whose sides are no multiples of 128, which transformers cannot read
    #[arg(long)]
    pub(crate) allow_ragged: bool,
    /// The number of threads (default: one for each core)
    #[arg(long, value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Prints JSON instead of sentences
    #[arg(long)]
    pub(crate) json: bool,
}

fn scheme(name: &str) -> Result<Scheme, String> {
    let names = Scheme::ALL.map(Scheme::name).join(", ");
    name.parse().map_err(|_| format!("unknown; the known ones are {names}"))
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(threads @ 1..=1024) => Ok(threads),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}

/// Parses a whole command line, program name included.
pub(crate) fn parse<I, T>(line: I) -> Result<Request, Failure>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    match Options::try_parse_from(line) {
        Ok(options) => Ok(Request::Run(options.command)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Request::Print(error.to_string())),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Failure::input(
                "expected a command: fp8 inspect, fp8 quantize or fp8 export; fp8 --help says more",
            )),
            _ => Err(Failure::input(sentence(&error))),
        },
    }
}

/// Turns an error of clap into one sentence.
fn sentence(error: &clap::Error) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let option = text(ContextKind::InvalidArg).split_whitespace().next().unwrap_or_default();
    let value = text(ContextKind::InvalidValue);
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let command = text(ContextKind::InvalidSubcommand);
            format!("unknown command {command}; the known ones are inspect, quantize and export")
        }
        ErrorKind::UnknownArgument => match text(ContextKind::SuggestedArg) {
            "" => format!("unknown option {option}; --help lists the options"),
            suggested => format!("unknown option {option}; did you mean {suggested}?"),
        },
        ErrorKind::InvalidValue if value.is_empty() => format!("{option} needs a value"),
        ErrorKind::ValueValidation => match error.source() {
            Some(source) => format!("{option} {value}: {source}"),
            None => format!("{option} {value}: not a value of this option"),
        },
        ErrorKind::MissingRequiredArgument => match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(missing)) => {
                format!("{} is missing; --help has an example", missing.join(", "))
            }
            _ => "an argument is missing; --help has an example".into(),
        },
        _ => {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &[&str]) -> String {
        match parse(["fp8"].iter().chain(line)) {
            Err(Failure::Input(sentence)) => sentence,
            other => panic!("{line:?}: {other:?}"),
        }
    }

    #[test]
    fn mistakes_get_a_sentence() {
        for (line, sentence) in [
            (&[][..], "expected a command: fp8 inspect, fp8 quantize or fp8 export; fp8 --help says more"),
            (&["inspekt"], "unknown command inspekt; the known ones are inspect, quantize and export"),
            (&["inspect"], "<PATH> is missing; --help has an example"),
            (&["inspect", "a", "--jsn"], "unknown option --jsn; did you mean --json?"),
            (&["inspect", "a", "--report"], "--report needs a value"),
            (&["quantize", "a", "b"], "--scheme <SCHEME> is missing; --help has an example"),
            (
                &["quantize", "a", "b", "--scheme", "int4"],
                "--scheme int4: unknown; the known ones are tensor, channel, block128, vllm",
            ),
            (
                &["quantize", "a", "b", "--scheme", "tensor", "--threads", "0"],
                "--threads 0: expected a number from 1 to 1024",
            ),
            (&["export", "a", "b", "--dtype", "f8"], "--dtype f8: expected f32, bf16 or f16"),
        ] {
            assert_eq!(refused(line), sentence);
        }
    }

    #[test]
    fn every_command_has_an_example() {
        for command in ["inspect", "quantize", "export"] {
            let Ok(Request::Print(help)) = parse(["fp8", command, "--help"]) else {
                panic!("{command}: no help")
            };
            assert!(help.contains(&format!("Example:\n  fp8 {command} ")), "{help}");
        }
    }
}
