//! `cargo xtask bench train` and `cargo xtask bench gemm`: training steps, and the matrix products in them, beside those of
//! other libraries.
//!
//! Each contender runs in a process of its own, which stays alive and waits while the others compute. In every round each of
//! them takes a turn, and ratios are medians of the rounds' ratios, so that a machine that slows down slows all.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod common;
mod contender;
mod gemm;
mod load;
mod machine;
mod products;
mod report;
mod result;
mod session;
mod size;
mod start;
mod statistics;
mod train;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use contender::Contender;
use size::Size;

#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Training steps: forward, loss, backward, gradient clipping, AdamW
    Train(train::Options),
    /// The matrix products of a training step
    Gemm(gemm::Options),
    /// Trains as the lines on stdin say
    #[command(hide = true)]
    TrainWorker { contender: Contender, size: Size },
    /// Multiplies as the lines on stdin say
    #[command(hide = true)]
    GemmWorker,
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Train(options) => train::run(&options),
        Task::Gemm(options) => gemm::run(&options),
        Task::TrainWorker { contender, size } => session::serve(contender, &size),
        Task::GemmWorker => products::serve(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
