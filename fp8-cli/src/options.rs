//! The command line.

use crate::command_line::{self, Parsed, named, with_negative_numbers};
use crate::eval::{self, Eval};
use crate::export::{self, Export};
use crate::failure::Failure;
use crate::fine_tune::{FineTune, line};
use crate::generate::{self, Generate};
use crate::inspect::{self, Inspect};
use crate::launch::{self, Launch};
use crate::merge::{self, Merge};
use crate::quantize::{self, Quantize};
use crate::train::options::Given;
use crate::train::{self, Train};
use clap::{CommandFactory as _, Parser, Subcommand};
use std::ffi::OsString;

/// Trains in FP8, and inspects, quantizes, evaluates and runs Hugging Face models. Needs no Python and no GPU.
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
    /// A command, and the options that the command line names for `train`.
    Run(Box<Command>, Given),
    /// A fine-tuning, which has options of its own.
    FineTune(Box<FineTune>),
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
    /// Adds a LoRA adapter to the weights of a model, and writes the sum as a folder
    #[command(after_help = merge::EXAMPLE)]
    Merge(Merge),
    /// Fine-tunes a Hugging Face model; or trains a small GPT in high precision and in FP8, and compares the two
    #[command(after_help = train::EXAMPLE)]
    Train(Box<Train>),
    /// Starts a command once for each rank, all on this machine
    #[command(after_help = launch::EXAMPLE)]
    Launch(Launch),
}

/// Parses a whole command line, program name included.
pub(crate) fn parse<I, T>(line: I) -> Result<Request, Failure>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString>,
{
    let command = Options::command().mut_subcommand(TRAIN, with_negative_numbers);
    let line = help_as_option(line.into_iter().map(Into::into).collect());
    if let Some((_, words)) = line.split_at_checked(2).filter(|(front, _)| front[1] == TRAIN)
        && line::is_meant(words)
    {
        return Ok(match line::parse(words)? {
            line::Line::Help(text) => Request::Print(text),
            line::Line::Options(options) => Request::FineTune(options),
        });
    }
    match command_line::parse::<Options>(command, line)? {
        Parsed::Help(text) => Ok(Request::Print(text)),
        Parsed::Options(options, matches) => {
            let given = matches.subcommand_matches(TRAIN).map(|matches| Given::new(named(matches)));
            Ok(Request::Run(Box::new(options.command), given.unwrap_or_default()))
        }
    }
}

/// The command that tells options that were given from defaults.
const TRAIN: &str = "train";

/// Reads `fp8 help` as `fp8 --help`, and `fp8 help eval` as `fp8 eval --help`.
fn help_as_option(mut line: Vec<OsString>) -> Vec<OsString> {
    if line.get(1).is_some_and(|word| word == "help") {
        line.remove(1);
        line.truncate(2);
        line.push("--help".into());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands() -> Vec<String> {
        Options::command().get_subcommands().map(|command| command.get_name().to_owned()).collect()
    }

    fn refused(line: &[&str]) -> String {
        match parse(["fp8"].iter().chain(line)) {
            Err(Failure::Input(sentence)) => sentence,
            other => panic!("{line:?}: {other:?}"),
        }
    }

    #[test]
    fn mistakes_get_a_sentence() {
        for (line, sentence) in [
            (
                &[][..],
                "expected a command: inspect, quantize, eval, generate, export, merge, launch, train; fp8 --help says more",
            ),
            (
                &["inspekt"],
                "unknown command inspekt; the known ones are inspect, quantize, eval, generate, export, merge, launch, train",
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
                "--scheme int4: unknown; the known ones are tensor, channel, block128, vllm, nvfp4, nvfp4a16",
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
    fn help_is_a_command_too() {
        for line in [&["fp8", "help"][..], &["fp8", "help", "eval"]] {
            let Ok(Request::Print(help)) = parse(line) else { panic!("{line:?}: no help") };
            assert!(help.contains("Usage: fp8"), "{help}");
            assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
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
