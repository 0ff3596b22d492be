//! The counts of cases, and the files that they come from.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::result::Result;

/// The counts of the cases by outcome. Failures are printed as they occur.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// Cases that were not compared, by their kind.
    pub(crate) left_out: BTreeMap<String, usize>,
}

impl Tally {
    /// Counts cases of a kind that cannot be compared.
    pub(crate) fn leave_out(&mut self, kind: &str, count: usize) {
        *self.left_out.entry(kind.to_owned()).or_default() += count;
    }

    pub(crate) fn record(&mut self, case: &str, result: std::result::Result<(), String>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(difference) => {
                self.failed += 1;
                println!("FAILED {case}: {difference}");
            }
        }
    }
}

/// Counts differing values of one case and describes the first of them.
#[derive(Debug, Default)]
pub(crate) struct Mismatches {
    pub(crate) first: Option<String>,
    pub(crate) count: usize,
    pub(crate) compared: usize,
}

impl Mismatches {
    /// `describe` tells where, both values and both bit patterns.
    pub(crate) fn compare(&mut self, equal: bool, describe: impl FnOnce() -> String) {
        self.compared += 1;
        if !equal {
            self.count += 1;
            self.first.get_or_insert_with(describe);
        }
    }

    pub(crate) fn finish(self) -> std::result::Result<(), String> {
        match self.first {
            None => Ok(()),
            Some(first) => Err(format!("{first}; {} of {} differ", self.count, self.compared)),
        }
    }
}

/// Names and paths of the files in `folder`, sorted.
pub(crate) fn listing(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let entry = entry?;
        if entry.path().is_file() {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the folder's files of tensors one after the other, and says which files are none.
pub(crate) fn each_tensor_file(name: &str, folder: &Path, mut check: impl FnMut(&str, &[u8])) -> Result {
    let mut ignored = Vec::new();
    for (file, path) in listing(folder)? {
        if file.ends_with(".safetensors") {
            let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            check(&file, &bytes);
        } else {
            ignored.push(file);
        }
    }
    say_ignored(name, &ignored);
    Ok(())
}

/// One line on the files that are no reference data, if there are any.
pub(crate) fn say_ignored(folder: &str, names: &[String]) {
    if !names.is_empty() {
        println!("{folder}/: ignored {}", names.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mismatch_is_told_and_all_are_counted() {
        let mut mismatches = Mismatches::default();
        for (index, equal) in [true, false, true, false].into_iter().enumerate() {
            mismatches.compare(equal, || format!("entry {index}"));
        }
        assert_eq!(mismatches.finish(), Err("entry 1; 2 of 4 differ".to_owned()));
        assert_eq!(Mismatches::default().finish(), Ok(()));
    }
}
