//! Files of a folder: whether they are there, and what is said if they cannot be read.

use crate::{Error, Result};
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::path::Path;

/// Larger texts are refused.
const MAX_TEXT: u64 = 16 << 20;

/// Returns the error for a file or folder that cannot be read: also that it is a link to nothing.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    let problem = match (error.kind(), fs::read_link(path)) {
        (ErrorKind::NotFound, Ok(to)) => format!(
            "it is a link to {}, which does not exist: download it again, or remove the link",
            to.display()
        ),
        (ErrorKind::NotFound, Err(_)) => return Error::NotFound { path: path.to_owned() },
        _ => format!("cannot be read: {error}"),
    };
    Error::File { path: path.to_owned(), problem }
}

/// Returns true if there is something at `path`, also a link to nothing.
pub(super) fn exists(path: &Path) -> bool {
    !matches!(path.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound)
}

/// Opens a file. Opening a pipe would wait for a writer.
pub(super) fn open(path: &Path) -> Result<File> {
    let metadata = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    if !metadata.is_file() {
        return Err(Error::File { path: path.to_owned(), problem: "not a file".into() });
    }
    File::open(path).map_err(|error| unreadable(path, &error))
}

/// Reads a small text file.
pub(super) fn read_text(path: &Path) -> Result<String> {
    let problem = |problem: String| Error::File { path: path.to_owned(), problem };
    let file = open(path)?;
    let mut text = String::new();
    let read = file.take(MAX_TEXT + 1).read_to_string(&mut text).map_err(|error| unreadable(path, &error))?;
    match read as u64 > MAX_TEXT {
        true => Err(problem(format!("more than {MAX_TEXT} bytes: expected a short text"))),
        false => Ok(text),
    }
}
