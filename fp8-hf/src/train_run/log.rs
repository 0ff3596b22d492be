//! `log.jsonl`: a line for each step.

use super::record::TrainRecord;
use crate::{Error, Result};
use fp8_kernels::AtomicFile;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// The log of a run, open for more lines.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens the log, and removes what is behind step `step`, which a resumed run does again.
    pub(super) fn open(path: PathBuf, step: u64) -> Result<Self> {
        let io = |source| Error::Io { path: path.clone(), source };
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(io(error)),
        };
        // A line that a killed process has not ended has no step.
        let is_kept = |line: &&str| step_of(line).is_some_and(|own| own <= step);
        let kept: String = text.split_inclusive('\n').filter(is_kept).collect();
        if kept != text || text.is_empty() {
            let mut file = AtomicFile::create(&path).map_err(io)?;
            file.write_all(kept.as_bytes()).map_err(io)?;
            file.commit().map_err(io)?;
        }
        let file = OpenOptions::new().append(true).open(&path).map_err(io)?;
        Ok(Self { path, file })
    }

    pub(super) fn write(&mut self, record: &TrainRecord) -> Result<()> {
        let line = format!("{}\n", record.json());
        self.file.write_all(line.as_bytes()).map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

fn step_of(line: &str) -> Option<u64> {
    line.strip_suffix('\n').and_then(|line| serde_json::from_str::<Value>(line).ok())?.get("step")?.as_u64()
}

/// Reads the log of a run; lines that are none are left out.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn read(path: &Path) -> Result<Vec<TrainRecord>> {
    let bytes = fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    let record = |line: &str| TrainRecord::from_json(&serde_json::from_str(line).ok()?);
    Ok(text.lines().filter_map(record).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_behind_a_checkpoint_go() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("log.jsonl");
        let record = |step| TrainRecord { step, loss: f64::NAN, saturated: Some(0.5), ..Default::default() };
        let mut log = Log::open(path.clone(), 0).unwrap();
        (1..=5).for_each(|step| log.write(&record(step)).unwrap());
        // Killed in the middle of a line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\": 2, \"lo").unwrap();
        let mut log = Log::open(path.clone(), 3).unwrap();
        log.write(&record(4)).unwrap();
        let steps: Vec<u64> = read(&path).unwrap().iter().map(|record| record.step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        assert!(read(&path).unwrap()[0].loss.is_nan());
        assert!(matches!(read(&place.path().join("other")), Err(Error::Io { .. })));
    }
}
