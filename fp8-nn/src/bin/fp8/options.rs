//! The command line.

use crate::eval::{self, Eval};
use crate::export::{self, Export};
use crate::failure::Failure;
use crate::generate::{self, Generate};
use crate::inspect::{self, Inspect};
use crate::quantize::{self, Quantize};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory as _, Parser, Subcommand};
use fp8_nn::hf::Scheme;
use fp8_nn::prelude::DType;
use std::error::Error as _;
use std::ffi::OsString;

/// Inspects, quantizes, evaluates and runs Hugging Face models, and makes them of checkpoints. Needs no Python and no GPU.
#[derive(Debug, Parser)]
#[command(name = "fp8", version, arg_required_else_help = true, disable_help_subcommand = true)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

/// The request of a command line.
#[derive(Debug)]
pub(crate) enum Request {
    /// A text, such as the help.
    Print(String),
    Run(Command),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the tensors of a folder or a safetensors file, and measures what quantization lost
    #[command(after_help = inspect::EXAMPLE)]
    Inspect(Inspect),
    /// Writes a folder with FP8 weights, for vLLM and transformers
    #[command(after_help = quantize::EXAMPLE)]
    Quantize(Quantize),
    /// Measures how well a model predicts a text: loss and perplexity
    #[command(after_help = eval::EXAMPLE)]
    Eval(Eval),
    /// Continues a text
    #[command(after_help = generate::EXAMPLE)]
    Generate(Generate),
    /// Writes a training checkpoint as a folder, in high precision or in FP8
    #[command(after_help = export::EXAMPLE)]
    Export(Export),
}

/// Parses `--threads`.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(threads @ 1..=1024) => Ok(threads),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}

/// Parses `--dtype`.
pub(crate) fn dtype(name: &str) -> Result<DType, String> {
    let known = [DType::F32, DType::BF16, DType::F16];
    let named = known.into_iter().find(|dtype| dtype.name() == name);
    named.ok_or_else(|| "unknown; the known ones are f32, bf16 and f16".to_owned())
}

/// Parses `--scheme`.
pub(crate) fn scheme(name: &str) -> Result<Scheme, String> {
    let names = Scheme::ALL.map(Scheme::name).join(", ");
    name.parse().map_err(|_| format!("unknown; the known ones are {names}"))
}

/// Parses a number of at least 1.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(count) => Ok(count),
        Err(_) => Err("expected a whole number of at least 1".into()),
    }
}

/// Parses a whole command line, program name included.
pub(crate) fn parse<I, T>(line: I) -> Result<Request, Failure>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString>,
{
    match Options::try_parse_from(help_as_option(line.into_iter().map(Into::into).collect())) {
        Ok(options) => Ok(Request::Run(options.command)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                Ok(Request::Print(wrapped(&error.to_string())))
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Failure::input(format!(
                "expected a command: {}; fp8 --help says more",
                commands().join(", ")
            ))),
            _ => Err(Failure::input(sentence(&error))),
        },
    }
}

/// Reads `fp8 help` as `fp8 --help`, and `fp8 help eval` as `fp8 eval --help`.
fn help_as_option(mut line: Vec<OsString>) -> Vec<OsString> {
    if line.get(1).is_some_and(|word| word == "help") {
        line.remove(1);
        line.truncate(2);
        line.push("--help".into());
    }
    line
}

/// The columns of a line of help.
const WIDTH: usize = 100;

/// Breaks long lines. What follows is indented as the description of an option is.
fn wrapped(text: &str) -> String {
    let mut all = String::new();
    for line in text.lines() {
        let indent = description(line);
        let mut column = 0;
        for word in line[indent..].split_inclusive(' ') {
            let width = word.trim_end().chars().count();
            if column == 0 {
                all += &line[..indent];
                column = line[..indent].chars().count();
            } else if column + width > WIDTH {
                all.truncate(all.trim_end_matches(' ').len());
                all.push('\n');
                column = line[..indent].chars().count();
                all.extend(std::iter::repeat_n(' ', column));
            }
            all += word;
            column += word.chars().count();
        }
        all.push('\n');
    }
    all
}

/// Returns where the description in a line of help begins: behind the name of an option, or behind the indent.
fn description(line: &str) -> usize {
    let indent = line.len() - line.trim_start().len();
    let behind = |name: &str| {
        indent
            + name.len()
            + (line[indent + name.len()..].len() - line[indent + name.len()..].trim_start().len())
    };
    match line[indent..].split_once("  ") {
        // A sentence that has two spaces is no option.
        Some((name, _)) if indent > 0 && name.len() < WIDTH / 2 => behind(name),
        _ => indent,
    }
}

/// Returns the names of the commands.
fn commands() -> Vec<String> {
    Options::command().get_subcommands().map(|command| command.get_name().to_owned()).collect()
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
            format!("unknown command {command}; the known ones are {}", commands().join(", "))
        }
        ErrorKind::UnknownArgument if !option.starts_with('-') => {
            let argument = text(ContextKind::InvalidArg);
            format!(
                "unexpected argument {argument}: put quotes around text with spaces; --help lists the arguments"
            )
        }
        ErrorKind::UnknownArgument => match text(ContextKind::SuggestedArg) {
            "" => format!("unknown option {option}; --help lists the options"),
            suggested => format!("unknown option {option}; did you mean {suggested}?"),
        },
        ErrorKind::ArgumentConflict => match error.get(ContextKind::PriorArg) {
            Some(ContextValue::String(prior)) => {
                let prior = prior.split_whitespace().next().unwrap_or_default();
                if prior == option {
                    return format!("{option} may be given only once");
                }
                format!("{option} and {prior} exclude each other: give one of them")
            }
            _ => format!("{option} does not go with the other options"),
        },
        ErrorKind::InvalidValue if value.is_empty() => format!("{option} needs a value"),
        ErrorKind::ValueValidation => match error.source() {
            Some(source) => format!("{option} {value}: {source}"),
            None => format!("{option} {value}: not a value of this option"),
        },
        ErrorKind::MissingRequiredArgument => match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(missing)) => {
                let verb = if missing.len() == 1 { "is" } else { "are" };
                format!("{} {verb} missing; --help has an example", missing.join(", "))
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
            (&[][..], "expected a command: inspect, quantize, eval, generate, export; fp8 --help says more"),
            (
                &["inspekt"],
                "unknown command inspekt; the known ones are inspect, quantize, eval, generate, export",
            ),
            (&["inspect", "a", "--jsn"], "unknown option --jsn; did you mean --json?"),
            (&["inspect", "a", "--report"], "--report needs a value"),
            (&["inspect"], "<PATH> is missing; --help has an example"),
            (&["quantize", "--scheme", "tensor"], "<INPUT>, <OUTPUT> are missing; --help has an example"),
            (&["inspect", "a", "--report", "b", "--report", "c"], "--report may be given only once"),
            (
                &["inspect", "a", "b c"],
                "unexpected argument b c: put quotes around text with spaces; --help lists the arguments",
            ),
            (&["quantize", "a", "b"], "--scheme <SCHEME> is missing; --help has an example"),
            (
                &["quantize", "a", "b", "--scheme", "int4"],
                "--scheme int4: unknown; the known ones are tensor, channel, block128, vllm",
            ),
            (
                &["quantize", "a", "b", "--scheme", "tensor", "--threads", "0"],
                "--threads 0: expected a number from 1 to 1024",
            ),
            (
                &["export", "a", "b", "--dtype", "f8"],
                "--dtype f8: unknown; the known ones are f32, bf16 and f16",
            ),
        ] {
            assert_eq!(refused(line), sentence);
        }
    }

    #[test]
    fn long_lines_of_help_are_wrapped() {
        let line = format!("      --recipe <NAME>  {}", "How inputs are quantized ".repeat(8));
        let text = wrapped(&line);
        assert!(text.lines().count() > 1, "{text}");
        for (index, line) in text.lines().enumerate() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert!(index == 0 || line.starts_with(&" ".repeat(23)), "{line}");
        }
        assert_eq!(text.split_whitespace().collect::<Vec<_>>(), line.split_whitespace().collect::<Vec<_>>());
    }

    #[test]
    fn help_is_a_command_too() {
        for line in [&["fp8", "help"][..], &["fp8", "help", "eval"]] {
            let Ok(Request::Print(help)) = parse(line) else { panic!("{line:?}: no help") };
            assert!(help.contains("Usage: fp8"), "{help}");
            assert!(help.lines().all(|line| line.chars().count() <= WIDTH), "{help}");
        }
    }

    #[test]
    fn every_command_has_an_example() {
        Options::command().debug_assert();
        for command in commands() {
            let Ok(Request::Print(help)) = parse(["fp8", &command, "--help"]) else {
                panic!("{command}: no help")
            };
            assert!(help.contains(&format!("Example:\n  fp8 {command} ")), "{help}");
        }
    }
}
