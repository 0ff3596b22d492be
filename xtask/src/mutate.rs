//! `cargo xtask mutate`: plants small mistakes in the kernels' PTX and sees whether the conformance suite finds them.
//!
//! Each mutant is run by the simulated device on the cases of the operations that use the kernel. It is killed by a
//! wrong result, by a fault that the device finds, by PTX that does not load, and by running too long. The survivors
//! stand in `fp8-kernels/tests/mutants.txt` with their reasons; one that does not fails the task. A run of all mutants
//! tries those, too; a draw counts them as survivors without running them.

mod draw;
mod edits;
mod survivors;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::workspace::{Result, shell};
use crate::{artifact, process, ptx};
pub(crate) use draw::Draw;
use edits::Mutant;
use survivors::Reason;
use trial::{Trial, Verdict};

/// How many mutants apart the progress is told.
const PROGRESS: usize = 100;

/// Seconds in which all cases of a file have their turn several times.
pub(crate) const PATIENCE: u64 = 300;

#[derive(clap::Args)]
pub(crate) struct Mutate {
    /// Runs only this many mutants that are not on the list of survivors, drawn by the seed
    #[arg(long, conflicts_with = "per_kernel")]
    sample: Option<usize>,
    /// Runs at most this many mutants of each kernel, drawn by the seed
    #[arg(long)]
    per_kernel: Option<usize>,
    /// Only mutants of this kernel file: quantize, norm, …
    #[arg(long)]
    kernel: Vec<String>,
    /// Of the draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds for one mutant; one that is alive then is undecided
    #[arg(long, default_value_t = PATIENCE)]
    patience: u64,
    /// The suite's program, instead of building it
    #[arg(long)]
    program: Option<PathBuf>,
}

pub(crate) fn run(options: &Mutate) -> Result<ExitCode> {
    let program = match &options.program {
        Some(program) => fs::canonicalize(program)?,
        None => artifact::conformance(&shell()?)?,
    };
    let draw = match (options.sample, options.per_kernel) {
        (Some(count), _) => Draw::Sample(count),
        (None, Some(count)) => Draw::PerKernel(count),
        (None, None) => Draw::All,
    };
    let plan = Plan { draw, seed: options.seed, patience: Duration::from_secs(options.patience) };
    let tally = check(&program, &plan, &options.kernel)?;
    println!("{}", tally.line());
    Ok(if tally.problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Which mutants are run, and for how long.
pub(crate) struct Plan {
    pub(crate) draw: Draw,
    pub(crate) seed: u64,
    pub(crate) patience: Duration,
}

/// What came of the mutants that were drawn.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    killed: usize,
    /// Survivors on the list that some input would tell from the kernel; a draw takes the list's word for them.
    known: usize,
    /// Those that none would. They are no part of the score: nothing can kill them.
    equal: usize,
    new: usize,
    /// Alive when patience was at its end.
    undecided: usize,
    /// Survivors where no case gets; they say nothing about the cases.
    unreached: usize,
    /// New and undecided ones, those unreached in kernels that are not on the list, lines of the list without a mutant,
    /// cases that fail without a mutation.
    pub(crate) problems: usize,
    /// Of all mutants together.
    seconds: f64,
}

impl Tally {
    pub(crate) fn line(&self) -> String {
        let Self { killed, known, equal, new, undecided, unreached, problems, seconds } = self;
        let run = killed + known + new + undecided;
        let percent = 100.0 * *killed as f64 / run.max(1) as f64;
        format!(
            "{killed} of {run} mutants killed ({percent:.1} %), {known} known survivors, {new} new, {undecided} undecided; \
             more: {equal} equal to the kernel, {unreached} in code that no case reaches; {problems} problems; {seconds:.0} s"
        )
    }

    /// Counts a mutant, and says what has to be done about it.
    fn count(&mut self, mutant: &Mutant, verdict: Verdict, known: &BTreeMap<String, Reason>) {
        let key = mutant.key();
        let reason = reason(mutant, known);
        match (verdict, reason) {
            (Verdict::Killed, _) => {
                self.killed += 1;
                if reason.is_some() {
                    println!("killed now, its line may go, or name others alone: {key}");
                }
            }
            (Verdict::Survived | Verdict::Unreached, Some(reason)) if reason.is_equal => self.equal += 1,
            (Verdict::Survived | Verdict::Unreached, Some(_)) => self.known += 1,
            (Verdict::Survived, None) => {
                self.new += 1;
                self.problems += 1;
                println!("SURVIVED, now `{}`; kill it, or list it with its reason:", mutant.replacement());
                println!("{key} REASON");
            }
            (Verdict::Undecided, _) => {
                self.undecided += 1;
                self.problems += 1;
                println!("UNDECIDED, now `{}`; give it more --patience: {key}", mutant.replacement());
            }
            (Verdict::Unreached, None) => {
                self.unreached += 1;
                if !known.contains_key(&unreached(mutant)) {
                    self.problems += 1;
                    println!("UNREACHED by any case; add one, or list it with its reason: {key}");
                }
            }
        }
    }

    fn add(&mut self, other: &Self) {
        self.killed += other.killed;
        self.known += other.known;
        self.equal += other.equal;
        self.new += other.new;
        self.undecided += other.undecided;
        self.unreached += other.unreached;
        self.problems += other.problems;
        self.seconds += other.seconds;
    }
}

/// Runs the drawn mutants of these kernel files, or of all.
pub(crate) fn check(program: &Path, plan: &Plan, files: &[String]) -> Result<Tally> {
    let known = survivors::read()?;
    let snapshots = snapshots(files)?;
    let all: Vec<Mutant> = snapshots.iter().flat_map(|(file, ptx)| edits::mutants(file, ptx)).collect();
    let mut total = Tally::default();
    let lines = |mutant: &Mutant| [mutant.key(), mutant.key_of_all(), mutant.key_of_any(), unreached(mutant)];
    let keys: BTreeSet<String> = all.iter().flat_map(lines).collect();
    for key in known.keys().filter(|key| !keys.contains(*key)) {
        let file = key.split(' ').next().unwrap_or_default();
        // Whether a line for any kernel has a mutant is seen where all kernels are read.
        if files.is_empty() || snapshots.contains_key(file) {
            total.problems += 1;
            println!("no such mutant any more, remove its line: {key}");
        }
    }
    let jobs = plan.draw.choose(&all, plan.seed, |mutant| reason(mutant, &known).is_some());
    println!(
        "{} mutants in {} kernel files; {}",
        all.len(),
        snapshots.len(),
        plan.draw.line(jobs.len(), plan.seed)
    );
    for (file, ptx) in &snapshots {
        let jobs: Vec<&Mutant> = jobs.iter().copied().filter(|mutant| mutant.file == *file).collect();
        if !jobs.is_empty() {
            let tally = try_out(&Trial::new(program, file, ptx)?, &jobs, plan, &known)?;
            println!("{file:14} {}", tally.line());
            total.add(&tally);
        }
    }
    Ok(total)
}

/// Runs the drawn mutants of one kernel file.
fn try_out(trial: &Trial, jobs: &[&Mutant], plan: &Plan, known: &BTreeMap<String, Reason>) -> Result<Tally> {
    let tally = Mutex::new(Tally::default());
    let done = AtomicUsize::new(0);
    let start = Instant::now();
    let errors = process::each(jobs, process::cores(), |_, mutant| {
        let verdict = if plan.draw.believes_the_list() && reason(mutant, known).is_some() {
            Ok(Verdict::Survived)
        } else {
            trial.verdict(mutant, plan.patience)
        };
        let verdict = verdict.map_err(|error| error.to_string())?;
        tally.lock().unwrap_or_else(PoisonError::into_inner).count(mutant, verdict, known);
        let count = done.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_multiple_of(PROGRESS) {
            println!("{count} of {} mutants run, {:.0} s", jobs.len(), start.elapsed().as_secs_f64());
        }
        Ok::<_, String>(())
    });
    errors.into_iter().collect::<std::result::Result<(), _>>()?;
    let mut tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    for problem in trial.problems() {
        tally.problems += 1;
        println!("{problem}");
    }
    tally.seconds = start.elapsed().as_secs_f64();
    Ok(tally)
}

/// What the list says about this mutant, alone or among others.
fn reason<'a>(mutant: &Mutant, known: &'a BTreeMap<String, Reason>) -> Option<&'a Reason> {
    [mutant.key(), mutant.key_of_all(), mutant.key_of_any()].iter().find_map(|key| known.get(key))
}

/// The line of the list for all that no case reaches in the mutant's kernel.
fn unreached(mutant: &Mutant) -> String {
    format!("{} {} {}", mutant.file, mutant.kernel, survivors::UNREACHED)
}

/// Texts by stem, of these files or of all; a name of none is an error.
fn snapshots(files: &[String]) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for path in crate::workspace::files(&ptx::folder())? {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some_and(|end| end == "ptx") {
            found.insert(stem, fs::read_to_string(&path)?);
        }
    }
    let asked: BTreeSet<&str> = files.iter().map(|file| file.trim_end_matches(".cu")).collect();
    if let Some(name) = asked.iter().find(|name| !found.contains_key(**name)) {
        let known = found.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Err(format!("mutate: no kernel file {name}.cu: expected one of {known}").into());
    }
    found.retain(|stem, _| asked.is_empty() || asked.contains(stem.as_str()));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_kernel_is_named_even_beside_a_right_one() {
        let names = ["amax", "cats"].map(str::to_owned);
        let error = snapshots(&names).unwrap_err().to_string();
        assert!(error.starts_with("mutate: no kernel file cats.cu: expected one of accumulate, "), "{error}");
        assert_eq!(snapshots(&names[..1]).unwrap().into_keys().collect::<Vec<_>>(), ["amax"]);
    }

    #[test]
    fn the_tally_says_what_was_killed() {
        let tally = Tally {
            killed: 17,
            known: 1,
            equal: 3,
            new: 1,
            undecided: 1,
            unreached: 5,
            problems: 2,
            seconds: 7.2,
        };
        assert_eq!(
            tally.line(),
            "17 of 20 mutants killed (85.0 %), 1 known survivors, 1 new, 1 undecided; more: 3 equal to the kernel, \
             5 in code that no case reaches; 2 problems; 7 s"
        );
        let mut sum = Tally::default();
        sum.add(&tally);
        assert_eq!(sum, tally);
    }
}
