//! One kernel file on trial: its cases, run one at a time on mutated PTX until one fails.
//!
//! Cases that found mistakes in the same kernel come first, then quick ones. A failure counts only if the case passes
//! without a mutation. Before the slow cases it is found out which of them use the kernel at all.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::conformance::{Backend, Job, Outcome};
use crate::mutate::edits::Mutant;
use crate::process;
use crate::workspace::Result;

/// A case of unknown length that takes longer is measured before it goes on.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longer cases are run only where they use the kernel.
const QUICK: f64 = 0.4;
/// A mutant loops, or nearly so, where its case takes this much longer: seconds, and times the usual.
const LONGER: (f64, f64) = (5.0, 10.0);
/// No case takes so long.
const FOR_EVER: Duration = Duration::from_secs(30 * 60);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    Killed,
    Survived,
    /// It survived where no case gets.
    Unreached,
}

/// A kernel file with its cases.
pub(super) struct Trial {
    program: PathBuf,
    file: String,
    ptx: String,
    cases: Mutex<Vec<Case>>,
    /// The cases that use a kernel, by kernel.
    users: Mutex<HashMap<String, Arc<OnceLock<Use>>>>,
    problems: Mutex<Vec<String>>,
}

/// Names of cases, or why they are not known.
type Use = std::result::Result<BTreeSet<String>, String>;

#[derive(Clone)]
struct Case {
    name: String,
    /// Seconds, as far as they are known.
    length: Option<f64>,
    /// Whether it passes without a mutation.
    passes: Option<bool>,
    /// Mutants that it killed, by kernel.
    kills: HashMap<String, u32>,
}

impl Case {
    fn seconds(&self) -> f64 {
        self.length.unwrap_or(QUICK / 2.0)
    }

    /// Seconds until it kills, so to speak.
    fn cost(&self, kernel: &str) -> f64 {
        let all: u32 = self.kills.values().sum();
        let here = self.kills.get(kernel).copied().unwrap_or(0);
        self.seconds() / (1.0 + f64::from(all) + 20.0 * f64::from(here))
    }
}

/// How a case ended.
enum End {
    Passed,
    Failed,
    /// Stopped at its limit.
    Late,
}

/// The operation whose kernels a file holds: the one of its name, or the longest that its name begins with.
fn operation<'a>(file: &str, operations: &BTreeSet<&'a str>) -> Option<&'a str> {
    let is_its = |operation: &&&str| {
        file.strip_prefix(**operation).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    operations.iter().filter(is_its).max_by_key(|operation| operation.len()).copied()
}

impl Trial {
    pub(super) fn new(program: &Path, file: &str, ptx: &str) -> Result<Self> {
        let mut command = Job { backend: Backend::CudaSim, seed: None }.command(program);
        command.arg("--list");
        let listed = process::watch(command, FOR_EVER, |_| false)?.output;
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        let operations: BTreeSet<&str> = names.clone().filter_map(|name| name.split("::").nth(1)).collect();
        let operation = operation(file, &operations);
        let is_user = |name: &&str| operation.is_some() && name.split("::").nth(1) == operation;
        let case =
            |name: &str| Case { name: name.to_owned(), length: None, passes: None, kills: HashMap::new() };
        let cases: Vec<Case> = names.filter(is_user).map(case).collect();
        if cases.is_empty() {
            return Err(format!("mutate: {file}: the suite has no cases of it").into());
        }
        Ok(Self {
            program: program.to_path_buf(),
            file: file.to_owned(),
            ptx: ptx.to_owned(),
            cases: Mutex::new(cases),
            users: Mutex::default(),
            problems: Mutex::default(),
        })
    }

    /// What made verdicts doubtful.
    pub(super) fn problems(&self) -> Vec<String> {
        lock(&self.problems).clone()
    }

    /// What the cases make of a mutant.
    pub(super) fn verdict(&self, mutant: &Mutant) -> Result<Verdict> {
        Ok(if self.is_killed(&mutant.kernel, &mutant.apply(&self.ptx))? {
            Verdict::Killed
        } else if self.is_killed(&mutant.kernel, &mutant.trapped(&self.ptx))? {
            Verdict::Survived
        } else {
            Verdict::Unreached
        })
    }

    /// Whether some case fails with this PTX, a mutation of that kernel.
    fn is_killed(&self, kernel: &str, ptx: &str) -> Result<bool> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join(format!("{}.ptx", self.file)), ptx)?;
        let mut open: BTreeSet<String> = lock(&self.cases)
            .iter()
            .filter(|case| case.passes != Some(false))
            .map(|case| case.name.clone())
            .collect();
        let mut is_narrowed = false;
        while let Some(case) = self.cheapest(&open, kernel) {
            if case.seconds() > QUICK && !is_narrowed {
                is_narrowed = true;
                let users = self.users(kernel)?;
                open.retain(|name| users.contains(name));
                continue;
            }
            let limit = match case.passes {
                Some(_) => Duration::from_secs_f64(LONGER.0 + LONGER.1 * case.seconds()),
                None => PATIENCE,
            };
            let start = Instant::now();
            let end = self.run(folder.path(), &case.name, limit)?;
            match end {
                End::Passed => {
                    self.learn(&case.name, |case| {
                        case.length.get_or_insert(start.elapsed().as_secs_f64());
                    });
                }
                // Not known before: it is tried again with what is its due.
                End::Late if case.passes.is_none() => {
                    self.passes(&case.name)?;
                    continue;
                }
                End::Failed | End::Late => {
                    if self.passes(&case.name)? {
                        self.learn(&case.name, |case| {
                            *case.kills.entry(kernel.to_owned()).or_default() += 1;
                        });
                        return Ok(true);
                    }
                }
            }
            open.remove(&case.name);
        }
        Ok(false)
    }

    fn cheapest(&self, open: &BTreeSet<String>, kernel: &str) -> Option<Case> {
        let cases = lock(&self.cases);
        let candidates = cases.iter().filter(|case| open.contains(&case.name));
        candidates.min_by(|a, b| a.cost(kernel).total_cmp(&b.cost(kernel))).cloned()
    }

    fn learn(&self, name: &str, change: impl FnOnce(&mut Case)) {
        if let Some(case) = lock(&self.cases).iter_mut().find(|case| case.name == name) {
            change(case);
        }
    }

    /// Whether a case passes without a mutation; measures it.
    fn passes(&self, name: &str) -> Result<bool> {
        if let Some(passes) =
            lock(&self.cases).iter().find(|case| case.name == name).and_then(|case| case.passes)
        {
            return Ok(passes);
        }
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join(format!("{}.ptx", self.file)), &self.ptx)?;
        let start = Instant::now();
        let passes = matches!(self.run(folder.path(), name, FOR_EVER)?, End::Passed);
        self.learn(name, |case| {
            (case.passes, case.length) = (Some(passes), Some(start.elapsed().as_secs_f64()));
        });
        if !passes {
            lock(&self.problems).push(format!("{name} fails without a mutation: it is passed over"));
        }
        Ok(passes)
    }

    /// The cases that need the kernel: they fail where it has another name.
    fn users(&self, kernel: &str) -> Result<BTreeSet<String>> {
        let cell = Arc::clone(lock(&self.users).entry(kernel.to_owned()).or_default());
        let found = cell.get_or_init(|| self.find_users(kernel).map_err(|error| error.to_string()));
        Ok(found.clone()?)
    }

    fn find_users(&self, kernel: &str) -> Result<BTreeSet<String>> {
        let absent = self.ptx.replace(&format!(".entry {kernel}("), &format!(".entry {kernel}_is_absent("));
        if absent == self.ptx {
            return Err(format!("mutate: {}: no kernel {kernel}", self.file).into());
        }
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join(format!("{}.ptx", self.file)), absent)?;
        let operations: BTreeSet<String> = lock(&self.cases)
            .iter()
            .filter_map(|case| case.name.rsplit_once("::"))
            .filter_map(|(path, _)| path.split("::").nth(1))
            .map(|operation| format!("cuda-sim::{operation}::"))
            .collect();
        let mut users = BTreeSet::new();
        for operation in operations {
            let finished = process::watch(self.command(folder.path(), &operation), FOR_EVER, |_| false)?;
            let outcome = Outcome::read(&finished.output, finished.succeeded());
            if outcome.failed.is_empty() && outcome.broken.is_some() {
                return Err(format!("mutate: {operation} without {kernel}: {}", outcome.line()).into());
            }
            users.extend(outcome.failed);
        }
        for case in lock(&self.cases).iter().filter(|case| case.passes == Some(false)) {
            users.remove(&case.name);
        }
        if users.is_empty() {
            lock(&self.problems).push(format!("{} {kernel}: no case uses this kernel", self.file));
        }
        Ok(users)
    }

    fn run(&self, folder: &Path, name: &str, limit: Duration) -> Result<End> {
        let mut command = self.command(folder, name);
        command.arg("--exact");
        let finished = process::watch(command, limit, |output| output.contains(" ... FAILED\n"))?;
        let outcome = Outcome::read(&finished.output, finished.succeeded());
        if let Some((name, reason)) = outcome.ignored.first() {
            return Err(format!("mutate: {name} does not run: {reason}").into());
        }
        Ok(if !outcome.failed.is_empty() {
            End::Failed
        } else if finished.status.is_none() {
            End::Late
        } else if outcome.broken.is_some() {
            End::Failed
        } else if outcome.passed.is_empty() {
            return Err(format!("mutate: {name} did not run: {}", finished.output).into());
        } else {
            End::Passed
        })
    }

    /// The suite on the snapshots in the folder.
    fn command(&self, folder: &Path, filter: &str) -> std::process::Command {
        let mut command = Job { backend: Backend::CudaSim, seed: Some(0) }.command(&self.program);
        command.env("FP8_SIM_SNAPSHOTS", folder).env("RUST_BACKTRACE", "0");
        command.args(["--test-threads=1", filter]);
        command
    }
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

    /// A suite of three cases: `quick` fails where the PTX has a `bug`, `slow` where it has a `deep` one, and
    /// `unsound` always. Without the kernel `k` they all fail but `unsound`.
    #[cfg(unix)]
    const SUITE: &str = r#"#!/bin/sh
case "$1" in --list) for name in quick slow unsound; do echo "cuda-sim::f::$name: test"; done; exit 0;; esac
status=0
say() { echo "test cuda-sim::f::$1 ... $2"; if [ "$2" = FAILED ]; then status=101; fi; }
has() { grep -q "$1" "$FP8_SIM_SNAPSHOTS/f.ptx"; }
absent() { ! has "entry k("; }
verdict() {
  case "$1" in
    quick) if has bug || absent; then say quick FAILED; else say quick ok; fi;;
    slow) sleep 1.2; if has endless; then sleep 60; fi; if has deep || absent; then say slow FAILED; else say slow ok; fi;;
    unsound) say unsound FAILED;;
  esac
}
case "$2" in
  cuda-sim::f::) for name in quick slow unsound; do verdict $name; done;;
  *) verdict "${2##*::}";;
esac
echo "test result: done"
echo "simulator: 0 reports, 0 leaks"
exit $status
"#;

    #[cfg(unix)]
    #[test]
    fn a_mutant_is_killed_by_a_case_that_passes_without_it() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("suite");
        fs::write(&program, SUITE).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let ptx = ".visible .entry k(\n)\n.visible .entry unused(\n)\n";
        let trial = Trial::new(&program, "f", ptx).unwrap();
        let is_killed =
            |kernel, mistake: &str| trial.is_killed(kernel, &format!("{ptx}{mistake}\n")).unwrap();
        assert!(is_killed("k", "bug"));
        assert!(!is_killed("k", "harmless"));
        assert!(is_killed("k", "deep"));
        assert!(!is_killed("unused", "deep"));
        let problems = trial.problems();
        assert!(
            problems.iter().any(|text| text.contains("unsound fails without a mutation")),
            "{problems:?}"
        );
        assert!(
            problems.iter().any(|text| text.contains("f unused: no case uses this kernel")),
            "{problems:?}"
        );
        assert_eq!(problems.len(), 2);
    }

    #[test]
    fn cases_that_killed_come_before_quick_ones() {
        let case = |length, kills: &[(&str, u32)]| Case {
            name: String::new(),
            length: Some(length),
            passes: None,
            kills: kills.iter().map(|(kernel, count)| ((*kernel).to_owned(), *count)).collect(),
        };
        let (quick, killer) = (case(0.1, &[]), case(1.0, &[("k", 1)]));
        assert!(killer.cost("k") < quick.cost("k") && killer.cost("l") > quick.cost("l"));
    }
}
