//! Files that are read from start to end: line by line, or as one document in parts.

use crate::files::{open, unreadable};
use crate::{Error, Result};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

/// Longer lines are refused.
const MAX_LINE: u64 = 256 << 20;
/// The bytes of a document that are read at once.
const PART: u64 = 1 << 20;

const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

/// The lines of a file, without blank ones.
#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = open(path).map_err(|error| error.expecting("expected a file of JSON lines"))?;
        Ok(Self { path: path.to_owned(), reader: BufReader::with_capacity(1 << 18, file), number: 0 })
    }

    /// Reads the next line that is not blank, with its number from 1 on.
    pub(super) fn read(&mut self) -> Result<Option<(u64, Vec<u8>)>> {
        loop {
            let mut line = Vec::new();
            let read = (&mut self.reader).take(MAX_LINE + 1).read_until(b'\n', &mut line);
            let count = read.map_err(|error| unreadable(&self.path, &error))?;
            if count == 0 {
                return Ok(None);
            }
            self.number += 1;
            if line.len() as u64 > MAX_LINE {
                let problem = format!("more than {} MiB: expected one JSON object a line", MAX_LINE >> 20);
                return Err(self.problem(self.number, &problem));
            }
            if self.number == 1 && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            line.truncate(line.trim_ascii_end().len());
            if !line.trim_ascii().is_empty() {
                return Ok(Some((self.number, line)));
            }
        }
    }

    /// Returns an error about a line.
    pub(super) fn problem(&self, number: u64, problem: &str) -> Error {
        Error::File { path: self.path.clone(), problem: format!("line {number}: {problem}") }
    }
}

/// A document, read in parts.
#[derive(Debug)]
pub(super) struct Document {
    path: PathBuf,
    file: File,
    /// Bytes that are no whole character yet.
    bytes: Vec<u8>,
    /// The bytes before them.
    offset: u64,
}

impl Document {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = open(path).map_err(|error| error.expecting("expected a file of text"))?;
        Ok(Self { path: path.to_owned(), file, bytes: Vec::new(), offset: 0 })
    }

    /// Appends the next part to a text. Returns false at the end.
    pub(super) fn read(&mut self, text: &mut String) -> Result<bool> {
        let problem = |at: u64| Error::File {
            path: self.path.clone(),
            problem: format!("byte {} is not UTF-8: save the text as UTF-8", at + 1),
        };
        let read = (&mut self.file).take(PART).read_to_end(&mut self.bytes);
        let count = read.map_err(|error| unreadable(&self.path, &error))?;
        if self.offset == 0 && self.bytes.starts_with(BYTE_ORDER_MARK) {
            self.bytes.drain(..BYTE_ORDER_MARK.len());
            self.offset = BYTE_ORDER_MARK.len() as u64;
        }
        let valid = match str::from_utf8(&self.bytes) {
            Ok(part) => {
                text.push_str(part);
                part.len()
            }
            Err(error) => {
                let valid = error.valid_up_to();
                let is_broken = error.error_len().is_some() || count == 0;
                match str::from_utf8(&self.bytes[..valid]) {
                    Ok(part) if !is_broken => text.push_str(part),
                    _ => return Err(problem(self.offset + valid as u64)),
                }
                valid
            }
        };
        self.bytes.drain(..valid);
        self.offset += valid as u64;
        Ok(count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn documents_in_parts_are_whole_texts() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("text");
        let long = "aü🙂".repeat(PART as usize / 3);
        for text in ["", "a", "\u{FEFF}", "\u{FEFF}a\u{FEFF}\r\n", &long] {
            fs::write(&path, text).unwrap();
            let (mut document, mut read) = (Document::open(&path).unwrap(), String::new());
            while document.read(&mut read).unwrap() {}
            assert_eq!(read, text.strip_prefix('\u{FEFF}').unwrap_or(text));
        }
        for (bytes, at) in [(&b"ab\xe9\n"[..], 3), (b"a\xc3", 2), (b"\xef\xbb\xbf\xff", 4)] {
            fs::write(&path, bytes).unwrap();
            let (mut document, mut read) = (Document::open(&path).unwrap(), String::new());
            let error = loop {
                match document.read(&mut read) {
                    Ok(more) => assert!(more),
                    Err(error) => break error.to_string(),
                }
            };
            assert!(error.contains(&format!("byte {at} is not UTF-8: save the text as UTF-8")), "{error}");
        }
    }

    #[test]
    fn blank_lines_are_counted_and_skipped() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lines");
        fs::write(&path, "\u{FEFF}a\r\n\n  \nb").unwrap();
        let mut lines = Lines::open(&path).unwrap();
        assert_eq!(lines.read().unwrap(), Some((1, b"a".to_vec())));
        assert_eq!(lines.read().unwrap(), Some((4, b"b".to_vec())));
        assert_eq!(lines.read().unwrap(), None);
        assert!(lines.problem(4, "x").to_string().ends_with("lines: line 4: x"));
        let error = Lines::open(&place.path().join("none")).unwrap_err().to_string();
        assert!(error.ends_with("none: not found: expected a file of JSON lines"), "{error}");
    }
}
