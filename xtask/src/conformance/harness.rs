//! Reads the output of the suite: `test NAME ... ok` and the like, and the line that the simulated device prints last.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The numbers of reports and leaks that the simulated device has counted by the end of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Found {
    reports: usize,
    leaks: usize,
}

impl Found {
    /// `simulator: N reports, N leaks`, as printed.
    fn read(line: &str) -> Option<Self> {
        let (reports, leaks) =
            line.strip_prefix("simulator: ")?.strip_suffix(" leaks")?.split_once(" reports, ")?;
        Some(Self { reports: reports.parse().ok()?, leaks: leaks.parse().ok()? })
    }

    /// That of two processes.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { reports: self.reports + other.reports, leaks: self.leaks + other.leaks }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulator: {} reports, {} leaks", self.reports, self.leaks)
    }
}

/// The time and the kernels of a case on the simulated device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Watched {
    pub(crate) seconds: f64,
    /// The kernels that it launched.
    pub(crate) kernels: BTreeSet<String>,
}

impl Watched {
    /// `watched NAME SECONDS KERNEL…`, as printed.
    fn read(line: &str) -> Option<(String, Self)> {
        let mut words = line.strip_prefix("watched ")?.split_whitespace();
        let (name, seconds) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some((name, Self { seconds, kernels: words.map(str::to_owned).collect() }))
    }
}

/// The outcome of one process.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) passed: Vec<String>,
    pub(crate) failed: Vec<String>,
    /// Names and reasons.
    pub(crate) ignored: Vec<(String, String)>,
    pub(crate) simulator: Option<Found>,
    /// Times and kernels of cases, by name, where that was asked for.
    pub(crate) watched: BTreeMap<String, Watched>,
    /// Why the process counts as failed although no case did.
    pub(crate) broken: Option<&'static str>,
}

impl Outcome {
    /// `succeeded`: whether the process itself said so.
    pub(crate) fn read(output: &str, succeeded: bool) -> Self {
        let mut outcome = Self::default();
        let mut ended = false;
        for line in output.lines() {
            if let Some((name, end)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... ")) {
                outcome.case(name, end);
            } else if let Some(found) = Found::read(line) {
                outcome.simulator = Some(found);
            } else if let Some((name, watched)) = Watched::read(line) {
                outcome.watched.insert(name, watched);
            } else if line.starts_with("test result: ") {
                ended = true;
            }
        }
        let complains = outcome.simulator.is_some_and(|found| found != Found::default());
        outcome.broken = if !ended {
            Some("the process broke down before its end")
        } else if complains {
            Some("the simulated device found faults outside of failed cases")
        } else if !succeeded {
            Some("the process failed after its cases")
        } else {
            None
        };
        outcome
    }

    fn case(&mut self, name: &str, end: &str) {
        // libtest-mimic pads names and may add a kind in brackets.
        let name = name.trim().to_owned();
        match end.trim() {
            "ok" => self.passed.push(name),
            "FAILED" => self.failed.push(name),
            "ignored" => {
                let reason = name.strip_suffix(')').and_then(|name| name.split_once(" ("));
                let (case, reason) = reason.unwrap_or((&name, "no reason given"));
                self.ignored.push((case.to_owned(), reason.to_owned()));
            }
            _ => {}
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.failed.is_empty() && self.broken.is_none()
    }

    pub(crate) fn line(&self) -> String {
        let (passed, failed, ignored) = (self.passed.len(), self.failed.len(), self.ignored.len());
        let mut line = format!("{passed} passed, {failed} failed, {ignored} ignored");
        let remarks = [
            self.simulator.map(|found| found.to_string()),
            self.broken.filter(|_| failed == 0).map(str::to_owned),
        ];
        for remark in remarks.into_iter().flatten() {
            line = format!("{line}; {remark}");
        }
        line
    }

    /// The part of the output that tells what went wrong: the harness's list, or the last lines.
    pub(crate) fn failures<'a>(&self, output: &'a str) -> &'a str {
        const LAST: usize = 30;
        if !self.failed.is_empty()
            && let Some(at) = output.find("\nfailures:\n")
        {
            return &output[at..];
        }
        let from = output.rmatch_indices('\n').nth(LAST).map_or(0, |(at, _)| at);
        &output[from..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 3 tests
test cuda-sim::norm::rows   ... ok
test cuda-sim::norm::needle ... FAILED
test cuda::norm::rows (cuda: libcuda.so.1 not found (looked in /a)) ... ignored

failures:

---- cuda-sim::norm::needle ----
element 3: 1.0 instead of 2.0

failures:
    cuda-sim::norm::needle

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

simulator: 0 reports, 0 leaks
";

    #[test]
    fn cases_are_sorted_by_their_outcome_and_failures_are_cut_out() {
        let outcome = Outcome::read(OUTPUT, false);
        assert_eq!(outcome.passed, ["cuda-sim::norm::rows"]);
        assert_eq!(outcome.failed, ["cuda-sim::norm::needle"]);
        let reason = "cuda: libcuda.so.1 not found (looked in /a)";
        assert_eq!(outcome.ignored, [("cuda::norm::rows".to_owned(), reason.to_owned())]);
        assert_eq!(outcome.line(), "1 passed, 1 failed, 1 ignored; simulator: 0 reports, 0 leaks");
        assert!(outcome.failures(OUTPUT).starts_with("\nfailures:\n\n---- cuda-sim::norm::needle"));
        assert!(!outcome.is_good());
    }

    #[test]
    fn a_watched_case_tells_its_seconds_and_kernels() {
        let watched =
            Outcome::read("watched cuda-sim::f::a 1.250 j k\nwatched cuda-sim::f::b 0.001 \n", true).watched;
        let expected = |seconds, kernels: &[&str]| Watched {
            seconds,
            kernels: kernels.iter().map(|kernel| (*kernel).to_owned()).collect(),
        };
        assert_eq!(watched["cuda-sim::f::a"], expected(1.25, &["j", "k"]));
        assert_eq!(watched["cuda-sim::f::b"], expected(0.001, &[]));
        assert_eq!(watched.len(), 2);
    }

    #[test]
    fn a_process_is_bad_that_broke_down_or_whose_simulator_complains() {
        let good = "test a ... ok\ntest result: ok. 1 passed\nsimulator: 0 reports, 0 leaks\n";
        assert!(Outcome::read(good, true).is_good());
        assert!(!Outcome::read(good, false).is_good());
        assert!(!Outcome::read("test a ... ok\n", true).is_good());
        assert!(!Outcome::read(&good.replace("0 leaks", "1 leaks"), true).is_good());
    }
}
