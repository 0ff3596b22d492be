//! `cargo xtask mutate`: plants small mistakes in the kernels' PTX and sees whether the conformance suite finds them.
//!
//! Each mutant is run by the simulated device on the cases of the operations that use the kernel. It is killed by a
//! wrong result, by a fault that the device finds, by PTX that does not load, and by running too long. The survivors
//! stand in `fp8-kernels/tests/mutants.txt` with their reasons; one that does not fails the task. A run of all mutants
//! tries those, too; a draw counts them as survivors without running them.
//!
//! The task fails, too, where fewer than 95 % of the mutants are killed, of 40 or more: among fewer one survivor would
//! decide. Those that equal the kernel and those in code that no case reaches are no part of that score; they are counted
//! beside it, with the share that there would be with them.

mod draw;
mod edits;
mod listed;
mod survivors;
mod tally;
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
use survivors::Known;
use tally::Tally;
pub(crate) use trial::Before;
use trial::{Suite, Trial, Verdict};

/// The number of mutants between two messages about progress.
const PROGRESS: usize = 100;

/// Beyond so many mutants of a file it pays to measure the cases first.
const FEW: usize = 8;

/// Seconds in which all cases of a file have their turn several times.
pub(crate) const PATIENCE: u64 = 300;

#[derive(clap::Args)]
pub(crate) struct Mutate {
    /// Runs a random sample of this many mutants that are not listed as survivors
    #[arg(long, group = "draw")]
    sample: Option<usize>,
    /// Runs a random sample of at most this many mutants per kernel file
    #[arg(long, group = "draw")]
    per_file: Option<usize>,
    /// Runs a random sample of at most this many mutants per kernel
    #[arg(long, group = "draw")]
    per_kernel: Option<usize>,
    /// Runs only mutants of this kernel file: quantize, norm, …
    #[arg(long)]
    kernel: Vec<String>,
    /// Runs only mutants of this kernel: quantize_blocks, …
    #[arg(long)]
    entry: Vec<String>,
    /// Seed of the sample; --kernel does not change which mutants of a file are in it [default: each kernel file's own text]
    #[arg(long)]
    seed: Option<u64>,
    /// Time limit for one mutant in seconds; a mutant that reaches it is undecided
    #[arg(long, default_value_t = PATIENCE)]
    patience: u64,
    /// Uses this program of the suite instead of building it
    #[arg(long)]
    program: Option<PathBuf>,
}

pub(crate) fn run(options: &Mutate) -> Result<ExitCode> {
    let program = match &options.program {
        Some(program) => fs::canonicalize(program)?,
        None => artifact::conformance(&shell()?)?,
    };
    let draw = match (options.sample, options.per_file, options.per_kernel) {
        (Some(count), _, _) => Draw::Sample(count),
        (None, Some(count), _) => Draw::PerFile(count),
        (None, None, Some(count)) => Draw::PerKernel(count),
        (None, None, None) => Draw::All,
    };
    let patience = Duration::from_secs(options.patience);
    let (entries, before) = (options.entry.clone(), Before::default());
    let plan = Plan { draw, seed: options.seed, patience, entries, before };
    println!("{}", check(&program, &plan, &options.kernel)?.verdict()?);
    Ok(ExitCode::SUCCESS)
}

/// The choice of mutants, and how long each of them may run.
pub(crate) struct Plan {
    pub(crate) draw: Draw,
    /// `None`: the text of each kernel file, so that a change to one draws no other mutants of the rest.
    pub(crate) seed: Option<u64>,
    pub(crate) patience: Duration,
    /// Names of kernels; empty: all.
    pub(crate) entries: Vec<String>,
    pub(crate) before: Before,
}

/// Runs the drawn mutants of these kernel files, or of all.
pub(crate) fn check(program: &Path, plan: &Plan, files: &[String]) -> Result<Tally> {
    let known = survivors::read()?;
    let snapshots = snapshots(files)?;
    let mut all: Vec<Mutant> = snapshots.iter().flat_map(|(file, ptx)| edits::mutants(file, ptx)).collect();
    let mut total = Tally::default();
    let is_read = |file: &str| files.is_empty() || snapshots.contains_key(file);
    for problem in wrong_lines(&known, &all, is_read) {
        total.problems += 1;
        println!("{problem}");
    }
    keep_entries(&mut all, &plan.entries)?;
    let seeds: BTreeMap<&str, u64> =
        snapshots.iter().map(|(file, ptx)| (&**file, plan.seed.unwrap_or_else(|| draw::seed(ptx)))).collect();
    let jobs = plan.draw.choose(
        &all,
        |file| seeds.get(file).copied().unwrap_or_default(),
        |mutant| listed::reason_for(mutant, &known).is_some(),
    );
    let listed = jobs.iter().filter(|mutant| listed::reason_for(mutant, &known).is_some()).count();
    println!(
        "{} mutants in {} kernel files; {}",
        all.len(),
        snapshots.len(),
        match plan.draw {
            Draw::All => "all are run".to_owned(),
            draw => format!(
                "drawn were {} to run and {listed} that are listed: cargo xtask mutate{}",
                jobs.len() - listed,
                draw.options(plan.seed)
            ),
        }
    );
    let suite = Suite::list(program, &plan.before)?;
    // Few mutants of many files share the processors; many of one file have them for themselves.
    let mut few = Vec::new();
    for (file, ptx) in &snapshots {
        let jobs: Vec<&Mutant> = jobs.iter().copied().filter(|mutant| mutant.file == *file).collect();
        let is_run = |mutant: &&&Mutant| {
            !plan.draw.believes_the_list() || listed::reason_for(mutant, &known).is_none()
        };
        let is_measured = jobs.iter().filter(is_run).count() > FEW;
        if jobs.is_empty() {
            continue;
        }
        let of_file = all.iter().filter(|mutant| mutant.file == *file);
        let is_listed = |mutant: &&Mutant| known.contains_key(&listed::key_of_unreached_by(mutant));
        let unreached = of_file.filter(is_listed).map(|mutant| mutant.kernel.clone()).collect();
        let trial = Trial::new(&suite, file, ptx, unreached, is_measured)?;
        if is_measured {
            let tally = try_out(&[(trial, jobs)], plan, &known)?;
            println!("{file:14} {}", tally.line());
            total.add(&tally);
        } else {
            few.push((trial, jobs));
        }
    }
    total.add(&try_out(&few, plan, &known)?);
    Ok(total)
}

/// Keeps the mutants of these kernels, or of all; a kernel without a mutant is an error.
fn keep_entries(all: &mut Vec<Mutant>, entries: &[String]) -> Result<()> {
    if let Some(name) = entries.iter().find(|name| all.iter().all(|mutant| mutant.kernel != **name)) {
        let known: BTreeSet<&str> = all.iter().map(|mutant| &*mutant.kernel).collect();
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        return Err(format!("mutate: no kernel {name} in these files: expected one of {known}").into());
    }
    all.retain(|mutant| entries.is_empty() || entries.contains(&mutant.kernel));
    Ok(())
}

/// Returns a message for each wrong line of the list that is about a file that was read: its mutant no longer exists, it
/// states another number of mutants than there are, or a line for all of them lists the mutant as well.
fn wrong_lines(known: &Known, all: &[Mutant], is_read: impl Fn(&str) -> bool) -> Vec<String> {
    let mut counts = BTreeMap::<String, usize>::new();
    for mutant in all {
        for key in [mutant.key(), mutant.key_of_all(), listed::key_of_unreached_by(mutant)] {
            *counts.entry(key).or_default() += 1;
        }
    }
    let both: BTreeSet<String> = all
        .iter()
        .filter(|mutant| known.contains_key(&mutant.key()) && known.contains_key(&mutant.key_of_all()))
        .map(Mutant::key)
        .collect();
    let mut wrong = Vec::new();
    for (key, reason) in known.iter().filter(|(key, _)| is_read(key.split(' ').next().unwrap_or_default())) {
        let number = reason.number;
        match (counts.get(key), reason.count) {
            (None, _) => wrong.push(format!("mutants.txt:{number}: this mutant no longer exists, remove it: {key}")),
            (Some(found), Some(count)) if *found != count => wrong.push(format!(
                "mutants.txt:{number}: x{count}, but there are {found} now: if its reason holds for each of them, \
                 write x{found}: {key}"
            )),
            (Some(_), _) if both.contains(key) => {
                wrong.push(format!("mutants.txt:{number}: a line for all of them lists it as well: {key}"));
            }
            (Some(_), _) => {}
        }
    }
    wrong
}

/// Runs the drawn mutants of kernel files, in turns.
fn try_out(trials: &[(Trial, Vec<&Mutant>)], plan: &Plan, known: &Known) -> Result<Tally> {
    let tally = Mutex::new(Tally::default());
    let done = AtomicUsize::new(0);
    let start = Instant::now();
    let mut jobs: Vec<(&Trial, &Mutant)> = Vec::new();
    for (trial, mutants) in trials {
        jobs.extend(mutants.iter().map(|mutant| (trial, *mutant)));
    }
    let errors = process::each(&jobs, process::cores(), |_, (trial, mutant)| {
        let verdict = if plan.draw.believes_the_list() && listed::reason_for(mutant, known).is_some() {
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
    for problem in trials.iter().flat_map(|(trial, _)| trial.problems()) {
        tally.problems += 1;
        println!("{problem}");
    }
    tally.seconds = start.elapsed().as_secs_f64();
    Ok(tally)
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
    fn only_mutants_of_the_named_kernels_are_kept() {
        let kernel = |name: &str| format!(".visible .entry {name}(\n)\n{{\n\tbar.sync 0;\n}}\n");
        let mut all = edits::mutants("f", &(kernel("k") + &kernel("l")));
        keep_entries(&mut all, &[]).unwrap();
        assert_eq!(all.len(), 2);
        keep_entries(&mut all, &["l".to_owned()]).unwrap();
        assert_eq!(all.iter().map(|mutant| &*mutant.kernel).collect::<Vec<_>>(), ["l"]);
        assert_eq!(
            keep_entries(&mut all, &["k".to_owned()]).unwrap_err().to_string(),
            "mutate: no kernel k in these files: expected one of l"
        );
    }

    #[test]
    fn a_line_is_wrong_where_its_mutants_are_gone_or_others_came() {
        let body = "\tbar.sync 0;\n\tbar.sync 0;\n\tadd.s32 %r1, %r2, 3;\n";
        let all = edits::mutants("f", &format!(".visible .entry k(\n)\n{{\n{body}}}\n"));
        let wrong = |list: &str| wrong_lines(&survivors::parse(list).unwrap(), &all, |file| file == "f");
        assert_eq!(
            wrong(
                "f k delete x2 `bar.sync 0` so\nf k off-by-one 1 `add.s32 %r, %r, 3` so\nf k unreached so\n"
            ),
            [""; 0]
        );
        assert_eq!(wrong("g k delete 1 `bar.sync 0` of a file that is not read\n"), [""; 0]);
        assert_eq!(
            wrong("f k delete 3 `bar.sync 0` so\n"),
            ["mutants.txt:1: this mutant no longer exists, remove it: f k delete 3 `bar.sync 0`"]
        );
        assert_eq!(wrong("f l delete x2 `bar.sync 0` so\nf l unreached so\n").len(), 2);
        assert_eq!(
            wrong("\nf k delete x1 `bar.sync 0` so\n"),
            ["mutants.txt:2: x1, but there are 2 now: if its reason holds for each of them, write x2: \
              f k delete x `bar.sync 0`"]
        );
        assert_eq!(
            wrong("f k delete x2 `bar.sync 0` so\nf k delete 2 `bar.sync 0` so\n"),
            ["mutants.txt:2: a line for all of them lists it as well: f k delete 2 `bar.sync 0`"]
        );
    }

    #[test]
    fn the_list_is_spelled_right_and_fits_the_snapshots() {
        let all: Vec<Mutant> =
            snapshots(&[]).unwrap().iter().flat_map(|(file, ptx)| edits::mutants(file, ptx)).collect();
        assert_eq!(wrong_lines(&survivors::read().unwrap(), &all, |_| true), [""; 0]);
    }
}
