//! The text that an option names: a file, a folder of files, or standard input.

use crate::failure::Failure;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// What stands for standard input.
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
        for file in fp8_nn::text::files(path).map_err(unreadable)? {
            let mut read = fp8_nn::text::read(&file).map_err(unreadable)?;
            // A single large file is not copied.
            if bytes.is_empty() {
                bytes = read
            } else {
                bytes.append(&mut read)
            }
            ends.push((bytes.len(), file));
        }
    }
    // Joined first: a text that was split may be cut within a character.
    let text = String::from_utf8(bytes).map_err(|error| not_text(option, path, &ends, &error))?;
    match text.is_empty() {
        true => Err(refused(format!("{}: it is empty: expected a text", path.display()))),
        false => Ok(text),
    }
}

fn not_text(
    option: &str,
    path: &Path,
    ends: &[(usize, PathBuf)],
    error: &std::string::FromUtf8Error,
) -> Failure {
    let at = error.utf8_error().valid_up_to();
    let file = ends.partition_point(|&(end, _)| end <= at);
    let start = file.checked_sub(1).map_or(0, |before| ends[before].0);
    let file = ends.get(file).map_or(path, |(_, file)| file);
    let expected = "expected text, or a folder of text files";
    Failure::input(format!("{option} {}: not valid UTF-8 at byte {}: {expected}", file.display(), at - start))
}
