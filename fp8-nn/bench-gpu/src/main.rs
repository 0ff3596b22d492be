//! Times of operations and layers on a GPU: `cargo run --release -p bench-gpu -- --help`.
//!
//! Every row says what was moved or computed and how long it took; memory-bound operations are compared with the driver's
//! copy in the same process. `--report` makes a table of rows, those of other libraries too, which `bench_peers.py` writes
//! under the same names.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod attention;
mod compute;
mod costs;
mod data;
mod layers;
mod libraries;
mod memory;
mod passes;
mod report;
mod result;
mod timer;

use clap::{Parser, ValueEnum};
use fp8_nn::fp8_kernels::{Device, TransposePolicy};
use result::Result;
use std::path::PathBuf;
use std::process::ExitCode;
use timer::{Bench, Run};

/// Measures operations and layers on a GPU; rows go to the terminal and, as lines of JSON, to a file.
#[derive(Debug, Parser)]
#[command(name = "gpu_bench", max_term_width = 110)]
struct Options {
    /// The sections to measure; all unless given
    #[arg(long, value_enum)]
    section: Vec<Section>,
    /// Add rows to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Under which name rows go, for runs in other settings
    #[arg(long, value_name = "NAME", default_value = report::OURS)]
    by: String,
    /// Run every case once in a small size, also on the simulated GPU, and time nothing
    #[arg(long)]
    dry_run: bool,
    /// Run every case once in its full size, without a graph, and time nothing: for a profiler
    #[arg(long, conflicts_with = "dry_run")]
    once: bool,
    /// Print which GPU there is
    #[arg(long)]
    describe: bool,
    /// Print which version of cuDNN attention uses; fails where there is none
    #[arg(long)]
    cudnn: bool,
    /// Print a table of the rows in these files, with pass marks, and measure nothing
    #[arg(long, value_name = "FILE", num_args = 1..)]
    report: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// Casts, transposes, activations, norms
    Memory,
    /// Casts with a scale for each row or block
    Blocks,
    /// Additions, splits, the loss and other passes that do not quantize, and a cast of many tensors
    Passes,
    /// The update of delayed scaling
    Scales,
    /// The optimizer
    Adamw,
    /// Matrix products
    Gemm,
    /// Attention
    Attention,
    /// The time that calls take on the host: of a Linear, and of what it consists of
    Host,
    /// A transformer layer, forward and backward
    Layer,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all cases ran.
fn run(options: &Options) -> Result<bool> {
    if !options.report.is_empty() {
        print!("{}", report::markdown(&report::read(&options.report)?));
        return Ok(true);
    }
    if options.describe {
        let device = Device::cuda(0)?;
        println!("{}{}", device.description(), if device.is_simulated() { " (simulated)" } else { "" });
        return Ok(true);
    }
    if options.cudnn {
        println!("{}", libraries::cudnn()?);
        return Ok(true);
    }
    // Opening a device finds the driver, or says why there is none; its context is then the stream's.
    let found = Device::cuda(0)?;
    if found.is_simulated() && !options.dry_run {
        return Err(format!(
            "{} is simulated and has no speed; --dry-run times nothing",
            found.description()
        )
        .into());
    }
    let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    let device = Device::from_stream(stream.clone())?.with_transpose_policy(TransposePolicy::WithCast);
    let run = match options {
        Options { dry_run: true, .. } => Run::Dry,
        Options { once: true, .. } => Run::Once,
        _ => Run::Timed,
    };
    let mut bench = Bench::new(device, stream, options.out.clone(), run, &options.by)?;
    let sections = if options.section.is_empty() { Section::value_variants() } else { &*options.section };
    for section in sections {
        // A section that cannot go on leaves the others theirs.
        let done = match section {
            Section::Memory => memory::kernels(&mut bench),
            Section::Blocks => passes::blocks(&mut bench),
            Section::Passes => passes::others(&mut bench),
            Section::Scales => memory::scales(&mut bench),
            Section::Adamw => memory::adamw(&mut bench),
            Section::Gemm => compute::gemms(&mut bench),
            Section::Attention => attention::attention(&mut bench),
            Section::Host => layers::host(&mut bench).and_then(|()| costs::single_calls(&mut bench)),
            Section::Layer => layers::layer(&mut bench),
        };
        if let Err(error) = done {
            bench.fail(&format!("{section:?}"), &error.to_string());
        }
    }
    if run == Run::Dry && bench.device.is_simulated() {
        for kernel in libraries::launched()? {
            println!("launched {kernel}");
        }
    }
    let what = if run == Run::Timed { "measured" } else { "ran" };
    println!("{} {what}, {} failed", bench.measured(), bench.failures());
    Ok(bench.failures() == 0)
}
