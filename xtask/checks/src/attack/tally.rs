//! The counts of an attack: calls by family, and failures with the command that repeats each.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::options::Part;

/// The number of failures of one kind that are shown.
const SHOWN: usize = 3;

#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) part: Part,
    pub(super) device: String,
    pub(super) seed: u64,
    pub(super) number: u64,
    pub(super) family: String,
    pub(super) what: String,
    /// The end of the process's standard error, where it explains the failure.
    pub(super) detail: String,
}

impl Failure {
    /// The command that repeats just this case.
    fn command(&self) -> String {
        let Self { part, device, seed, number, .. } = self;
        let device = if *part == Part::Files { String::new() } else { format!(" --device {device}") };
        format!("cargo xtask attack --only {}{device} --seed {seed} --at {number}", part.name())
    }

    /// Returns the text that failures of one kind share: device, family, and the message without its numbers.
    fn kind(&self) -> String {
        let mut kind = String::new();
        let first = self.what.lines().next().unwrap_or_default();
        let second =
            if first.contains("panicked") { self.what.lines().nth(1).unwrap_or_default() } else { "" };
        for word in first.chars().chain(second.chars()) {
            match word {
                '0'..='9' if kind.ends_with('#') => {}
                '0'..='9' => kind.push('#'),
                _ => kind.push(word),
            }
        }
        kind.truncate(kind.char_indices().nth(160).map_or(kind.len(), |(at, _)| at));
        format!("{} {} {kind}", self.device, self.family)
    }
}

#[derive(Debug, Default, Clone)]
struct Calls {
    cases: usize,
    accepted: usize,
    refused: usize,
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    families: BTreeMap<String, Calls>,
    pub(super) failures: Vec<Failure>,
}

impl Tally {
    pub(super) fn add(&mut self, family: &str, accepted: usize, refused: usize) {
        let calls = self.families.entry(family.to_owned()).or_default();
        calls.cases += 1;
        calls.accepted += accepted;
        calls.refused += refused;
    }

    pub(super) fn fail(&mut self, failure: Failure) {
        self.failures.push(failure);
    }

    /// Adds a process's last words to the failure that ended it.
    pub(super) fn explain(&mut self, words: &str) {
        if let Some(failure) = self.failures.last_mut() {
            failure.detail = words.to_owned();
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        for (family, calls) in other.families {
            let all = self.families.entry(family).or_default();
            all.cases += calls.cases;
            all.accepted += calls.accepted;
            all.refused += calls.refused;
        }
        self.failures.extend(other.failures);
    }

    pub(super) fn cases(&self) -> usize {
        self.families.values().map(|calls| calls.cases).sum()
    }

    /// One line: cases, calls, failures.
    pub(super) fn line(&self) -> String {
        let calls = |of: fn(&Calls) -> usize| -> usize { self.families.values().map(of).sum() };
        let (accepted, refused) = (calls(|calls| calls.accepted), calls(|calls| calls.refused));
        format!(
            "{} cases, {} calls, {accepted} accepted, {refused} refused, {} failures",
            self.cases(),
            accepted + refused,
            self.failures.len()
        )
    }

    /// A row for each family.
    pub(super) fn table(&self) -> String {
        let mut table =
            format!("{:<20} {:>8} {:>9} {:>9} {:>8}\n", "family", "cases", "calls", "accepted", "refused");
        for (family, Calls { cases, accepted, refused }) in &self.families {
            let calls = accepted + refused;
            let _ = writeln!(table, "{family:<20} {cases:>8} {calls:>9} {accepted:>9} {refused:>8}");
        }
        table
    }

    /// The first failures of each kind, each with its command.
    pub(super) fn report(&self) -> String {
        let mut kinds: BTreeMap<String, Vec<&Failure>> = BTreeMap::new();
        for failure in &self.failures {
            kinds.entry(failure.kind()).or_default().push(failure);
        }
        let mut report = String::new();
        for failures in kinds.values() {
            for failure in failures.iter().take(SHOWN) {
                let Failure { family, what, detail, .. } = failure;
                let _ = writeln!(report, "{}\n  {family}: {}", failure.command(), what.replace('\n', "\n  "));
                if !detail.is_empty() {
                    let _ = writeln!(report, "  {}", detail.replace('\n', "\n  "));
                }
            }
            if failures.len() > SHOWN {
                let _ = writeln!(report, "  … and {} more of this kind", failures.len() - SHOWN);
            }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(number: u64, what: &str) -> Failure {
        let (part, device, detail) = (Part::Operations, "cpu".to_owned(), String::new());
        Failure { part, device, seed: 7, number, family: "gemm".to_owned(), what: what.to_owned(), detail }
    }

    #[test]
    fn each_kind_of_failure_is_shown_with_the_command_that_repeats_it() {
        let mut tally = Tally::default();
        tally.add("gemm", 3, 1);
        for number in 0..5 {
            tally.fail(failure(number, &format!("y: element {number} differs")));
        }
        tally.fail(failure(9, "hang"));
        let report = tally.report();
        assert!(
            report
                .contains("cargo xtask attack --only operations --device cpu --seed 7 --at 9\n  gemm: hang")
        );
        assert!(report.contains("--at 2\n") && !report.contains("--at 3\n"), "{report}");
        assert!(report.contains("and 2 more of this kind"));
        assert_eq!(tally.line(), "1 cases, 4 calls, 3 accepted, 1 refused, 6 failures");
    }
}
