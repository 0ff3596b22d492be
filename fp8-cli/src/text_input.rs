//! The text that an option names: a file, a folder of files, or standard input.

use crate::failure::Failure;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The paths that mean standard input.
const STDIN: [&str; 2] = ["-", "/dev/stdin"];
const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

/// Reads the text that an option names, as UTF-8.
pub(crate) fn read_text(option: &str, path: &Path) -> Result<String, Failure> {
    let refused = |problem: String| Failure::input(format!("{option} {problem}"));
    let (mut bytes, mut ends) = (Vec::new(), Vec::new());
    if STDIN.iter().any(|name| path == Path::new(name)) {
        let read = std::io::stdin().lock().read_to_end(&mut bytes);
        read.map_err(|error| refused(format!("{}: standard input: {error}", path.display())))?;
        if bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
    } else {
        let unreadable = |error| refused(format!("{error}: expected a text file, or a folder of text files"));
        for file in fp8_hf::text::files(path).map_err(unreadable)? {
            let mut read = fp8_hf::text::read(&file).map_err(unreadable)?;
            // The byte order mark, which counts in the file's own bytes.
            let whole = std::fs::metadata(&file).map_or(0, |metadata| metadata.len());
            let mark = usize::try_from(whole).unwrap_or(0).saturating_sub(read.len());
            // A single large file is not copied.
            if bytes.is_empty() {
                bytes = read
            } else {
                bytes.append(&mut read)
            }
            ends.push(End { at: bytes.len(), mark, file });
        }
    }
    // Joined first: a text that was split may be cut within a character.
    let text = String::from_utf8(bytes).map_err(|error| not_text(option, path, &ends, &error))?;
    match text.is_empty() {
        true => Err(refused(format!("{}: it is empty: expected a text", path.display()))),
        false => Ok(text),
    }
}

/// The end of a file in the joined text.
struct End {
    at: usize,
    /// The bytes at its start that were left out.
    mark: usize,
    file: PathBuf,
}

fn not_text(option: &str, path: &Path, ends: &[End], error: &std::string::FromUtf8Error) -> Failure {
    let at = error.utf8_error().valid_up_to();
    let index = ends.partition_point(|end| end.at <= at);
    let start = index.checked_sub(1).map_or(0, |before| ends[before].at);
    let (file, mark) = ends.get(index).map_or((path, 0), |end| (&end.file, end.mark));
    let expected = "expected text, or a folder of text files";
    Failure::input(format!(
        "{option} {}: not valid UTF-8 at byte {}: {expected}",
        file.display(),
        at - start + mark
    ))
}
