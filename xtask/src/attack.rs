//! `cargo xtask attack`: random use of the library, as far as its public API goes.
//!
//! - **operations**: calls with random shapes, types, values and devices, on the CPU and on the simulated GPU, whose results
//!   must agree;
//! - **files**: mutated checkpoints, of which none may break a model;
//! - **kills**: processes that are killed while they save;
//! - **sequences**: training that is saved and loaded at random places, under every recipe, whose results must be those of
//!   training that is not (`fp8-nn/tests/suite/interruptions.rs`).
//!
//! A failure is a panic, a hang, the death of the process, a report of the simulated device, a wrong result, or a file that
//! is lost or left. Attacks run in processes of their own, which are watched, and may not allocate more than a few GiB. A
//! case is a function of the seed and its number: each failure is printed with the command that repeats it.

mod case;
mod child;
mod draw;
mod files;
mod kills;
mod mutation;
mod operations;
mod outcome;
mod tally;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use xshell::Shell;

use crate::workspace::{Result, Workspace, shell};
use crate::{artifact, process, sim};
use tally::Tally;
use watch::Range;

/// The value of `--device` for the simulated GPU.
const SIMULATED: &str = "cuda-sim";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Calls of operations
    Operations,
    /// Mutated checkpoints
    Files,
    /// Processes killed while they save
    Kills,
    /// Training that is saved and loaded at random places
    Sequences,
}

impl Part {
    const fn name(self) -> &'static str {
        match self {
            Self::Operations => "operations",
            Self::Files => "files",
            Self::Kills => "kills",
            Self::Sequences => "sequences",
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Attack {
    /// Attacks for this many minutes instead of running the full number of cases
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,
    /// Seed of the random cases
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Runs only this part
    #[arg(long)]
    only: Option<Part>,
    /// Device to attack: cpu, cuda-sim, or cuda:N on a machine with a GPU [default: cpu and cuda-sim]
    #[arg(long)]
    device: Option<String>,
    /// Repeats one case and prints what it does
    #[arg(long, value_name = "NUMBER")]
    at: Option<u64>,
    /// Time limit for a case [default: 30 on the CPU, 180 on a GPU]
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// This is a process that attacks
    #[arg(long, hide = true)]
    child: bool,
    #[arg(long, hide = true, default_value_t = 0)]
    first: u64,
    #[arg(long, hide = true, default_value_t = 0)]
    last: u64,
    #[arg(long, hide = true, default_value_t = 1)]
    stride: u64,
    /// Folder in which the process writes files until it is killed
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

impl Attack {
    fn part(&self) -> Part {
        self.only.unwrap_or(Part::Operations)
    }

    /// The device as the library names it.
    fn device_name(&self) -> &str {
        match self.device.as_deref() {
            None => "cpu",
            Some(SIMULATED) => "cuda:0",
            Some(name) => name,
        }
    }
}

/// The number of cases of each part.
#[derive(Clone, Copy, Debug)]
struct Plan {
    cpu: u64,
    gpu: u64,
    files: u64,
    kills: u64,
}

const FULL: Plan = Plan { cpu: 500_000, gpu: 12_000, files: 20_000, kills: 60 };
/// A plan that takes a few seconds.
const SHORT: Plan = Plan { cpu: 6000, gpu: 160, files: 400, kills: 4 };

pub(crate) fn run(options: &Attack) -> Result<ExitCode> {
    if options.child {
        return child::run(options);
    }
    let devices = match &options.device {
        Some(device) => vec![device.clone()],
        None if cfg!(target_os = "linux") => vec!["cpu".to_owned(), SIMULATED.to_owned()],
        None => vec!["cpu".to_owned()],
    };
    let library = || artifact::simulator(&shell()?);
    let attacker = Attacker::new(options, devices, library)?;
    let tally = attacker.all(FULL)?;
    print!("{}", tally.report());
    if options.only.is_none_or(|only| only == Part::Sequences) && options.at.is_none() {
        sequences(options.seed)?;
    }
    Ok(if tally.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sequences of calls under each recipe. The test run does a few of them.
const SEQUENCES: u64 = 400;

fn sequences(seed: u64) -> Result<()> {
    let sh = shell()?;
    let (count, first) = (SEQUENCES.to_string(), seed.wrapping_mul(SEQUENCES).to_string());
    println!("\nsequences: {count} under each recipe, from seed {first}");
    let test = xshell::cmd!(sh, "cargo test --package fp8-nn --test suite interruptions");
    Ok(test.env("FP8_TEST_SEQUENCES", count).env("FP8_TEST_SEED", first).run()?)
}

/// A short draw, for `cargo xtask test`.
pub(crate) fn short(sh: &Shell) -> Result<String> {
    let options = Attack {
        minutes: None,
        seed: 1,
        only: None,
        device: None,
        at: None,
        limit: None,
        child: false,
        first: 0,
        last: 0,
        stride: 1,
        folder: None,
    };
    let devices = vec!["cpu".to_owned(), SIMULATED.to_owned()];
    // The tests have built it, with the same features: nothing is built a second time.
    let library = || artifact::simulator_of_tests(sh);
    let attacker = Attacker::new(&options, devices, library)?;
    let tally = attacker.all(SHORT)?;
    if tally.failures.is_empty() {
        return Ok(tally.line());
    }
    print!("{}", tally.report());
    Err(tally.line().into())
}

struct Attacker<'a> {
    options: &'a Attack,
    devices: Vec<String>,
    /// The simulated device's library under the names of NVIDIA's.
    libraries: Option<PathBuf>,
}

impl<'a> Attacker<'a> {
    /// `library` is asked for the simulated device's library if that is attacked.
    fn new(
        options: &'a Attack,
        devices: Vec<String>,
        library: impl FnOnce() -> Result<PathBuf>,
    ) -> Result<Self> {
        let libraries = if devices.iter().any(|device| device == SIMULATED) {
            let folder = Workspace::read(&shell()?)?.target_directory.join("attack");
            sim::fill(&folder, &library()?)?;
            Some(folder)
        } else {
            None
        };
        Ok(Self { options, devices, libraries })
    }

    /// All parts, one after the other, each with a table.
    fn all(&self, plan: Plan) -> Result<Tally> {
        let wants = |part| self.options.only.is_none_or(|only| only == part);
        let mut all = Tally::default();
        let mut jobs = Vec::new();
        if wants(Part::Operations) {
            for device in &self.devices {
                let cases = if device == "cpu" { plan.cpu } else { plan.gpu };
                jobs.push((Part::Operations, device.clone(), cases));
            }
        }
        if wants(Part::Files) {
            jobs.push((Part::Files, "cpu".to_owned(), plan.files));
        }
        if wants(Part::Kills) {
            jobs.push((Part::Kills, self.devices.last().cloned().unwrap_or_default(), plan.kills));
        }
        let share =
            self.options.minutes.map(|minutes| Duration::from_secs(60 * minutes) / jobs.len().max(1) as u32);
        for (part, device, cases) in jobs {
            let start = Instant::now();
            let deadline = share.map(|share| start + share);
            let tally = self.part(part, &device, cases, deadline)?;
            println!(
                "\n{} on {device}, {:.0} s: {}",
                part.name(),
                start.elapsed().as_secs_f64(),
                tally.line()
            );
            print!("{}", tally.table());
            all.merge(tally);
        }
        Ok(all)
    }

    fn part(&self, part: Part, device: &str, cases: u64, deadline: Option<Instant>) -> Result<Tally> {
        let cases = if deadline.is_some() { u64::MAX / 4 } else { cases };
        let workers = process::cores() as u64;
        let range = |first, last, stride| Range {
            part,
            device: device.to_owned(),
            seed: self.options.seed,
            first,
            last,
            stride,
            talks: self.options.at.is_some(),
            deadline,
            limit: Duration::from_secs(self.options.limit.unwrap_or(if device == "cpu" { 30 } else { 180 })),
            libraries: self.libraries.clone().filter(|_| device == SIMULATED),
        };
        let ranges: Vec<Range> = match self.options.at {
            Some(number) => vec![range(number, number + 1, 1)],
            None => (0..workers).map(|worker| range(worker, cases, workers)).collect(),
        };
        let tallies = process::each(&ranges, ranges.len(), |_, range| {
            let tally = if part == Part::Kills { kills::run(range) } else { watch::run(range) };
            tally.map_err(|error| error.to_string()) // which can go to another thread
        });
        let mut all = Tally::default();
        for tally in tallies {
            all.merge(tally?);
        }
        Ok(all)
    }
}
