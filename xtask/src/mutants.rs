//! The parts that `mutate`, `mutate-codec` and `mutate-crates` have in common: the draw of a sample, the list of survivors with
//! their reasons, trials of a changed file, and the tally.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::process::watch;
use crate::workspace::{Result, root};

/// Between a mutant and its reason in a list of survivors.
const REASON: &str = " // ";

/// The end of the line by which the test harness reports a failed test.
const FAILED: &str = " ... FAILED";

/// Puts mutants in the order of the hashes of `key`, which contains the seed and the mutant's name. The first of them are a
/// sample: the same for the same seed, and mostly the same where a few mutants are added or removed.
pub(crate) fn shuffle<T>(mutants: &mut [T], key: impl Fn(&T) -> String) {
    mutants.sort_by_cached_key(|mutant| Sha256::digest(key(mutant)));
}

/// Returns a share in percent with one decimal. It is rounded down, so that what is below a bar does not look as if it
/// reached it.
pub(crate) fn percent(part: usize, whole: usize) -> String {
    let tenths = part * 1000 / whole.max(1);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// The survivors that are known, from a file with lines of the form `MUTANT // REASON`.
#[derive(Debug)]
pub(crate) struct Survivors {
    file: String,
    mutants: BTreeSet<String>,
}

impl Survivors {
    /// Reads the list in this file of the workspace.
    pub(crate) fn read(file: &str) -> Result<Self> {
        Self::parse(file, &fs::read_to_string(root().join(file)).map_err(|error| format!("{file}: {error}"))?)
    }

    fn parse(file: &str, list: &str) -> Result<Self> {
        let mut mutants = BTreeSet::new();
        for (number, line) in
            (1..).zip(list.lines()).filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        {
            let (mutant, reason) = line.split_once(REASON).unwrap_or((line, ""));
            if reason.trim().is_empty() {
                return Err(format!("{file}:{number}: no reason: MUTANT{REASON}REASON").into());
            }
            if !mutants.insert(mutant.to_owned()) {
                return Err(format!("{file}:{number}: listed twice").into());
            }
        }
        Ok(Self { file: file.to_owned(), mutants })
    }

    pub(crate) fn contains(&self, mutant: &str) -> bool {
        self.mutants.contains(mutant)
    }

    /// Returns the mutants on the list.
    #[cfg(test)]
    pub(crate) fn mutants(&self) -> impl Iterator<Item = &str> {
        self.mutants.iter().map(String::as_str)
    }

    /// Reports each line whose mutant is not among `all`, as a problem.
    pub(crate) fn expect_all_in(&self, all: &[String], tally: &mut Tally) {
        for line in self.mutants.iter().filter(|line| !all.contains(line)) {
            tally.problem(&format!("{}: this mutant no longer exists, remove its line: {line}", self.file));
        }
    }
}

/// The outcome of the trial of a mutant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// It does not compile.
    Unviable,
    /// A test failed, or ran for too long.
    Killed,
    Survived,
}

/// The counts of mutants by outcome.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) killed: usize,
    pub(crate) unviable: usize,
    /// Survivors on the list.
    pub(crate) listed: usize,
    /// Survivors that are not on the list.
    pub(crate) new: usize,
    /// Problems of all kinds, new survivors included.
    pub(crate) problems: usize,
}

impl Tally {
    /// Counts a mutant. `place` is its file and line, for the message about a survivor that is not on the list.
    pub(crate) fn count(&mut self, mutant: &str, place: &str, outcome: Outcome, survivors: &Survivors) {
        match outcome {
            Outcome::Unviable => self.unviable += 1,
            Outcome::Killed => self.killed += 1,
            Outcome::Survived if survivors.contains(mutant) => self.listed += 1,
            Outcome::Survived => {
                self.new += 1;
                self.problem(&format!(
                    "SURVIVED; kill it, or list it with its reason ({place}):\n{mutant}{REASON}REASON"
                ));
            }
        }
    }

    /// Prints and counts a problem.
    pub(crate) fn problem(&mut self, message: &str) {
        self.problems += 1;
        println!("{message}");
    }

    /// Returns the number of mutants that compile.
    pub(crate) fn viable(&self) -> usize {
        self.killed + self.listed + self.new
    }

    pub(crate) fn line(&self) -> String {
        let Self { killed, unviable, listed, new, problems } = self;
        let viable = self.viable();
        let share = percent(*killed, viable);
        let survived = listed + new;
        format!(
            "{killed} of {viable} mutants killed ({share}), {unviable} do not compile, {survived} survived, {listed} of them \
             listed; {problems} problems"
        )
    }
}

/// Writes `new` to a file of a copied workspace, unless it contains just that: what does not change keeps its time, and what
/// cargo built of it.
pub(crate) fn refresh(file: &Path, new: &[u8]) -> Result {
    if fs::read(file).ok().as_deref() != Some(new) {
        file.parent().map(fs::create_dir_all).transpose()?;
        fs::write(file, new)?;
    }
    Ok(())
}

/// Changes a source file while `trial` runs.
pub(crate) fn planted<T>(
    file: &Path,
    change: impl FnOnce(&str) -> Result<String>,
    trial: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let source = fs::read_to_string(file)?;
    fs::write(file, change(&source)?)?;
    let outcome = trial();
    fs::write(file, source)?;
    outcome
}

/// Runs a program of tests without a mutation and returns the time that it takes. A test that fails is an error: it would kill
/// every mutant.
pub(crate) fn expect_pass(task: &str, test: &str, command: Command, patience: Duration) -> Result<Duration> {
    let start = Instant::now();
    let finished = watch(command, patience, |_| false)?;
    if finished.succeeded() {
        return Ok(start.elapsed());
    }
    Err(format!("{task}: test {test} fails without a mutation:\n{}", finished.output).into())
}

/// Returns the first test that failed, from the output of the harness. Where a test itself prints, other text may precede its
/// name.
pub(crate) fn failed_test(output: &str) -> Option<&str> {
    let line = output.lines().find(|line| line.ends_with(FAILED))?;
    let line = line.strip_suffix(FAILED)?;
    let line = line.strip_suffix(" - should panic").unwrap_or(line);
    Some(line.rsplit("test ").next().unwrap_or(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# a comment\n\ncodec.rs: a «<→<=» b // = clamped to itself\n";

    #[test]
    fn lines_are_mutants_with_reasons() {
        let parse = |list: &str| Survivors::parse("list", list);
        assert!(parse(LIST).unwrap().contains("codec.rs: a «<→<=» b"));
        let error = |list: &str| parse(list).unwrap_err().to_string();
        assert!(error("codec.rs: a «<→<=» b\n").starts_with("list:1: no reason"));
        assert!(error(&LIST.repeat(2)).starts_with("list:6: listed twice"));
    }

    #[test]
    fn survivors_that_are_not_listed_and_lines_without_a_mutant_are_problems() {
        let (survivors, mut tally) = (Survivors::parse("list", LIST).unwrap(), Tally::default());
        let listed = "codec.rs: a «<→<=» b".to_owned();
        survivors.expect_all_in(std::slice::from_ref(&listed), &mut tally);
        tally.count(&listed, "codec.rs:1", Outcome::Survived, &survivors);
        for outcome in [Outcome::Unviable, Outcome::Killed, Outcome::Killed] {
            tally.count("codec.rs: c", "codec.rs:2", outcome, &survivors);
        }
        assert_eq!(tally, Tally { killed: 2, unviable: 1, listed: 1, new: 0, problems: 0 });
        survivors.expect_all_in(&[], &mut tally);
        tally.count("codec.rs: c", "codec.rs:2", Outcome::Survived, &survivors);
        assert_eq!((tally.new, tally.problems), (1, 2));
        assert_eq!(
            tally.line(),
            "2 of 4 mutants killed (50.0 %), 1 do not compile, 2 survived, 1 of them listed; 2 problems"
        );
    }

    #[test]
    fn a_share_is_rounded_down() {
        assert_eq!((percent(9499, 10000), percent(0, 0)), ("94.9 %".to_owned(), "0.0 %".to_owned()));
    }

    #[test]
    fn a_shuffle_is_the_seeds_and_differs_between_seeds() {
        let order = |seed: u64| {
            let mut all: Vec<usize> = (0..40).collect();
            shuffle(&mut all, |number| format!("{seed} {number}"));
            all
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn a_changed_file_is_put_back_after_a_trial_that_fails() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/a.rs");
        refresh(&file, b"fn a() {}\n").unwrap();
        let trial = || -> Result { Err(fs::read_to_string(&file)?.into()) };
        let error = planted(&file, |source| Ok(source.replace('a', "b")), trial).unwrap_err().to_string();
        assert_eq!((&*error, &*fs::read_to_string(&file).unwrap()), ("fn b() {}\n", "fn a() {}\n"));
    }

    #[test]
    fn the_first_failed_test_is_found_in_a_harness_output() {
        let output = "running 3 tests\ntest a::b ... ok\nnoise test c::d ... FAILED\ntest e ... FAILED\n";
        assert_eq!(failed_test(output), Some("c::d"));
        assert_eq!(failed_test("test a - should panic ... FAILED\n"), Some("a"));
        assert_eq!(failed_test("test a ... ok\ntest a ... FAIL"), None);
    }
}
