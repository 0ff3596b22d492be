//! The program `fp8`: looks at Hugging Face folders, quantizes them to FP8, and makes them of training checkpoints.
//!
//! ```text
//! fp8 quantize SmolLM2-135M SmolLM2-135M-FP8 --scheme channel
//! fp8 inspect SmolLM2-135M-FP8 --against SmolLM2-135M
//! fp8 export run/fp8 model --scheme tensor --static-inputs
//! ```
//!
//! Exit code 0: done. 1: a file could not be read or written on the way. 2: an input is wrong, and nothing was written.

#![forbid(unsafe_code)]

mod export;
mod failure;
mod inspect;
mod options;
mod progress;
mod quantize;
mod report;
mod table;

use failure::Failure;
use options::{Command, Request};
use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If stderr is closed, the exit code still tells.
            let _ = writeln!(std::io::stderr(), "{failure}");
            ExitCode::from(failure.code())
        }
    }
}

fn run() -> Result<(), Failure> {
    let text = match options::parse(std::env::args_os())? {
        Request::Print(text) => text,
        Request::Run(Command::Inspect(options)) => inspect::run(&options)?,
        Request::Run(Command::Quantize(options)) => quantize::run(&options)?,
        Request::Run(Command::Export(options)) => export::run(&options)?,
    };
    // A reader such as `head` may have closed the pipe.
    let _ = write!(std::io::stdout(), "{text}");
    Ok(())
}
