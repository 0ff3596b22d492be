//! Upkeep of the workspace: `cargo xtask --help`. Flags in, one `match`, one file a task.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![deny(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod artifact;
mod asan;
mod bench;
mod chaos;
mod checks;
mod conformance;
mod convergence;
mod cudnn_check;
mod gpu_bundle;
mod gpu_test;
mod mutants;
mod mutate;
mod mutate_codec;
mod mutate_crates;
mod neon;
mod network;
mod process;
mod ptx;
mod python;
mod real_model;
mod report;
mod sass;
mod sim;
mod simulated;
mod task;
mod test;
mod tidy;
mod workspace;

use clap::Parser;
use std::process::ExitCode;
use task::Task;

/// Maintenance tasks of the workspace. Need only cargo; use cargo-nextest if it is installed.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = include_str!("help.txt"))]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

fn main() -> ExitCode {
    report::exit_code(match Cli::parse().task {
        Task::Test(options) => test::run(&options),
        Task::Tidy(options) => tidy::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Golden(options) => checks::golden(&options),
        Task::Ptx(options) => ptx::run(&options),
        Task::Sass(options) => sass::run(&options),
        Task::RealModel(options) => real_model::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Sim(options) => sim::run(&options),
        Task::Simulated => simulated::run(),
        Task::Conformance(options) => conformance::run(&options),
        Task::Mutate(options) => mutate::run(&options),
        Task::MutateCodec(options) => mutate_codec::run(&options),
        Task::MutateCrates(options) => mutate_crates::run(&options),
        Task::Convergence => convergence::run(),
        Task::CudnnCheck(options) => cudnn_check::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Asan => asan::run(),
        Task::Attack(options) => checks::attack(&options),
        Task::Chaos(options) => chaos::run(&options),
        Task::GpuTest => gpu_test::run(),
        Task::GpuBundle(options) => gpu_bundle::run(&options),
        Task::Neon(options) => neon::run(&options),
        Task::Network(options) => network::run(&options),
        Task::Bench(options) => bench::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Exhaustive(options) => checks::optimized("exhaustive", &options),
        Task::RealTraining(options) => checks::optimized("real-training", &options),
    })
}
