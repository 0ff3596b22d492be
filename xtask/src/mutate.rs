//! `cargo xtask mutate`: plants small mistakes in the kernels' PTX and sees whether the conformance suite finds them.
//!
//! Each mutant is run by the simulated device on the cases of the operations that use the kernel. It is killed by a
//! wrong result, by a fault that the device finds, by PTX that does not load, and by running too long. The survivors
//! stand in `fp8-kernels/tests/mutants.txt` with their reasons; one that does not fails the task.

mod draw;
mod edits;
mod survivors;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use std::{fs, sync::atomic};

use crate::workspace::{Result, shell};
use crate::{artifact, process, ptx};
pub(crate) use draw::Draw;
use edits::Mutant;
use trial::{Trial, Verdict};

/// How many mutants apart the progress is told.
const PROGRESS: usize = 100;

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
    let tally = check(&program, draw, &options.kernel, options.seed)?;
    println!("{}", tally.line());
    Ok(if tally.problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What came of the mutants that were run.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    killed: usize,
    /// Survivors on the list.
    known: usize,
    new: usize,
    /// Survivors where no case gets; they say nothing about the cases.
    unreached: usize,
    /// New survivors, those unreached in kernels that are not on the list, lines of the list without a mutant, cases that fail without a mutation.
    pub(crate) problems: usize,
}

impl Tally {
    pub(crate) fn line(&self) -> String {
        let Self { killed, known, new, unreached, problems } = self;
        let run = killed + known + new;
        let percent = 100.0 * *killed as f64 / run.max(1) as f64;
        format!(
            "{killed} of {run} mutants killed ({percent:.1} %), {known} known survivors, {new} new; {unreached} more in code \
             that no case reaches; {problems} problems"
        )
    }
}

/// Runs the drawn mutants of these kernel files, or of all.
pub(crate) fn check(program: &Path, draw: Draw, files: &[String], seed: u64) -> Result<Tally> {
    let known = survivors::read()?;
    let snapshots = snapshots(files)?;
    let all: Vec<Mutant> = snapshots.iter().flat_map(|(file, ptx)| edits::mutants(file, ptx)).collect();
    let mut tally = Tally::default();
    let keys: BTreeSet<String> = all.iter().flat_map(|mutant| [mutant.key(), unreached(mutant)]).collect();
    for key in known.keys().filter(|key| !keys.contains(*key)) {
        let file = key.split(' ').next().unwrap_or_default();
        if files.is_empty() || snapshots.contains_key(file) {
            tally.problems += 1;
            println!("no such mutant any more, remove its line: {key}");
        }
    }
    let jobs = draw.choose(&all, seed, |mutant| known.contains_key(&mutant.key()));
    println!("{} mutants in {} kernel files; {}", all.len(), snapshots.len(), draw.line(jobs.len(), seed));

    let mut trials = BTreeMap::new();
    for (file, ptx) in &snapshots {
        if jobs.iter().any(|mutant| mutant.file == *file) {
            trials.insert(file.as_str(), Trial::new(program, file, ptx)?);
        }
    }
    let (start, done) = (Instant::now(), atomic::AtomicUsize::new(0));
    let verdicts = process::each(&jobs, process::cores(), |_, mutant| {
        let trial = &trials[mutant.file.as_str()];
        let verdict = trial.verdict(mutant);
        let count = done.fetch_add(1, atomic::Ordering::Relaxed) + 1;
        if count.is_multiple_of(PROGRESS) {
            println!("{count} of {} mutants run, {:.0} s", jobs.len(), start.elapsed().as_secs_f64());
        }
        let is_known = known.contains_key(&mutant.key());
        match verdict {
            Ok(Verdict::Survived) if !is_known => {
                println!("SURVIVED, now `{}`; kill it, or list it with its reason:", mutant.replacement());
                println!("{} REASON", mutant.key());
            }
            Ok(Verdict::Unreached) if !is_known && !known.contains_key(&unreached(mutant)) => {
                println!("UNREACHED by any case; add one, or list it with its reason: {}", mutant.key());
            }
            _ => {}
        }
        verdict.map_err(|error| error.to_string())
    });
    for (mutant, verdict) in jobs.iter().zip(verdicts) {
        match (verdict?, known.contains_key(&mutant.key())) {
            (Verdict::Killed, false) => tally.killed += 1,
            (Verdict::Killed, true) => {
                tally.killed += 1;
                println!("killed now, its line may go: {}", mutant.key());
            }
            (Verdict::Survived | Verdict::Unreached, true) => tally.known += 1,
            (Verdict::Survived, false) => {
                tally.new += 1;
                tally.problems += 1;
            }
            (Verdict::Unreached, false) => {
                tally.unreached += 1;
                tally.problems += usize::from(!known.contains_key(&unreached(mutant)));
            }
        }
    }
    for problem in trials.values().flat_map(Trial::problems) {
        tally.problems += 1;
        println!("{problem}");
    }
    Ok(tally)
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
        let tally = Tally { killed: 18, known: 1, new: 1, unreached: 5, problems: 1 };
        assert_eq!(
            tally.line(),
            "18 of 20 mutants killed (90.0 %), 1 known survivors, 1 new; 5 more in code that no case reaches; 1 problems"
        );
    }
}
