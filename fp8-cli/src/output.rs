//! Prints to stdout.

use crate::failure::Failure;
use std::io::{self, ErrorKind, Write as _};

/// Prints a text. Returns false if nobody reads it any more: a reader such as `head` has closed the pipe, which is no error.
pub(crate) fn print(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::Work(format!("stdout: {error}"))),
    }
}
