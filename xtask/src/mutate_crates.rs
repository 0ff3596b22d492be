//! `cargo xtask mutate-crates`: plants small mistakes in fp8-recipe, fp8-dist, fp8-nn, fp8-hf and fp8-cli and sees whether their tests find them.
//!
//! cargo-mutants lists the mistakes: bodies of functions replaced by a constant, operators by others, arms of a `match` deleted.
//! A seed draws some of each crate. They are built and tested one at a time in a copy of the workspace, with the suites of
//! [`suites::CRATES`]; the first failing test kills a mutant, as does running too long. Survivors are listed in
//! `tests/mutants.txt` of their crate with their reasons; one that is not listed fails the task, as does a line without a mutant.
//! So do fewer than 90 % killed, listed or not, of those that compile.
//!
//! Results are kept: a run that was stopped goes on, and after a change only those are run again that the change may affect.

mod copied;
mod mutant;
mod results;
mod suites;
mod trial;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use crate::mutants::{Outcome, Survivors, Tally};
use crate::workspace::Result;
use copied::Copied;
use mutant::Mutant;
use results::{Results, Verdict};
use suites::{CRATES, Suite};
use trial::Trial;

/// In percent of the mutants that compile.
const BAR: usize = 90;

#[derive(clap::Args)]
pub(crate) struct MutateCrates {
    /// Seed of the sample
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Runs only mutants of this crate: fp8-recipe, fp8-dist, fp8-nn, fp8-hf or fp8-cli
    #[arg(long)]
    package: Option<String>,
    /// Size of the sample for each crate
    #[arg(long, default_value_t = 50)]
    count: usize,
    /// Also runs mutants whose results are known
    #[arg(long)]
    fresh: bool,
    /// Prints the mutants of the sample instead of running them
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(options: &MutateCrates) -> Result<ExitCode> {
    let asked = |name: &str| options.package.as_deref().is_none_or(|package| package == name);
    if !CRATES.iter().any(|(package, _)| asked(package)) {
        let known = CRATES.map(|(package, _)| package).join(", ");
        let package = options.package.as_deref().unwrap_or_default();
        return Err(format!("mutate-crates: no package {package}: expected one of {known}").into());
    }
    let copy = Copied::new()?;
    let mut is_good = true;
    for (package, suites) in CRATES.into_iter().filter(|(package, _)| asked(package)) {
        let start = Instant::now();
        let tally = check(&copy, package, suites, options)?;
        if !options.list {
            println!("{package}: {}; {:.0} s", tally.line(), start.elapsed().as_secs_f64());
            if !is_enough(&tally) {
                println!("{package}: at least {BAR} % must be killed");
            }
            is_good &= is_passed(&tally);
        }
    }
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the draw of one crate.
fn check(
    copy: &Copied,
    package: &'static str,
    suites: &'static [Suite],
    options: &MutateCrates,
) -> Result<Tally> {
    let survivors = Survivors::read(&list(package))?;
    let all = mutant::list(copy, package)?;
    let mut tally = Tally::default();
    survivors.expect_all_in(&all.iter().map(Mutant::to_string).collect::<Vec<_>>(), &mut tally);
    let count = all.len();
    let drawn = mutant::draw(all, options.count, options.seed);
    if options.list {
        drawn.iter().for_each(|mutant| println!("{package}: {mutant}"));
        return Ok(tally);
    }
    println!("{package}: {} of {count} mutants in the sample of seed {}", drawn.len(), options.seed);
    let verdicts = verdicts(copy, package, suites, &drawn, options.fresh)?;
    for mutant in &drawn {
        let verdict = verdicts.get(&mutant.id());
        let verdict = verdict.ok_or_else(|| format!("{package}: no verdict on {mutant}"))?;
        let place = format!("{}:{}", mutant.file, mutant.line);
        tally.count(&mutant.to_string(), &place, verdict.into(), &survivors);
    }
    Ok(tally)
}

/// Returns the verdict on each mutant, by its id. The mutants that survive a suite are left to the next one.
fn verdicts(
    copy: &Copied,
    package: &'static str,
    suites: &'static [Suite],
    drawn: &[Mutant],
    is_fresh: bool,
) -> Result<BTreeMap<String, Verdict>> {
    let mut tests: Vec<PathBuf> =
        suites.iter().map(|suite| [suite.package, "tests"].iter().collect()).collect();
    tests.dedup();
    let mut results = Results::read(copy, package, tests, is_fresh)?;
    let mut verdicts = BTreeMap::new();
    let mut open = Vec::new();
    for mutant in drawn {
        match results.get(&mutant.id())? {
            Some(verdict) => drop(verdicts.insert(mutant.id(), verdict)),
            None => open.push(mutant),
        }
    }
    println!("{} results are known, {} mutants to run", verdicts.len(), open.len());
    for (index, suite) in suites.iter().enumerate() {
        if open.is_empty() {
            break;
        }
        let trial = Trial::new(copy, suite)?;
        let is_last = index + 1 == suites.len();
        let mut left = Vec::new();
        for mutant in open {
            let start = Instant::now();
            let verdict = trial.verdict(mutant)?;
            println!(
                "{:4.0} s  {}  {mutant}",
                start.elapsed().as_secs_f64(),
                verdict.remark(&suite.targets.join(", "))
            );
            if verdict == Verdict::Survived && !is_last {
                left.push(mutant);
                continue;
            }
            results.set(mutant.id(), verdict.clone())?;
            verdicts.insert(mutant.id(), verdict);
        }
        open = left;
    }
    Ok(verdicts)
}

/// The list of a crate's survivors.
fn list(package: &str) -> String {
    format!("{package}/tests/mutants.txt")
}

/// Whether enough of the mutants are killed, and nothing else is wrong.
fn is_passed(tally: &Tally) -> bool {
    tally.problems == 0 && is_enough(tally)
}

/// Whether enough of the mutants that compile are killed.
fn is_enough(tally: &Tally) -> bool {
    tally.killed * 100 >= tally.viable() * BAR
}

impl From<&Verdict> for Outcome {
    fn from(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Unviable => Self::Unviable,
            Verdict::Killed { .. } | Verdict::Stopped { .. } => Self::Killed,
            Verdict::Survived => Self::Survived,
        }
    }
}

impl Verdict {
    fn remark(&self, programs: &str) -> String {
        match self {
            Self::Unviable => "does not compile".to_owned(),
            Self::Killed { test, .. } => format!("killed by {test}"),
            Self::Stopped { program } => format!("stopped in {program}"),
            Self::Survived => format!("survives {programs}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::workspace::root;

    #[test]
    fn problems_and_fewer_than_the_bar_fail() {
        let is_good = |killed, listed| is_passed(&Tally { killed, listed, ..Tally::default() });
        assert!(is_good(45, 5) && is_good(0, 0) && !is_good(44, 5));
        assert!(!is_passed(&Tally { killed: 50, problems: 1, ..Tally::default() }));
    }

    #[test]
    fn lists_are_spelled_right_and_name_lines_and_functions_that_exist() {
        for (package, _) in CRATES {
            let list = list(package);
            for key in Survivors::read(&list).unwrap().mutants() {
                let (file, rest) = key.split_once(": ").unwrap();
                let source = fs::read_to_string(root().join(package).join("src").join(file)).unwrap();
                let is_there = match (rest.split_once('«'), rest.split_once('»')) {
                    (Some((before, marked)), Some((_, after))) => {
                        let (old, _) = marked.split_once('→').unwrap();
                        let line = format!("{before}{old}{after}");
                        source.lines().any(|text| text.trim() == line)
                    }
                    _ => !rest.is_empty(),
                };
                assert!(is_there, "{list}: no such line any more: {key}");
            }
        }
    }
}
