//! Upkeep of the workspace: `cargo xtask --help`.
//!
//! Flags in, one `match`, one file a task.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod bench;
mod examples;
mod exhaustive;
mod golden;
mod ignored;
mod report;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  cargo xtask test                        all that CI checks
  cargo xtask test --fast                 the same without docs, examples and benches
  cargo xtask golden --dir ~/golden       reference data from another place
  cargo xtask bench --list                what can be measured
  cargo xtask bench codec -- --quick      one bench, with an option of criterion";

/// Upkeep of the workspace. Needs nothing but cargo; uses cargo-nextest where it is installed.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything CI checks: format, lints, tests, docs, examples, benches once (minutes, from nothing about ten)
    Test(test::Test),
    /// Rules the compiler does not know: sizes of files, stray words, licences (a second; part of `test`)
    Tidy,
    /// Compares codec, recipes and layers with reference data, case by case (seconds)
    Golden(golden::Golden),
    /// Runs criterion benches of the crates (a minute or two each)
    Bench(bench::Bench),
    /// Compares the codec with an independent oracle over whole input spaces (minutes, with --release)
    Exhaustive(exhaustive::Exhaustive),
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Test(options) => test::run(&options),
        Task::Tidy => tidy::run().map(|()| ExitCode::SUCCESS),
        Task::Golden(options) => golden::run(&options),
        Task::Bench(options) => bench::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Exhaustive(options) => exhaustive::run(&options).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}
