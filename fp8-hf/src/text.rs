//! Text from files, for training, evaluation and calibration.

use crate::{Error, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The byte order mark, which some editors write at the start of a text.
const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

/// Returns the bytes of a file, or of all files of a folder.
///
/// A folder gives all its files, those of subfolders included, joined without separator in the order of their paths (compared
/// component by component). Files and subfolders whose names begin with a dot are skipped. Links to files are followed, links to
/// folders are not, since they may form a cycle. The UTF-8 byte order mark at the start of a file is left out.
///
/// ```
/// let folder = std::env::temp_dir().join(format!("fp8-text-{}", std::process::id()));
/// std::fs::create_dir_all(folder.join("a"))?;
/// std::fs::write(folder.join("b.txt"), "two")?;
/// std::fs::write(folder.join("a/z.txt"), "one ")?;
/// assert_eq!(fp8_hf::text::read(&folder)?, b"one two");
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Io`], which names the file or folder that cannot be read; a path that is neither.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for file in &files(path)? {
        let mut read = fs::read(file).map_err(|error| unreadable(file, error))?;
        if read.starts_with(BYTE_ORDER_MARK) {
            read.drain(..BYTE_ORDER_MARK.len());
        }
        // A single large file is not copied.
        if bytes.is_empty() { bytes = read } else { bytes.append(&mut read) }
    }
    Ok(bytes)
}

/// Returns the paths that [`read`] reads, in its order: that of a file, or those of all files of a folder.
///
/// ```
/// let folder = std::env::temp_dir().join(format!("fp8-text-files-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// std::fs::write(folder.join("b.txt"), "two")?;
/// std::fs::write(folder.join("a.txt"), "one")?;
/// assert_eq!(fp8_hf::text::files(&folder)?, [folder.join("a.txt"), folder.join("b.txt")]);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`read`].
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let kind = fs::metadata(path).map_err(|error| unreadable(path, error))?;
    if kind.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    if !kind.is_dir() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a folder");
        return Err(unreadable(path, error));
    }
    let mut files = Vec::new();
    list(path, &mut files)?;
    files.sort();
    Ok(files)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|error| unreadable(folder, error))? {
        let entry = entry.map_err(|error| unreadable(folder, error))?;
        let path = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_files_and_byte_order_marks_are_left_out() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join(".git")).unwrap();
        for (name, text) in
            [("a", "\u{FEFF}one "), ("b", "two\u{FEFF}"), (".DS_Store", "junk"), (".git/c", "junk")]
        {
            fs::write(place.path().join(name), text).unwrap();
        }
        assert_eq!(read(place.path()).unwrap(), "one two\u{FEFF}".as_bytes());
        // A hidden file that is named is read.
        assert_eq!(read(&place.path().join(".DS_Store")).unwrap(), b"junk");
    }
}
