//! The verdicts on the mutants of a crate, kept in a file to continue a run that was stopped.
//!
//! A result is valid while its inputs are unchanged: the crate's sources, and either the file whose test failed or, if no
//! test failed, all tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::copied::Copied;
use crate::workspace::Result;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Verdict {
    /// It does not compile.
    Unviable,
    /// A test failed, which is in this file.
    Killed {
        test: String,
        file: PathBuf,
    },
    /// A program of tests took too long or ended without naming a test.
    Stopped {
        program: String,
    },
    Survived,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    verdict: Verdict,
    /// The hash of what the verdict depends on.
    hash: String,
}

pub(super) struct Results<'a> {
    copy: &'a Copied,
    package: &'static str,
    /// Folders of all tests that judge the crate.
    tests: Vec<PathBuf>,
    entries: BTreeMap<String, Entry>,
}

impl<'a> Results<'a> {
    /// Those of earlier runs, or none.
    pub(super) fn read(
        copy: &'a Copied,
        package: &'static str,
        tests: Vec<PathBuf>,
        is_fresh: bool,
    ) -> Result<Self> {
        let file = copy.results(package);
        let entries = match fs::read(&file) {
            Ok(json) if !is_fresh => serde_json::from_slice(&json)
                .map_err(|error| format!("{}: {error}: use --fresh", file.display()))?,
            _ => BTreeMap::new(),
        };
        Ok(Self { copy, package, tests, entries })
    }

    /// The verdict on a mutant, if it still holds.
    pub(super) fn get(&self, id: &str) -> Result<Option<Verdict>> {
        let Some(entry) = self.entries.get(id) else { return Ok(None) };
        Ok((entry.hash == self.hash(&entry.verdict)?).then(|| entry.verdict.clone()))
    }

    /// Called where the copy is without a mutation.
    pub(super) fn set(&mut self, id: String, verdict: Verdict) -> Result {
        let hash = self.hash(&verdict)?;
        self.entries.insert(id, Entry { verdict, hash });
        let file = self.copy.results(self.package);
        let temporary = file.with_extension("tmp");
        fs::write(&temporary, serde_json::to_string_pretty(&self.entries)?)?;
        Ok(fs::rename(temporary, file)?)
    }

    fn hash(&self, verdict: &Verdict) -> Result<String> {
        let package = PathBuf::from(self.package);
        let mut paths = vec![package.join("Cargo.toml"), package.join("src")];
        match verdict {
            Verdict::Unviable => {}
            Verdict::Killed { file, .. } => paths.push(file.clone()),
            Verdict::Stopped { .. } | Verdict::Survived => paths.extend_from_slice(&self.tests),
        }
        self.copy.hash(&paths)
    }
}
