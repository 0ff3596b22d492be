//! Checks of the product that need the product: random use, reference data, and sweeps over all inputs.
//!
//! `cargo xtask attack`, `golden` and `exhaustive` build this program and start it, so that xtask itself depends on no crate
//! that it looks after.

#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod attack;
mod exhaustive;
mod golden;
mod real_training;
mod result;
mod root;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

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
    /// Fine-tunes a real model in high precision and in FP8, beside losses of PyTorch
    RealTraining(real_training::RealTraining),
}

fn main() -> ExitCode {
    let done = match Cli::parse().check {
        Check::Attack(options) => attack::run(&options),
        Check::Golden(options) => golden::run(&options),
        Check::Exhaustive(options) => exhaustive::run(&options).map(|()| ExitCode::SUCCESS),
        Check::RealTraining(options) => real_training::run(&options),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}
