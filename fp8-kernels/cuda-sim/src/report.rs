//! The one place that writes to the process's standard error.

use std::io::Write;

/// Prints a line; a closed standard error is no reason to fail.
pub(crate) fn print(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "fp8-cuda-sim: {text}");
}
