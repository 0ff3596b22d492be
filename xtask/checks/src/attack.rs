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
mod caught;
mod child;
mod draw;
mod files;
mod kills;
mod mutation;
mod operations;
mod options;
mod outcome;
mod tally;
mod watch;

use std::num::NonZero;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use crate::result::Result;
use crate::root::root;
pub(crate) use options::Attack;
use options::{Part, SIMULATED};
use tally::Tally;
use watch::Range;

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
    let devices = match (&options.device, &options.libraries) {
        (Some(device), _) => vec![device.clone()],
        (None, Some(_)) => vec!["cpu".to_owned(), SIMULATED.to_owned()],
        (None, None) => vec!["cpu".to_owned()],
    };
    if devices.iter().any(|device| device == SIMULATED) && options.libraries.is_none() {
        return Err(format!(
            "attack: --device {SIMULATED} needs --libraries: start it by cargo xtask attack"
        )
        .into());
    }
    let tally = Attacker { options, devices }.all(if options.short { SHORT } else { FULL })?;
    if tally.failures.is_empty() && options.short {
        println!("{}", tally.line());
    } else {
        print!("{}", tally.report());
    }
    if options.only.is_none_or(|only| only == Part::Sequences) && options.at.is_none() && !options.short {
        sequences(options.seed)?;
    }
    Ok(if tally.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sequences of calls under each recipe. The test run does a few of them.
const SEQUENCES: u64 = 400;

fn sequences(seed: u64) -> Result {
    let first = seed.wrapping_mul(SEQUENCES).to_string();
    println!("\nsequences: {SEQUENCES} under each recipe, from seed {first}");
    let mut test = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    test.current_dir(root()).args(["test", "--package", "fp8-nn", "--test", "suite", "interruptions"]);
    let status =
        test.env("FP8_TEST_SEQUENCES", SEQUENCES.to_string()).env("FP8_TEST_SEED", first).status()?;
    if status.success() { Ok(()) } else { Err(format!("attack: sequences: {status}").into()) }
}

struct Attacker<'a> {
    options: &'a Attack,
    devices: Vec<String>,
}

impl Attacker<'_> {
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
        let workers = thread::available_parallelism().map_or(1, NonZero::get) as u64;
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
            libraries: self.options.libraries.clone().filter(|_| device == SIMULATED),
        };
        let ranges: Vec<Range> = match self.options.at {
            Some(number) => vec![range(number, number + 1, 1)],
            None => (0..workers).map(|worker| range(worker, cases, workers)).collect(),
        };
        let attack = |range| {
            let tally = if part == Part::Kills { kills::run(range) } else { watch::run(range) };
            tally.map_err(|error| error.to_string()) // which can go to another thread
        };
        thread::scope(|scope| {
            let threads: Vec<_> = ranges.iter().map(|range| scope.spawn(move || attack(range))).collect();
            let mut all = Tally::default();
            for thread in threads {
                all.merge(thread.join().map_err(|_| "attack: a thread that watches a process panicked")??);
            }
            Ok(all)
        })
    }
}
