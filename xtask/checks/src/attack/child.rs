//! The process that attacks. It may panic, hang or die: another one watches it, and starts it again behind the case.
//!
//! On standard output, a line each: `begin NUMBER FAMILY`, `end NUMBER FAMILY ACCEPTED REFUSED`, `fail NUMBER FAMILY TEXT`,
//! with tabs between.

use std::panic;
use std::process::ExitCode;
use std::sync::PoisonError;

use fp8_kernels::Device;

use super::case::{Case, Place};
use super::caught::{BROKEN, Done, PANIC, caught};
use super::draw::Draw;
use super::operations::{self, Family};
use super::options::{Attack, Part};
use super::outcome::{Event, difference};
use crate::result::Result;

/// Runs all cases of its range.
pub(super) fn run(options: &Attack) -> Result<ExitCode> {
    panic::set_hook(Box::new(|info| {
        let text = info.to_string();
        *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }));
    let mut attacker = match options.part() {
        Part::Operations => Attacker::Operations(Box::new(Operations::open(options)?)),
        Part::Files => Attacker::Files(Box::new(super::files::Files::new(options)?)),
        Part::Kills => return super::kills::child(options),
        Part::Sequences => return Err("sequences are tests of fp8-nn, not a process that attacks".into()),
    };
    let mut number = options.first;
    while number < options.last {
        let done = match &mut attacker {
            Attacker::Operations(operations) => {
                let (family, draw) = operations.pick(number);
                println!("begin\t{number}\t{}", family.name);
                operations.attack(number, family, &draw)
            }
            Attacker::Files(files) => {
                println!("begin\t{number}\tfile");
                files.attack(number)
            }
        };
        for failure in &done.failures {
            println!("fail\t{number}\t{}\t{}", done.family, failure.replace('\n', "\\n").replace('\t', " "));
        }
        println!("end\t{number}\t{}\t{}\t{}", done.family, done.accepted, done.refused);
        if done.is_broken {
            return Ok(ExitCode::from(BROKEN));
        }
        number += options.stride.max(1);
    }
    Ok(ExitCode::SUCCESS)
}

enum Attacker {
    Operations(Box<Operations>),
    Files(Box<super::files::Files>),
}

struct Operations {
    seed: u64,
    talks: bool,
    place: Place,
    cpu: Place,
    /// The CPU's results have the same bits for any number of threads.
    pools: [rayon::ThreadPool; 2],
}

impl Operations {
    fn open(options: &Attack) -> Result<Self> {
        let name = options.device_name();
        let device = Device::from_name(name)?;
        // Tensors of two devices do not mix, not even of two that were opened on one GPU.
        let foreign = match name {
            "cpu" => Vec::new(),
            _ => vec![Device::cpu(), Device::from_name(name)?],
        };
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        Ok(Self {
            seed: options.seed,
            talks: options.at.is_some(),
            place: Place { device, foreign },
            cpu: Place { device: Device::cpu(), foreign: Vec::new() },
            pools: [pool(3)?, pool(1)?],
        })
    }

    fn pick(&self, number: u64) -> (&'static Family, Draw) {
        let mut draw = Draw::new(self.seed, Part::Operations as u64, number);
        (operations::pick(&mut draw), draw)
    }

    fn attack(&self, number: u64, family: &'static Family, draw: &Draw) -> Done {
        if self.talks {
            eprintln!("case {number}: {}", family.name);
        }
        let on_cpu = self.place.device.to_string() == "cpu";
        let [many, one] = &self.pools;
        let policy = self.place.device.transpose_policy();
        let cpu =
            Place { device: self.cpu.device.clone().with_transpose_policy(policy), foreign: Vec::new() };
        let other = one.install(|| self.once(family, draw, &cpu));
        let mut done = Done {
            family: family.name,
            accepted: 0,
            refused: 0,
            failures: other.failures,
            is_broken: other.is_broken,
        };
        // What a device would make of what panics on the CPU adds nothing.
        if done.failures.is_empty() {
            let run = many.install(|| self.once(family, draw, &self.place));
            done.failures.extend(run.failures);
            done.is_broken |= run.is_broken;
            if done.failures.is_empty() {
                let difference = difference(&run.events, &other.events, on_cpu);
                done.failures.extend(difference.map(|difference| match on_cpu {
                    true => format!("with another number of threads: {difference}"),
                    false => difference,
                }));
            }
            done.accepted = run.events.iter().filter(|event| event.outcome.is_ok()).count();
            done.refused = run.events.len() - done.accepted;
        }
        if self.talks {
            done.failures.iter().for_each(|failure| eprintln!("  {failure}"));
        }
        done
    }

    fn once(&self, family: &Family, draw: &Draw, place: &Place) -> Run {
        if self.talks {
            eprintln!("  on {}", place.device);
        }
        let mut case = Case::new(draw.clone(), place, self.talks);
        let outcome = caught(|| (family.attack)(&mut case));
        let Case { events, mut failures, is_broken, .. } = case;
        failures.extend(outcome.err());
        Run { events, failures, is_broken }
    }
}

struct Run {
    events: Vec<Event>,
    failures: Vec<String>,
    is_broken: bool,
}
