//! The lock of a run's folder.

use crate::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

const NAME: &str = ".lock";

/// A folder in which no other process trains. The system ends it with the process, however that ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub(super) fn new(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|source| Error::Io { path, source })?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(Error::File {
                path: folder.to_owned(),
                problem: "another process trains there: wait for it, or stop it".to_owned(),
            }),
            // A file system without locks has none to respect.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Self { _file: file }),
        }
    }
}
