//! One kernel file on trial: its cases, run on mutated PTX until one fails.
//!
//! A process of the suite runs many cases, one after the other: those first that found mistakes in the same kernel, then
//! quick ones, of all that launch the kernel. What cases take and launch is known where the whole suite ran before. Else they
//! are run without a mutation first; for a few mutants that would take longer than the mutants, and all are taken in the
//! suite's order. What fails without a mutation finds nothing, either way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::conformance::{self, Backend, Job, Outcome, Watched};
use crate::mutate::edits::Mutant;
use crate::process;
use crate::workspace::Result;

/// A mutant loops, or nearly so, where its case takes this much longer: seconds, and times the usual.
const LONGER: (f64, f64) = (20.0, 10.0);
/// The usual seconds of a case that was not measured: few take longer.
const USUAL: f64 = 4.0;
/// No case takes so long.
const FOR_EVER: Duration = Duration::from_secs(30 * 60);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    Killed,
    Survived,
    /// It survived where no case gets.
    Unreached,
    /// Patience was at its end before the cases were.
    Undecided,
}

/// A run of the whole suite without a mutation.
#[derive(Default)]
pub(crate) struct Before {
    /// The seed of the simulated device.
    pub(crate) seed: u64,
    /// Times and kernels of the cases that passed, by name.
    pub(crate) watched: BTreeMap<String, Watched>,
}

/// The suite's program and what is known of it.
pub(super) struct Suite<'a> {
    program: PathBuf,
    /// An empty one where there was none.
    before: &'a Before,
    /// The names of all cases on the simulated device, without cuDNN and with it.
    names: Vec<String>,
    /// Whether a case passes without a mutation, as far as that was tried.
    sound: Mutex<HashMap<String, bool>>,
}

impl<'a> Suite<'a> {
    pub(super) fn list(program: &Path, before: &'a Before) -> Result<Self> {
        let mut names = Vec::new();
        for backend in [Backend::CudaSim, Backend::CudaSimDnn] {
            let is_its = |name: &String| parts(name).is_some_and(|(runs_on, _)| runs_on == backend.name());
            names.extend(conformance::names(program, backend, None)?.into_iter().filter(is_its));
        }
        Ok(Self { program: program.to_path_buf(), before, names, sound: Mutex::default() })
    }

    /// Those of the file's own operation, and of those that are called after it: `gemm_fp8` pads by kernels of `gemm`.
    fn cases(&self, file: &str) -> Vec<&str> {
        let backend = backend(file).name();
        let operations: BTreeSet<&str> =
            self.names.iter().filter_map(|name| parts(name)).map(|(_, operation)| operation).collect();
        let operation = operation(file, &operations);
        let is_its = |other: &str| {
            let rest = operation.and_then(|operation| other.strip_prefix(operation));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        let is_user =
            |name: &&str| parts(name).is_some_and(|(runs_on, other)| runs_on == backend && is_its(other));
        self.names.iter().map(String::as_str).filter(is_user).collect()
    }
}

/// A kernel file with its cases.
pub(super) struct Trial<'a> {
    suite: &'a Suite<'a>,
    file: String,
    ptx: String,
    /// Those that pass without a mutation, as far as that is known.
    cases: Mutex<Vec<Case>>,
    /// Kernels that no case need launch.
    unreached: BTreeSet<String>,
    problems: Mutex<Vec<String>>,
}

#[derive(Clone)]
struct Case {
    name: String,
    /// Seconds without a mutation.
    length: f64,
    /// Kernels that it launches, if it was measured.
    kernels: Option<BTreeSet<String>>,
    /// Mutants that it killed, by kernel.
    kills: HashMap<String, u32>,
}

impl Case {
    fn new(name: &str, watched: Option<&Watched>) -> Self {
        Self {
            name: name.to_owned(),
            length: watched.map_or(USUAL, |watched| watched.seconds),
            kernels: watched.map(|watched| watched.kernels.clone()),
            kills: HashMap::new(),
        }
    }

    fn may_launch(&self, kernel: &str) -> bool {
        self.kernels.as_ref().is_none_or(|kernels| kernels.contains(kernel))
    }

    /// Seconds until it kills, so to speak.
    fn cost(&self, kernel: &str) -> f64 {
        let all: u32 = self.kills.values().sum();
        let here = self.kills.get(kernel).copied().unwrap_or(0);
        self.length / (1.0 + f64::from(all) + 20.0 * f64::from(here))
    }
}

/// The outcome of running a list of cases in order.
#[derive(Debug, PartialEq)]
enum End {
    Passed,
    /// This case failed; `None` if it is not known which one did.
    Failed(Option<String>),
    /// Stopped, as patience was at its end.
    Late,
}

/// The backend and the operation in the name of a case.
fn parts(name: &str) -> Option<(&str, &str)> {
    let mut parts = name.split("::");
    Some((parts.next()?, parts.next()?))
}

/// The backend whose cases launch the kernels of a file: some are launched with cuDNN alone.
fn backend(file: &str) -> Backend {
    if file == "attention_library" { Backend::CudaSimDnn } else { Backend::CudaSim }
}

/// The operation whose kernels a file holds: the one of its name, or the longest that its name begins with.
fn operation<'a>(file: &str, operations: &BTreeSet<&'a str>) -> Option<&'a str> {
    let is_its = |operation: &&&str| {
        file.strip_prefix(**operation).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    operations.iter().filter(is_its).max_by_key(|operation| operation.len()).copied()
}

impl<'a> Trial<'a> {
    /// `is_measured`: whether the cases are run without a mutation first, unless they were before.
    pub(super) fn new(
        suite: &'a Suite<'a>,
        file: &str,
        ptx: &str,
        unreached: BTreeSet<String>,
        is_measured: bool,
    ) -> Result<Self> {
        let names = suite.cases(file);
        if names.is_empty() {
            return Err(format!("mutate: {file}: the suite has no cases of it").into());
        }
        let trial = Self {
            suite,
            file: file.to_owned(),
            ptx: ptx.to_owned(),
            cases: Mutex::new(names.iter().map(|name| Case::new(name, None)).collect()),
            unreached,
            problems: Mutex::default(),
        };
        if !suite.before.watched.is_empty() {
            trial.keep(&names, &suite.before.watched);
        } else if is_measured {
            trial.keep(&names, &trial.measure(&names)?);
        }
        Ok(trial)
    }

    /// Runs the cases without a mutation and returns what those took that passed.
    fn measure(&self, names: &[&str]) -> Result<BTreeMap<String, Watched>> {
        let folder = self.folder(&self.ptx)?;
        let finished = process::watch(self.command(folder.path(), names)?, FOR_EVER, |_| false)?;
        let mut outcome = Outcome::read(&finished.output, finished.succeeded());
        if let Some((name, reason)) = outcome.ignored.first() {
            return Err(format!("mutate: {name} does not run: {reason}").into());
        }
        if outcome.passed.len() + outcome.failed.len() != names.len() {
            return Err(format!("mutate: {} without a mutation: {}", self.file, outcome.line()).into());
        }
        if let (true, Some(why)) = (outcome.failed.is_empty(), outcome.broken) {
            lock(&self.problems).push(format!("{} without a mutation: {why}", self.file));
        }
        outcome.watched.retain(|name, _| outcome.passed.contains(name));
        Ok(outcome.watched)
    }

    /// Keeps the cases that passed without a mutation.
    fn keep(&self, names: &[&str], passed: &BTreeMap<String, Watched>) {
        let mut kept = Vec::new();
        for name in names {
            match passed.get(*name) {
                Some(watched) => kept.push(Case::new(name, Some(watched))),
                None => lock(&self.problems).push(passed_over(name)),
            }
        }
        let entries = self.ptx.lines().filter_map(|line| line.split_once(".entry ")?.1.split_once('('));
        let is_missed = |kernel: &str| {
            !self.unreached.contains(kernel) && !kept.iter().any(|case| case.may_launch(kernel))
        };
        for (kernel, _) in entries.filter(|(kernel, _)| is_missed(kernel)) {
            lock(&self.problems).push(format!("{} {kernel}: no case launches this kernel", self.file));
        }
        *lock(&self.cases) = kept;
    }

    /// Returns the problems that make verdicts doubtful.
    pub(super) fn problems(&self) -> Vec<String> {
        lock(&self.problems).clone()
    }

    /// Runs the cases on a mutant and returns the verdict.
    pub(super) fn verdict(&self, mutant: &Mutant, patience: Duration) -> Result<Verdict> {
        Ok(match self.end(&mutant.kernel, &mutant.apply(&self.ptx), patience)? {
            End::Failed(_) => Verdict::Killed,
            End::Late => Verdict::Undecided,
            End::Passed => match self.end(&mutant.kernel, &mutant.trapped(&self.ptx), FOR_EVER)? {
                End::Passed => Verdict::Unreached,
                End::Failed(_) | End::Late => Verdict::Survived,
            },
        })
    }

    /// Runs the cases that may launch `kernel` on `ptx`, in which that kernel is mutated, and returns the outcome.
    fn end(&self, kernel: &str, ptx: &str, patience: Duration) -> Result<End> {
        let folder = self.folder(ptx)?;
        loop {
            let mut cases = lock(&self.cases).clone();
            cases.retain(|case| case.may_launch(kernel));
            cases.sort_by(|a, b| a.cost(kernel).total_cmp(&b.cost(kernel)));
            let end = self.run(folder.path(), &cases, patience)?;
            if let End::Failed(Some(name)) = &end {
                let is_measured = cases.iter().any(|case| case.name == *name && case.kernels.is_some());
                if !is_measured && !self.is_sound(name)? {
                    self.pass_over(name);
                    continue;
                }
                self.credit(kernel, name);
            }
            return Ok(end);
        }
    }

    /// Whether a case passes without a mutation.
    fn is_sound(&self, name: &str) -> Result<bool> {
        if let Some(is_sound) = lock(&self.suite.sound).get(name) {
            return Ok(*is_sound);
        }
        let folder = self.folder(&self.ptx)?;
        let finished = process::watch(self.command(folder.path(), &[name])?, FOR_EVER, |_| false)?;
        let is_sound = Outcome::read(&finished.output, finished.succeeded()).is_good();
        lock(&self.suite.sound).insert(name.to_owned(), is_sound);
        Ok(is_sound)
    }

    /// Leaves out a case that finds nothing.
    fn pass_over(&self, name: &str) {
        let mut cases = lock(&self.cases);
        let before = cases.len();
        cases.retain(|case| case.name != *name);
        if cases.len() < before {
            lock(&self.problems).push(passed_over(name));
        }
    }

    /// Notes who found the mistake.
    fn credit(&self, kernel: &str, name: &str) {
        if let Some(case) = lock(&self.cases).iter_mut().find(|case| case.name == *name) {
            *case.kills.entry(kernel.to_owned()).or_default() += 1;
        }
    }

    /// Runs cases, in their order, to the first that fails.
    fn run(&self, folder: &Path, cases: &[Case], patience: Duration) -> Result<End> {
        if cases.is_empty() {
            return Ok(End::Passed);
        }
        let names: Vec<&str> = cases.iter().map(|case| &*case.name).collect();
        let (start, mut count, mut last) = (Instant::now(), 0, Instant::now());
        let (mut is_late, mut is_endless) = (false, false);
        let finished = process::follow(self.command(folder, &names)?, |output| {
            let ended = output.lines().filter(|line| is_end(line)).count();
            if ended > count {
                (count, last) = (ended, Instant::now());
            }
            is_late = start.elapsed() > patience;
            let usual = cases.get(count).map_or(0.0, |case| case.length);
            is_endless = last.elapsed().as_secs_f64() > LONGER.0 + LONGER.1 * usual;
            is_late || is_endless || output.contains(FAILED)
        })?;
        let outcome = Outcome::read(&finished.output, finished.succeeded());
        if let Some((name, reason)) = outcome.ignored.first() {
            return Err(format!("mutate: {name} does not run: {reason}").into());
        }
        let passed = outcome.passed.len();
        Ok(if let Some(name) = outcome.failed.into_iter().next() {
            End::Failed(Some(name))
        } else if finished.status.is_none() && !is_endless {
            End::Late
        } else if outcome.broken.is_some() {
            End::Failed(names.get(passed).map(|name| (*name).to_owned()))
        } else if passed < names.len() {
            return Err(format!("mutate: {} did not run: {}", names[passed], finished.output).into());
        } else {
            End::Passed
        })
    }

    /// A new folder with the file's snapshot.
    fn folder(&self, ptx: &str) -> Result<tempfile::TempDir> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join(format!("{}.ptx", self.file)), ptx)?;
        Ok(folder)
    }

    /// These cases of the suite, in this order, on the snapshots in the folder.
    fn command(&self, folder: &Path, names: &[&str]) -> Result<std::process::Command> {
        let list = folder.join("cases");
        fs::write(&list, names.join("\n"))?;
        let mut command =
            Job { backend: backend(&self.file), seed: Some(self.suite.before.seed), skipped: Vec::new() }
                .command(&self.suite.program);
        command.env("FP8_SIM_SNAPSHOTS", folder).env("FP8_CONFORMANCE_CASES", list);
        command.env("RUST_BACKTRACE", "0").arg("--test-threads=1");
        Ok(command)
    }
}

fn passed_over(name: &str) -> String {
    format!("{name} fails without a mutation: it is passed over")
}

/// The end of the line of a failed case.
const FAILED: &str = " ... FAILED\n";

/// Whether a case ended with this line.
fn is_end(line: &str) -> bool {
    line.starts_with("test ") && (line.ends_with(" ... ok") || line.ends_with(" ... FAILED"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_operation_that_its_name_begins_with() {
        let operations = BTreeSet::from(["attention", "gemm", "gemm_fp8", "norm"]);
        let of = |file| operation(file, &operations);
        assert_eq!(of("attention"), Some("attention"));
        assert_eq!(of("attention_backward_kv"), Some("attention"));
        assert_eq!((of("gemm_fp8_pad"), of("gemm_pad")), (Some("gemm_fp8"), Some("gemm")));
        assert_eq!((of("grad_norm"), of("normal")), (None, None));
    }

    #[test]
    fn kernels_around_cudnn_are_tried_by_the_cases_that_run_with_it() {
        let names = ["cuda-sim::attention::bits", "cuda-sim-dnn::attention::bits", "cuda-sim::gemm::bits"];
        let names = names.map(str::to_owned).to_vec();
        let before = Before::default();
        let suite = Suite { program: PathBuf::new(), before: &before, names, sound: Mutex::default() };
        assert_eq!(suite.cases("attention_library"), ["cuda-sim-dnn::attention::bits"]);
        assert_eq!(suite.cases("attention_plain"), ["cuda-sim::attention::bits"]);
        assert_eq!(suite.cases("gemm"), ["cuda-sim::gemm::bits"]);
    }

    /// A suite of three cases: `quick` fails where the PTX has a `bug`, `slow` where it has a `deep` one, and
    /// `unsound` always.
    #[cfg(unix)]
    const SUITE: &str = r#"#!/bin/sh
case "$1" in --list) for name in quick slow unsound; do echo "cuda-sim::f::$name: test"; done; exit 0;; esac
status=0
say() { echo "test cuda-sim::f::$1 ... $2"; if [ "$2" = FAILED ]; then status=101; fi; }
has() { grep -q "$1" "$FP8_SIM_SNAPSHOTS/f.ptx"; }
verdict() {
  case "$1" in
    quick) if has bug; then say quick FAILED; else say quick ok; fi;;
    slow) sleep 0.3; if has crash; then exit 1; fi; if has endless; then exec sleep 60; fi
      if has deep; then say slow FAILED; else say slow ok; fi;;
    unsound) say unsound FAILED;;
  esac
}
for name in $(cat "$FP8_CONFORMANCE_CASES"); do verdict "${name##*::}"; done
echo "test result: done"
for name in $(cat "$FP8_CONFORMANCE_CASES"); do case $name in *slow) s=0.3;; *) s=0.001;; esac; echo "watched $name $s j k"; done
if has leak; then echo "simulator: 0 reports, 1 leaks"; exit 1; fi
echo "simulator: 0 reports, 0 leaks"
exit $status
"#;

    /// The suite's program, in the folder.
    #[cfg(unix)]
    fn suite<'a>(folder: &Path, before: &'a Before) -> Suite<'a> {
        use std::os::unix::fs::PermissionsExt as _;
        let program = folder.join("suite");
        fs::write(&program, SUITE).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Suite::list(&program, before).unwrap()
    }

    #[cfg(unix)]
    #[test]
    fn cases_that_are_not_measured_are_tried_without_the_mutation_where_they_fail() {
        let folder = tempfile::tempdir().unwrap();
        let before = Before::default();
        let suite = suite(folder.path(), &before);
        let ptx = ".visible .entry k(\n)\n";
        let trial = Trial::new(&suite, "f", ptx, BTreeSet::new(), false).unwrap();
        let end =
            |mistake: &str| trial.end("k", &format!("{ptx}{mistake}\n"), Duration::from_secs(60)).unwrap();
        let by = |name: &str| End::Failed(Some(format!("cuda-sim::f::{name}")));
        assert_eq!((end("bug"), trial.problems().len()), (by("quick"), 0));
        assert_eq!(end("harmless"), End::Passed);
        assert_eq!(trial.problems(), [passed_over("cuda-sim::f::unsound")]);
        assert_eq!(end("deep"), by("slow"));
        assert!(!lock(&suite.sound)["cuda-sim::f::unsound"]);
        assert_eq!(trial.problems().len(), 1, "told once");
    }

    #[cfg(unix)]
    #[test]
    fn a_mutant_is_killed_by_a_case_that_passes_without_it() {
        let folder = tempfile::tempdir().unwrap();
        let before = Before::default();
        let suite = suite(folder.path(), &before);
        let ptx = ".visible .entry k(\n)\n.visible .entry unused(\n)\n";
        let trial = Trial::new(&suite, "f", ptx, BTreeSet::new(), true).unwrap();
        let end = |kernel, mistake: &str, patience| {
            trial.end(kernel, &format!("{ptx}{mistake}\n"), Duration::from_secs(patience)).unwrap()
        };
        let by = |name: &str| End::Failed(Some(format!("cuda-sim::f::{name}")));
        assert_eq!(end("k", "bug", 60), by("quick"));
        assert_eq!(end("k", "harmless", 60), End::Passed);
        assert_eq!(end("k", "deep", 60), by("slow"));
        assert_eq!(end("k", "crash", 60), by("slow"));
        assert_eq!(end("k", "leak", 60), End::Failed(None));
        assert_eq!(end("unused", "deep", 60), End::Passed);
        assert_eq!(end("k", "endless", 1), End::Late);
        let problems = trial.problems();
        assert!(
            problems.iter().any(|text| text.contains("unsound fails without a mutation")),
            "{problems:?}"
        );
        assert!(
            problems.iter().any(|text| text.contains("f unused: no case launches this kernel")),
            "{problems:?}"
        );
        assert_eq!(problems.len(), 2);
        let listed = BTreeSet::from(["unused".to_owned()]);
        let trial = Trial::new(&suite, "f", ptx, listed, true).unwrap();
        assert_eq!(trial.problems().len(), 1, "a kernel that is listed need not run");
    }

    #[cfg(unix)]
    #[test]
    fn where_the_suite_ran_before_nothing_is_run_without_a_mutation() {
        let folder = tempfile::tempdir().unwrap();
        let watched =
            |seconds, kernel: &str| Watched { seconds, kernels: BTreeSet::from([kernel.to_owned()]) };
        let case = |name: &str| format!("cuda-sim::f::{name}");
        let watched =
            BTreeMap::from([(case("quick"), watched(0.001, "j")), (case("slow"), watched(0.3, "k"))]);
        let before = Before { seed: 1, watched };
        let suite = suite(folder.path(), &before);
        let ptx = ".visible .entry j(\n)\n.visible .entry k(\n)\n";
        let trial = Trial::new(&suite, "f", ptx, BTreeSet::new(), false).unwrap();
        assert_eq!(trial.problems(), [passed_over("cuda-sim::f::unsound")]);
        let end =
            |kernel: &str| trial.end(kernel, &format!("{ptx}bug deep\n"), Duration::from_secs(60)).unwrap();
        assert_eq!(end("k"), End::Failed(Some(case("slow"))), "the quick case does not launch it");
        assert_eq!(end("j"), End::Failed(Some(case("quick"))));
        assert!(lock(&suite.sound).is_empty());
    }

    #[test]
    fn cases_that_killed_come_before_quick_ones() {
        let case = |length, kills: &[(&str, u32)]| Case {
            name: String::new(),
            length,
            kernels: None,
            kills: kills.iter().map(|(kernel, count)| ((*kernel).to_owned(), *count)).collect(),
        };
        let (quick, killer) = (case(0.1, &[]), case(1.0, &[("k", 1)]));
        assert!(killer.cost("k") < quick.cost("k") && killer.cost("l") > quick.cost("l"));
    }
}
