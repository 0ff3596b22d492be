//! Trains a small byte-level GPT in high precision and in FP8, and compares the two.
//!
//! ```text
//! cargo run --release --example train_gpt -- --help
//! ```
//!
//! Without options it trains on the plays in `data/shakespeare.txt` and takes less than three minutes on two cores.
//! Read `session.rs` first: it builds the model, the recipe and the optimizer and does a training step.

#![forbid(unsafe_code)]

mod batches;
mod compare;
mod config;
mod failure;
#[cfg(test)]
mod fake;
mod job;
mod machine;
mod options;
mod plot;
mod progress;
mod report;
mod sample;
mod session;
mod summary;
mod telemetry;
mod text;
mod train;
mod trainer;
mod verdict;

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use compare::Comparison;
use config::Config;
use failure::Failure;
use options::Request;
use session::Session;

/// The job that a command line asks for, with checked options.
#[derive(Debug)]
enum Job {
    Train(Box<Config>),
    Compare(Box<Comparison>),
}

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
    let (options, given) = match options::parse(std::env::args_os())? {
        Request::Train(options, given) => (*options, given),
        Request::Print(text) => {
            let _ = write!(std::io::stdout(), "{text}");
            return Ok(());
        }
    };
    let job = match options.compare {
        Some(_) => Job::Compare(Box::new(Comparison::new::<Session>(options, &given)?)),
        None => Job::Train(Box::new(Config::new::<Session>(options, &given)?)),
    };
    let interrupt = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupt);
    let handler = move || {
        // The second Ctrl-C does not wait for the step to end.
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::training(format!("Ctrl-C: {error}")))?;
    let threads = match &job {
        Job::Train(config) => config.threads,
        Job::Compare(comparison) => comparison.threads(),
    };
    let threads = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build();
    let threads = threads.map_err(|error| Failure::training(format!("starting threads: {error}")))?;
    threads.install(|| match job {
        Job::Train(config) => job::run::<Session>(&config, &interrupt, &mut std::io::stdout()),
        Job::Compare(comparison) => comparison.run::<Session>(&interrupt, &mut std::io::stdout()),
    })
}
