//! Text from files, for training, evaluation and calibration.

use crate::{Error, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the bytes of a file, or of all files of a folder.
///
/// A folder gives all its files, subfolders and hidden ones included, joined without separator in the order of their paths
/// (compared component by component). Links to files are followed, links to folders are not, since they may form a cycle.
///
/// ```
/// let folder = std::env::temp_dir().join(format!("fp8-text-{}", std::process::id()));
/// std::fs::create_dir_all(folder.join("a"))?;
/// std::fs::write(folder.join("b.txt"), "two")?;
/// std::fs::write(folder.join("a/z.txt"), "one ")?;
/// assert_eq!(fp8_nn::text::read(&folder)?, b"one two");
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Io`], which names the file or folder that cannot be read; a path that is neither of both.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let kind = fs::metadata(path).map_err(|error| unreadable(path, error))?;
    if kind.is_file() {
        return fs::read(path).map_err(|error| unreadable(path, error));
    }
    if !kind.is_dir() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a folder");
        return Err(unreadable(path, error));
    }
    let mut files = Vec::new();
    list(path, &mut files)?;
    files.sort();
    let mut bytes = Vec::new();
    for file in &files {
        bytes.extend(fs::read(file).map_err(|error| unreadable(file, error))?);
    }
    Ok(bytes)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|error| unreadable(folder, error))? {
        let entry = entry.map_err(|error| unreadable(folder, error))?;
        let path = entry.path();
        if entry.file_type().map_err(|error| unreadable(&path, error))?.is_dir() {
            list(&path, files)?;
        } else if fs::metadata(&path).map_err(|error| unreadable(&path, error))?.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn unreadable(path: &Path, source: io::Error) -> Error {
    Error::Io { path: path.to_owned(), source }
}
