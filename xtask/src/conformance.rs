//! `cargo xtask conformance`: the suite of all operations, on each backend in a process of its own.
//!
//! A process loads one CUDA library, and the simulated device takes its seed at its start: so there is one process for
//! each backend and seed. Skipped cases are counted with their reasons; the last line is `N passed, N failed, N ignored`.

mod harness;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::workspace::{Result, root, shell};
use crate::{artifact, process};
pub(crate) use harness::Outcome;

/// A suite that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(30 * 60);

#[derive(clap::Args)]
pub(crate) struct Conformance {
    /// Only this backend, which may be given several times; all of them otherwise
    #[arg(long, value_enum)]
    backend: Vec<Backend>,
    /// Seeds of the simulated device: 0, 1 and 2 unless given
    #[arg(long)]
    seed: Vec<u64>,
    /// Only cases whose names contain this
    #[arg(long)]
    filter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// The CPU: what the others are compared with, too
    Cpu,
    /// The simulated CUDA device
    CudaSim,
    /// A CUDA device
    Cuda,
}

impl Backend {
    /// As cases and the suite's environment call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CudaSim => "cuda-sim",
            Self::Cuda => "cuda",
        }
    }
}

/// One process of the suite.
pub(crate) struct Job {
    pub(crate) backend: Backend,
    /// Of the simulated device.
    pub(crate) seed: Option<u64>,
    /// Parts of names whose cases are left to another process.
    pub(crate) skipped: Vec<String>,
}

impl Job {
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
            command.env("FP8_SIM_SEED", seed.to_string());
        }
        command.args(self.skipped.iter().map(|part| format!("--skip={part}")));
        command
    }
}

/// The same job in one process a core, each with its share of the operations: a process runs its cases one by one.
pub(crate) fn shared(program: &Path, backend: Backend, seed: u64) -> Result<Vec<Job>> {
    let job = |skipped| Job { backend, seed: Some(seed), skipped };
    let mut list = job(Vec::new()).command(program);
    list.arg("--list");
    let listed = process::watch(list, LIMIT, |_| false)?.output;
    let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let operations: BTreeSet<&str> = names.filter_map(|name| name.split("::").nth(1)).collect();
    let shares = process::cores().min(operations.len()).max(1);
    let others = |share: usize| {
        let all = operations.iter().enumerate().filter(|(index, _)| index % shares != share);
        all.map(|(_, operation)| format!("{}::{operation}::", backend.name())).collect()
    };
    Ok((0..shares).map(|share| job(others(share))).collect())
}

pub(crate) fn run(options: &Conformance) -> Result<ExitCode> {
    let program = artifact::conformance(&shell()?)?;
    let backends = match &*options.backend {
        [] => &[Backend::Cpu, Backend::CudaSim, Backend::Cuda],
        some => some,
    };
    let seeds = if options.seed.is_empty() { &[0, 1, 2] } else { &*options.seed };
    let mut shares = Vec::new();
    for job in jobs(backends, seeds) {
        match job.seed {
            Some(seed) => shares.extend(shared(&program, job.backend, seed)?),
            None => shares.push(job),
        }
    }
    let total = check(&program, &shares, options.filter.as_deref())?;
    print!("{}", total.ignored_by_reason());
    println!("{}", total.line());
    Ok(if total.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A job for each backend, for the simulated device one for each seed.
fn jobs(backends: &[Backend], seeds: &[u64]) -> Vec<Job> {
    let of = |&backend: &Backend| match backend {
        Backend::CudaSim => {
            seeds.iter().map(|&seed| Job { backend, seed: Some(seed), skipped: Vec::new() }).collect()
        }
        Backend::Cpu | Backend::Cuda => vec![Job { backend, seed: None, skipped: Vec::new() }],
    };
    backends.iter().flat_map(of).collect()
}

/// Runs the jobs, prints what failed and a line for each, and adds them up.
pub(crate) fn check(program: &Path, jobs: &[Job], filter: Option<&str>) -> Result<Total> {
    let at_once = process::cores().min(jobs.len()).max(1);
    let threads = (process::cores() / at_once).max(1);
    let outcomes = process::each(jobs, at_once, |_, job| {
        let mut command = job.command(program);
        command.arg(format!("--test-threads={threads}")).args(filter);
        process::watch(command, LIMIT, |_| false).map_err(|error| error.to_string())
    });
    let mut total = Total::default();
    for (job, finished) in jobs.iter().zip(outcomes) {
        let finished = finished?;
        let outcome = Outcome::read(&finished.output, finished.succeeded());
        if !outcome.is_good() {
            println!("{}", outcome.failures(&finished.output).trim_end());
        }
        println!("{:16} {}", job.title(), outcome.line());
        total.add(outcome);
    }
    Ok(total)
}

/// The counts of all jobs.
#[derive(Default)]
pub(crate) struct Total {
    passed: usize,
    failed: usize,
    ignored: BTreeMap<String, usize>,
    /// A job ended badly although no case failed: the simulator complained, or the process broke down.
    is_bad: bool,
}

impl Total {
    fn add(&mut self, outcome: Outcome) {
        self.is_bad |= !outcome.is_good();
        self.passed += outcome.passed.len();
        self.failed += outcome.failed.len();
        for (_, reason) in outcome.ignored {
            *self.ignored.entry(reason).or_default() += 1;
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.failed == 0 && !self.is_bad
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
    fn seeds_multiply_the_simulated_device_alone() {
        let jobs = jobs(&[Backend::Cpu, Backend::CudaSim, Backend::Cuda], &[7, 8]);
        let titles: Vec<_> = jobs.iter().map(Job::title).collect();
        assert_eq!(titles, ["cpu", "cuda-sim, seed 7", "cuda-sim, seed 8", "cuda"]);
    }

    #[test]
    fn a_total_counts_reasons_and_remembers_a_breakdown() {
        let mut total = Total::default();
        total.add(Outcome::read(
            "test cpu::a ... ok\ntest cuda::a (no device) ... ignored\ntest result: ok.\n",
            true,
        ));
        assert_eq!((total.line(), total.is_good()), ("1 passed, 0 failed, 1 ignored".to_owned(), true));
        assert_eq!(total.ignored_by_reason(), "ignored:    1  no device\n");
        total.add(Outcome::read("test cpu::b ... ok\n", false));
        assert!(!total.is_good());
    }
}
