//! The program `fp8`: its output, the mistakes of people, kills and full disks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod data_parallel;
mod destinations;
mod endings;
mod fine_tuning;
#[expect(dead_code, reason = "the tests of fp8-hf use the rest")]
#[path = "../../../fp8-hf/tests/suite/folders.rs"]
mod folders;
mod hostile;
mod launching;
mod mistakes;
mod output;
mod running;
mod start_token;
mod tensor_parallel;
#[path = "../../../fp8-hf/tests/suite/trained.rs"]
mod trained;

use crate::folders::{copy, golden};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The program, in this folder.
pub(crate) fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fp8"));
    // Of the simulated GPU: the tests of the kernels look for races.
    command.current_dir(folder).stdin(Stdio::null()).env("FP8_SIM_RACES", "0");
    command
}

/// Exit code, stdout and stderr.
pub(crate) fn run<S: AsRef<OsStr>>(
    folder: &Path,
    args: impl IntoIterator<Item = S>,
) -> (i32, String, String) {
    let output = command(folder).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

/// Returns the output of a run that succeeds. Nothing may go to stderr.
pub(crate) fn printed(folder: &Path, line: &str) -> String {
    let (code, out, error) = run(folder, line.split_whitespace());
    assert_eq!((code, error.as_str()), (0, ""), "{line}");
    out
}

/// A folder with `model`, which has a tokenizer, and a text.
pub(crate) fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_bf16"), &place.path().join("model"));
    fs::write(place.path().join("text.txt"), "The sea is wide, and the ship is small… ".repeat(40)).unwrap();
    place
}

/// The names of all files and folders, with sizes.
pub(crate) fn listing(folder: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let size =
            path.symlink_metadata().map_or(0, |metadata| if metadata.is_dir() { 0 } else { metadata.len() });
        found.push((path.display().to_string(), size));
        if path.is_dir() {
            found.append(&mut listing(&path));
        }
    }
    found.sort();
    found
}
