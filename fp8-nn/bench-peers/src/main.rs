//! `cargo xtask bench train` and `cargo xtask bench gemm`: training steps, and the matrix products in them, beside those of
//! other libraries.
//!
//! Each contender runs in a process of its own, which stays alive and waits while the others compute. In every round each of
//! them takes a turn, and ratios are medians of the rounds' ratios, so that a machine that slows down slows all.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod contender;
mod gemm;
mod load;
mod machine;
mod products;
mod report;
mod session;
mod size;
mod start;
mod statistics;
mod train;
mod worker;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use contender::Contender;
use size::Size;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

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

/// Options of both benches.
#[derive(Args, Debug)]
struct Common {
    /// Also measures other libraries, with this Python interpreter
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,

    /// Models and batches, as layers/hidden/heads/seq/batch
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_values = size::SIZES)]
    sizes: Vec<Size>,

    /// Numbers of threads [default: 1 and, if there are as many cores, 2]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = positive)]
    threads: Vec<usize>,

    /// Contenders that take part [default: the usual ones; other libraries only with --peers]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    contenders: Vec<Contender>,

    /// Turns that each contender takes
    #[arg(long, value_name = "N", default_value = "7", value_parser = positive)]
    rounds: usize,

    /// Writes all results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Common {
    fn threads(&self) -> Result<Vec<usize>> {
        if !self.threads.is_empty() {
            return Ok(self.threads.clone());
        }
        let mut threads = vec![1, std::thread::available_parallelism()?.get().min(2)];
        threads.dedup();
        Ok(threads)
    }
}

fn positive(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "expected a number of at least 1".to_owned())
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
