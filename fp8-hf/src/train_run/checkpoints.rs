//! The checkpoints of a run: which there are, and which are kept.

use crate::{Error, Result};
use fp8_nn::checkpoint;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const PREFIX: &str = "step-";

/// The folder with the checkpoints.
#[derive(Debug)]
pub(super) struct Checkpoints {
    folder: PathBuf,
}

/// A checkpoint, and the strings that it has besides its tensors.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) step: u64,
    pub(super) dir: PathBuf,
    pub(super) metadata: BTreeMap<String, String>,
}

impl Checkpoints {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the folder of the checkpoint behind step `step`.
    pub(super) fn dir(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:08}"))
    }

    /// Returns the steps of which there is a folder, in order.
    fn steps(&self) -> Result<Vec<u64>> {
        let io = |source| Error::Io { path: self.folder.clone(), source };
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io)?,
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry.map_err(io)?.file_name();
            steps.extend(name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the newest checkpoint that can be read, and the names of newer ones that cannot. A folder without a whole file was left by a
    /// process that was killed while it wrote.
    pub(super) fn newest(&self) -> Result<(Option<Found>, Vec<String>)> {
        let mut damaged = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            let dir = self.dir(step);
            if !checkpoint::path(&dir).is_file() {
                continue;
            }
            match checkpoint::metadata(&dir) {
                Ok(metadata) => return Ok((Some(Found { step, dir, metadata }), damaged)),
                Err(_) => damaged.push(dir.display().to_string()),
            }
        }
        Ok((None, damaged))
    }

    /// Removes all but the `keep` newest, and that of step `best`. What cannot be removed stays.
    pub(super) fn prune(&self, keep: usize, best: Option<u64>) -> Result<()> {
        let steps = self.steps()?;
        let old = steps.len().saturating_sub(keep);
        for &step in steps.iter().take(old).filter(|&&step| Some(step) != best) {
            remove(&self.dir(step));
        }
        Ok(())
    }

    /// Removes those behind step `step`, which a resumed run will write again.
    pub(super) fn remove_behind(&self, step: u64) -> Result<()> {
        self.steps()?.into_iter().filter(|&other| other > step).for_each(|other| remove(&self.dir(other)));
        Ok(())
    }
}

/// Removes a checkpoint: its file first, so that what a killed process leaves is no checkpoint.
fn remove(dir: &Path) {
    let _ = fs::remove_file(checkpoint::path(dir));
    let _ = fs::remove_dir_all(dir);
}
