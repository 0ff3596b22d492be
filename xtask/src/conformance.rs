//! `cargo xtask conformance`: the suite of all operations, on each backend in a process of its own.
//!
//! A process loads one CUDA library, and the simulated device takes its seed at its start: so there is one process for
//! each backend and seed. Skipped cases are counted with their reasons; the last line is `N passed, N failed, N ignored`.

mod harness;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::workspace::{Result, root, shell};
use crate::{artifact, process};
use harness::Found;
pub(crate) use harness::{Outcome, Watched};

/// A suite that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(30 * 60);

#[derive(clap::Args)]
pub(crate) struct Conformance {
    /// Runs only this backend (repeatable) [default: all]
    #[arg(long, value_enum)]
    backend: Vec<Backend>,
    /// Seed of the simulated device (repeatable) [default: 0, 1 and 2]
    #[arg(long)]
    seed: Vec<u64>,
    /// Runs only cases whose names contain this text
    #[arg(long)]
    filter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// The CPU, which is also the reference
    Cpu,
    /// The simulated CUDA device
    CudaSim,
    /// The same with cuDNN, for attention
    CudaSimDnn,
    /// A CUDA device
    Cuda,
}

impl Backend {
    /// As cases and the suite's environment call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CudaSim => "cuda-sim",
            Self::CudaSimDnn => "cuda-sim-dnn",
            Self::Cuda => "cuda",
        }
    }
}

/// One process of the suite.
pub(crate) struct Job {
    pub(crate) backend: Backend,
    /// The seed of the simulated device.
    pub(crate) seed: Option<u64>,
    /// Parts of names whose cases are left to another process.
    pub(crate) skipped: Vec<String>,
}

impl Job {
    /// Every case of a backend in one process.
    pub(crate) fn all(backend: Backend) -> Self {
        Self { backend, seed: None, skipped: Vec::new() }
    }

    fn title(&self) -> String {
        match self.seed {
            Some(seed) => format!("{}, seed {seed}", self.backend.name()),
            None => self.backend.name().to_owned(),
        }
    }

    /// The suite's process, so far without a filter.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let package = root().join("fp8-kernels");
        let mut command = Command::new(program);
        command.current_dir(&package).env("CARGO_MANIFEST_DIR", &package);
        command.env("FP8_CONFORMANCE_BACKEND", self.backend.name());
        if let Some(seed) = self.seed {
            command.env("FP8_SIM_SEED", seed.to_string()).env("FP8_CONFORMANCE_WATCH", "1");
        }
        command.args(self.skipped.iter().map(|part| format!("--skip={part}")));
        command
    }
}

/// The names of a backend's cases, of those whose names contain the filter.
pub(crate) fn names(program: &Path, backend: Backend, filter: Option<&str>) -> Result<Vec<String>> {
    let mut list = Job::all(backend).command(program);
    list.arg("--list").args(filter);
    let listed = process::watch(list, LIMIT, |_| false)?.output;
    Ok(listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// The simulated device's jobs, without cuDNN and with it: a process runs its cases one by one, so that there is one for each
/// operation.
pub(crate) fn simulated(program: &Path, seed: u64) -> Result<Vec<Job>> {
    let mut jobs = simulated_as(Backend::CudaSim, program, &[seed], None)?;
    jobs.extend(simulated_as(Backend::CudaSimDnn, program, &[seed], None)?);
    Ok(jobs)
}

fn simulated_as(backend: Backend, program: &Path, seeds: &[u64], filter: Option<&str>) -> Result<Vec<Job>> {
    Ok(by_operation(backend, &names(program, backend, filter)?, seeds))
}

/// A job for each operation and seed. The smallest come last, so that no processor waits long for another at the end.
fn by_operation(backend: Backend, names: &[String], seeds: &[u64]) -> Vec<Job> {
    let mut counts = BTreeMap::<&str, usize>::new();
    for operation in names.iter().filter_map(|name| name.split("::").nth(1)) {
        *counts.entry(operation).or_default() += 1;
    }
    let mut operations: Vec<&str> = counts.keys().copied().collect();
    operations.sort_by_key(|operation| Reverse(counts[operation]));
    let others = |operation: &str| {
        let others = operations.iter().filter(|other| **other != operation);
        others.map(|other| format!("{}::{other}::", backend.name())).collect()
    };
    let of = |operation| {
        seeds.iter().map(move |&seed| Job { backend, seed: Some(seed), skipped: others(operation) })
    };
    operations.iter().flat_map(|operation| of(operation)).collect()
}

pub(crate) fn run(options: &Conformance) -> Result<ExitCode> {
    let program = artifact::conformance(&shell()?)?;
    let backends = match &*options.backend {
        [] => &[Backend::Cpu, Backend::CudaSim, Backend::CudaSimDnn, Backend::Cuda],
        some => some,
    };
    let seeds = if options.seed.is_empty() { &[0, 1, 2] } else { &*options.seed };
    let filter = options.filter.as_deref();
    let mut jobs = Vec::new();
    for &backend in backends {
        if [Backend::CudaSim, Backend::CudaSimDnn].contains(&backend) {
            jobs.extend(simulated_as(backend, &program, seeds, filter)?);
        } else if !names(&program, backend, filter)?.is_empty() {
            jobs.push(Job::all(backend));
        }
    }
    if jobs.is_empty() {
        let filter = filter.unwrap_or_default();
        return Err(format!(
            "conformance: no case has '{filter}' in its name: names are as in cuda-sim::quantize::needles::f32_e4m3"
        )
        .into());
    }
    let total = check(&program, &jobs, filter)?;
    print!("{}", total.ignored_by_reason());
    println!("{}", total.line());
    Ok(if total.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the jobs, prints what failed and a line for each backend and seed, and adds them up.
pub(crate) fn check(program: &Path, jobs: &[Job], filter: Option<&str>) -> Result<Total> {
    let at_once = process::cores().min(jobs.len()).max(1);
    let threads = (process::cores() / at_once).max(1);
    let outcomes = process::each(jobs, at_once, |_, job| {
        let mut command = job.command(program);
        command.arg(format!("--test-threads={threads}")).args(filter);
        process::watch(command, LIMIT, |_| false).map_err(|error| error.to_string())
    });
    let (mut total, mut titles) = (Total::default(), BTreeMap::<String, Total>::new());
    for (job, finished) in jobs.iter().zip(outcomes) {
        let finished = finished?;
        let outcome = Outcome::read(&finished.output, finished.succeeded());
        if !outcome.is_good() {
            println!(
                "{}\n{}: {}",
                outcome.failures(&finished.output).trim_end(),
                job.title(),
                outcome.line()
            );
        }
        titles.entry(job.title()).or_default().add(&outcome);
        total.add(&outcome);
    }
    for (title, total) in titles {
        let simulator = total.simulator.map_or_else(String::new, |found| format!("; {found}"));
        println!("{title:17} {}{simulator}", total.line());
    }
    Ok(total)
}

/// The counts of all jobs.
#[derive(Default)]
pub(crate) struct Total {
    passed: usize,
    failed: usize,
    ignored: BTreeMap<String, usize>,
    simulator: Option<Found>,
    /// Times and kernels of the cases that passed on the simulated device.
    watched: BTreeMap<String, Watched>,
    /// A job ended badly although no case failed: the simulator complained, or the process broke down.
    is_bad: bool,
}

impl Total {
    fn add(&mut self, outcome: &Outcome) {
        self.is_bad |= !outcome.is_good();
        self.passed += outcome.passed.len();
        self.failed += outcome.failed.len();
        if let Some(found) = outcome.simulator {
            self.simulator = Some(self.simulator.unwrap_or_default().and(found));
        }
        let passed = outcome.passed.iter().filter_map(|name| outcome.watched.get_key_value(name));
        self.watched.extend(passed.map(|(name, watched)| (name.clone(), watched.clone())));
        for (_, reason) in &outcome.ignored {
            *self.ignored.entry(reason.clone()).or_default() += 1;
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.failed == 0 && !self.is_bad
    }

    /// Times and kernels of the cases that passed on the simulated device.
    pub(crate) fn into_watched(self) -> BTreeMap<String, Watched> {
        self.watched
    }

    pub(crate) fn line(&self) -> String {
        let ignored: usize = self.ignored.values().sum();
        format!("{} passed, {} failed, {ignored} ignored", self.passed, self.failed)
    }

    fn ignored_by_reason(&self) -> String {
        self.ignored.iter().map(|(reason, count)| format!("ignored: {count:>4}  {reason}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_and_seed_is_a_job_the_smallest_last() {
        let names =
            ["cuda-sim::norm::a", "cuda-sim::grad_norm::a", "cuda-sim::grad_norm::b", "cuda-sim::cast::a"];
        let jobs = by_operation(Backend::CudaSim, &names.map(str::to_owned), &[7, 8]);
        let seeds: Vec<_> = jobs.iter().map(|job| (job.title(), job.skipped.join(" "))).collect();
        let seed = |seed, skipped: &str| (format!("cuda-sim, seed {seed}"), skipped.to_owned());
        assert_eq!(
            seeds,
            [
                seed(7, "cuda-sim::cast:: cuda-sim::norm::"),
                seed(8, "cuda-sim::cast:: cuda-sim::norm::"),
                seed(7, "cuda-sim::grad_norm:: cuda-sim::norm::"),
                seed(8, "cuda-sim::grad_norm:: cuda-sim::norm::"),
                seed(7, "cuda-sim::grad_norm:: cuda-sim::cast::"),
                seed(8, "cuda-sim::grad_norm:: cuda-sim::cast::"),
            ]
        );
    }

    #[test]
    fn a_total_counts_reasons_and_remembers_a_breakdown() {
        let mut total = Total::default();
        total.add(&Outcome::read(
            "test cpu::a ... ok\ntest cuda::a (no device) ... ignored\ntest result: ok.\n",
            true,
        ));
        assert_eq!((total.line(), total.is_good()), ("1 passed, 0 failed, 1 ignored".to_owned(), true));
        assert_eq!(total.ignored_by_reason(), "ignored:    1  no device\n");
        total.add(&Outcome::read("test cpu::b ... ok\n", false));
        assert!(!total.is_good());
    }
}
