//! `cargo xtask test`: what CI's main job checks.
//!
//! Everything is built in the dev profile (the workspace optimized a little, its dependencies fully) with one set
//! of features, so that tests, doc tests, examples and benches share one build; only lints and docs check the
//! code a second time, without generating any. Benches run once as tests: criterion does so when it is not
//! started by `cargo bench`.

mod changes;
mod examples;
mod ignored;
mod package;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use xshell::{Shell, cmd};

use crate::conformance::{Backend, Job};
use crate::ptx::nvrtc;
use crate::report::Report;
use crate::workspace::{Result, Workspace, shell};
use crate::{artifact, checks, conformance, gpu_bundle, mutate, process, ptx, sass, tidy};

#[derive(clap::Args)]
pub(crate) struct Test {
    /// While you work: skips docs, doc tests, examples, benches, long trainings and injected faults, and tests only the packages
    /// that have changed since the last commit and those that depend on them
    #[arg(long)]
    fast: bool,
}

pub(crate) fn run(options: &Test) -> Result<ExitCode> {
    let sh = shell()?;
    let workspace = Workspace::read(&sh)?;
    let mut report = Report::default();

    report.step("format", || done(cmd!(sh, "cargo fmt --all --check").run()));
    report.step("tidy", || tidy::run(&tidy::Tidy::default()).map(|()| String::new()));
    report.step("counts of the kernels' machine code", sass::check);
    report.step("lints", || {
        done(cmd!(sh, "cargo clippy --workspace --all-targets --all-features -- -D warnings").run())
    });
    report.step("lints without std", || {
        done(cmd!(sh, "cargo clippy -p fp8-format --no-default-features -- -D warnings").run())
    });
    report.step("lints without CUDA", || {
        let packages = ["fp8-kernels", "fp8-recipe", "fp8-dist", "fp8-nn", "fp8-hf", "fp8-cli"]
            .into_iter()
            .flat_map(|name| ["-p", name]);
        done(cmd!(sh, "cargo clippy {packages...} --no-default-features -- -D warnings").run())
    });
    let changed = if options.fast { changes::packages(&sh, &workspace)? } else { None };
    let has_changed = |packages: &[&str]| {
        changed.as_ref().is_none_or(|changed| packages.iter().any(|package| changed.contains(*package)))
    };
    report.step("tests", || tests(&sh, options.fast, changed.as_ref()));
    if has_changed(&["fp8-format", "fp8-kernels"]) {
        report.step("kernels on the CPU, every case", || {
            let program = artifact::conformance(&sh)?;
            let total = conformance::check(&program, &[Job::all(Backend::Cpu)], None)?;
            if total.is_good() { Ok(total.line()) } else { Err(total.line().into()) }
        });
    }
    if cfg!(target_os = "linux") && has_changed(&KERNELS) {
        kernels(&sh, &mut report);
    }
    if cfg!(target_os = "linux") {
        report.step("attack, a short draw", || checks::short_attack(&sh));
    }
    if !options.fast {
        report.step("doc tests", || done(cmd!(sh, "cargo test --doc --workspace --all-features").run()));
        report.step("docs", || {
            let doc = cmd!(sh, "cargo doc --no-deps --workspace --all-features");
            done(doc.env("RUSTDOCFLAGS", "-D warnings").run())
        });
        report.step("packages", || package::check(&sh, &workspace));
        report.step("benches, once each", || benches(&sh, &workspace));
        examples::run(&sh, &mut report);
        if cfg!(target_os = "linux") {
            report.step("the GPU bundle's peers, without a GPU", || gpu_bundle::peers::dry_run(&sh));
        }
    }

    let ignored = ignored::list(&sh);
    let passed = report.finish();
    match ignored {
        Ok(ignored) => print!("{}", ignored::summary(&ignored)),
        Err(error) => println!("ignored tests: not listed: {error}"),
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn done(result: xshell::Result<()>) -> Result<String> {
    Ok(result.map(|()| String::new())?)
}

/// The packages of the kernels and of the simulated GPU that runs them.
const KERNELS: [&str; 3] = ["fp8-kernels", "fp8-cuda-sim", "ptx-interp"];

/// All tests, or with `is_fast` those of `changed` packages and of what depends on them, without long trainings and injected
/// faults.
fn tests(sh: &Shell, is_fast: bool, changed: Option<&BTreeSet<String>>) -> Result<String> {
    if cmd!(sh, "cargo nextest --version").quiet().ignore_stderr().ignore_stdout().run().is_ok() {
        // A process for each case would take twice the time: they follow in a few processes.
        let mut filter = "not binary_id(fp8-kernels::conformance)".to_owned();
        if is_fast {
            filter += " & not (binary_id(fp8-nn::convergence) | binary_id(fp8-nn::faults_on_gpu))";
        }
        if let Some(changed) = changed {
            let dependents: Vec<String> =
                changed.iter().map(|package| format!("rdeps(={package})")).collect();
            filter = format!("{filter} & ({})", dependents.join(" | "));
        }
        // One test more than there are processors: some tests wait for deadlines.
        let threads = (process::cores() + 1).to_string();
        let options = ["--no-fail-fast", "--status-level", "slow", "--test-threads", &threads, "-E", &filter];
        cmd!(sh, "cargo nextest run --workspace --all-features {options...}").run()?;
        Ok(match changed {
            Some(changed) => format!(
                "of {} and what depends on them",
                Vec::from_iter(changed.iter().map(String::as_str)).join(", ")
            ),
            None => "by cargo-nextest".to_owned(),
        })
    } else {
        cmd!(sh, "cargo test --workspace --lib --bins --tests --all-features --no-fail-fast").run()?;
        Ok("by cargo test".to_owned())
    }
}

/// The CUDA kernels: every case on the simulated GPU, a few planted mistakes, and the snapshots themselves where the compiler is
/// at hand.
fn kernels(sh: &Shell, report: &mut Report) {
    /// The order of blocks and warps. `cargo test` runs the cases with seed 0.
    const SEED: u64 = 1;
    /// The number of mutants of all kernel files. Others are drawn whenever a kernel changes; `cargo xtask mutate` tries more.
    const MUTANTS: usize = 18;
    let mut before = mutate::Before::default();
    report.step("kernels, every case", || {
        let program = artifact::conformance(sh)?;
        let jobs = conformance::simulated(&program, SEED)?;
        let total = conformance::check(&program, &jobs, None)?;
        let (line, is_good) = (total.line(), total.is_good());
        before = mutate::Before { seed: SEED, watched: total.into_watched() };
        if is_good { Ok(line) } else { Err(line.into()) }
    });
    report.step("kernels, mutants", || {
        let (draw, patience) = (mutate::Draw::Sample(MUTANTS), Duration::from_secs(mutate::PATIENCE));
        let plan = mutate::Plan { draw, seed: None, patience, entries: Vec::new(), before };
        mutate::check(&artifact::conformance(sh)?, &plan, &[])?.verdict()
    });
    report.step("kernels, compiled", || {
        if !nvrtc::is_at_hand(sh)? {
            return Ok("skipped: NVRTC is missing; cargo xtask ptx downloads it".to_owned());
        }
        let code = ptx::run(&ptx::Ptx { files: Vec::new(), check: true, all: true })?;
        if code == ExitCode::SUCCESS { Ok(String::new()) } else { Err("see above".into()) }
    });
}

fn benches(sh: &Shell, workspace: &Workspace) -> Result<String> {
    let count = workspace.targets("bench").count();
    if count == 0 {
        return Ok("there are none".to_owned());
    }
    cmd!(sh, "cargo test --workspace --all-features --bench *").run()?;
    Ok(format!("{count} files"))
}
