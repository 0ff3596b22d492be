//! The program `fp8`: trains in FP8, inspects, quantizes, evaluates and runs Hugging Face models, and makes them of training
//! checkpoints.
//!
//! ```text
//! fp8 train --recipe current --save run
//! fp8 quantize SmolLM2-135M SmolLM2-135M-FP8 --scheme channel
//! fp8 inspect SmolLM2-135M-FP8 --against SmolLM2-135M
//! fp8 eval SmolLM2-135M-FP8 --text book.txt
//! fp8 generate SmolLM2-135M-FP8 --prompt "The capital of France is"
//! fp8 export run/fp8 model --scheme tensor --static-inputs
//! fp8 merge SmolLM2-135M adapter SmolLM2-135M-tuned
//! fp8 launch -n 4 -- ./train
//! ```
//!
//! Exit code 0: done. 1: a file could not be read or written on the way. 2: an input is wrong, and nothing was written. 130: Ctrl-C
//! or another signal ended it.

#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![forbid(unsafe_code)]

mod command_line;
mod destination;
mod eval;
mod export;
mod failure;
mod fine_tune;
mod gathers;
mod generate;
mod ids;
mod in_fp8;
mod inspect;
mod interrupt;
mod launch;
mod merge;
mod model;
mod options;
mod output;
mod page;
mod progress;
mod quantize;
mod report;
mod subject;
mod table;
mod text_input;
mod train;
mod values;
mod windows;

use failure::Failure;
use options::{Command, Request};
use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    silence_tokenizers();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        // The text, and what it took, have been printed.
        Err(failure @ Failure::Ended) => ExitCode::from(failure.code()),
        Err(Failure::Process { sentence, code }) if sentence.is_empty() => ExitCode::from(code),
        Err(failure) => {
            interrupt::begin_to_leave();
            // If stderr is closed, the exit code still tells.
            let _ = writeln!(std::io::stderr(), "{failure}");
            ExitCode::from(failure.code())
        }
    }
}

/// Keeps panics of the crates tokenizers and minijinja from the terminal: the library turns them into errors.
fn silence_tokenizers() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let is_caught = |file: &str| file.contains("tokenizers-") || file.contains("minijinja-");
        if !info.location().is_some_and(|location| is_caught(location.file())) {
            usual(info);
        }
    }));
}

fn run() -> Result<(), Failure> {
    let (command, given) = match options::parse(std::env::args_os())? {
        Request::Print(text) => return output::print(&text).map(drop),
        Request::FineTune(options) => {
            interrupt::install();
            return fine_tune::run(*options);
        }
        Request::Run(command, given) => (command, given),
    };
    interrupt::install();
    let text = match *command {
        Command::Inspect(options) => inspect::run(&options)?,
        Command::Quantize(options) => quantize::run(&options)?,
        Command::Eval(options) => eval::run(&options)?,
        Command::Generate(options) => generate::run(&options)?,
        Command::Export(options) => export::run(&options)?,
        Command::Merge(options) => merge::run(&options)?,
        Command::Launch(options) => return launch::run(&options),
        Command::Train(options) => return train::run(*options, &given),
    };
    output::print(&text)?;
    Ok(())
}
