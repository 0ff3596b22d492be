//! A suite on trial: its programs, run on a mutated crate until a test fails.

use std::path::Path;
use std::time::Duration;

use super::copied::Copied;
use super::mutant::Mutant;
use super::results::Verdict;
use super::suites::{self, Suite};
use crate::mutants::{expect_pass, failed_test, planted};
use crate::process::watch;
use crate::workspace::Result;

/// A mutant loops where a program takes this much longer than usual: seconds, and times the usual.
const LONGER: (Duration, u32) = (Duration::from_secs(15), 2);
/// No program takes so long.
const FOR_EVER: Duration = Duration::from_secs(30 * 60);

pub(super) struct Trial<'a> {
    copy: &'a Copied,
    suite: &'static Suite,
    /// For each program.
    limits: Vec<Duration>,
}

impl<'a> Trial<'a> {
    /// Measures the suite without a mutation. A test that fails then is an error: it would kill every mutant.
    pub(super) fn new(copy: &'a Copied, suite: &'static Suite) -> Result<Self> {
        let programs =
            copy.build(suite)?.map_err(|error| format!("mutate-crates: does not compile:\n{error}"))?;
        let mut limits = Vec::new();
        for (program, target) in programs.iter().zip(suite.targets) {
            let usual = expect_pass("mutate-crates", target, copy.command(program, suite), FOR_EVER)?;
            limits.push(LONGER.0 + usual * LONGER.1);
        }
        Ok(Self { copy, suite, limits })
    }

    pub(super) fn verdict(&self, mutant: &Mutant) -> Result<Verdict> {
        let file = Path::new(&mutant.file);
        let names = [file.file_stem(), file.parent().and_then(Path::file_name)];
        let names = names.map(|name| name.unwrap_or_default().to_string_lossy());
        planted(
            &self.copy.folder().join(&mutant.file),
            |source| mutant.apply(source),
            || self.tested([&names[0], &names[1]]),
        )
    }

    /// First the tests that are named like the changed file or its folder, then all.
    fn tested(&self, [file, folder]: [&str; 2]) -> Result<Verdict> {
        let Ok(programs) = self.copy.build(self.suite)? else { return Ok(Verdict::Unviable) };
        for filter in [Some(file), Some(folder), None] {
            for ((program, target), limit) in programs.iter().zip(self.suite.targets).zip(&self.limits) {
                if let Some(verdict) = self.run(program, target, filter, *limit)? {
                    return Ok(verdict);
                }
            }
        }
        Ok(Verdict::Survived)
    }

    /// `None` where all tests of a program pass.
    fn run(
        &self,
        program: &Path,
        target: &str,
        filter: Option<&str>,
        limit: Duration,
    ) -> Result<Option<Verdict>> {
        let mut command = self.copy.command(program, self.suite);
        match filter {
            // Filters add to each other.
            Some(_) if !self.suite.arguments.is_empty() => return Ok(None),
            Some(filter) => _ = command.arg(filter),
            None => {}
        }
        // One failed test is enough.
        let finished = watch(command, limit, |output| failed_test(output).is_some())?;
        if finished.succeeded() {
            return Ok(None);
        }
        Ok(Some(match failed_test(&finished.output) {
            Some(test) => {
                let file = suites::source(self.suite.package, target, test);
                Verdict::Killed { test: format!("{target}: {test}"), file }
            }
            None => Verdict::Stopped { program: target.to_owned() },
        }))
    }
}
