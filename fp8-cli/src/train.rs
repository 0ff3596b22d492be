//! `fp8 train`: trains a small byte-level GPT in high precision and in FP8, and compares the two.
//!
//! Without options it trains on the plays in `data/shakespeare.txt` and takes less than three minutes on two cores.
//! Read `session.rs` first: it builds the model, the recipe and the optimizer and does a training step.

mod batches;
mod both;
mod compare;
mod config;
#[cfg(test)]
mod fake;
mod job;
pub(crate) mod layout;
mod machine;
pub(crate) mod numbers;
mod nvfp4;
pub(crate) mod options;
pub(crate) mod plot;
mod progress;
pub(crate) mod ranks;
pub(crate) mod report;
mod sample;
mod session;
mod shares;
mod summary;
pub(crate) mod telemetry;
mod text;
mod trainer;
mod training;
mod verdict;

use crate::failure::Failure;
use crate::interrupt::{self, Phase};
use crate::model::with_threads;
use compare::Comparison;
use config::Config;
use options::Given;
pub(crate) use options::Train;
use ranks::Ranks;
use session::Session;

pub(crate) const EXAMPLE: &str = "Example:
  fp8 train --recipe current --steps 200 --save run";

/// The job that a command line asks for, with checked options.
#[derive(Debug)]
enum Job {
    Train(Box<Config>),
    Compare(Box<Comparison>),
}

pub(crate) fn run(options: Train, given: &Given) -> Result<(), Failure> {
    let mut job = match options.compare {
        Some(_) => Job::Compare(Box::new(Comparison::new::<Session>(options, given)?)),
        None => Job::Train(Box::new(Config::new::<Session>(options, given)?)),
    };
    match &mut job {
        Job::Train(config) => config.join()?,
        Job::Compare(_) => Ranks::expect_alone("--compare")?,
    }
    let threads = match &job {
        Job::Train(config) => config.threads,
        Job::Compare(comparison) => comparison.threads(),
    };
    let (stop, out) = (interrupt::requested(), &mut std::io::stdout());
    // The first signal ends the training after its step, with a checkpoint. The second does not wait.
    interrupt::during(Phase::Save, || {
        with_threads(threads, || match job {
            Job::Train(config) => job::run::<Session>(&config, stop, out),
            Job::Compare(comparison) => comparison.run::<Session>(stop, out),
        })
    })
}
