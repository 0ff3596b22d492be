//! Checks of the product that need the product: random use, reference data, and sweeps over all inputs.
//!
//! `cargo xtask attack`, `golden` and `exhaustive` build this program and start it, so that xtask itself depends on no crate
//! that it looks after.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod attack;
mod exhaustive;
mod golden;

use clap::{Parser, Subcommand};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

/// The result of a check.
type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// Checks of the product; `cargo xtask` starts them.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    check: Check,
}

#[derive(Subcommand)]
enum Check {
    /// Attacks the library with random calls, corrupted checkpoints, and kills during saves
    Attack(attack::Attack),
    /// Compares the codec, recipes and layers with reference data, case by case
    Golden(golden::Golden),
    /// Compares the codec with an independent oracle for all inputs
    Exhaustive(exhaustive::Exhaustive),
}

fn main() -> ExitCode {
    let done = match Cli::parse().check {
        Check::Attack(options) => attack::run(&options),
        Check::Golden(options) => golden::run(&options),
        Check::Exhaustive(options) => exhaustive::run(&options).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// The folder of the workspace's `Cargo.toml`.
fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap_or(package)
}
