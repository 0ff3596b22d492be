//! What cargo built and where it put it, as cargo itself says.

use std::path::PathBuf;

use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::workspace::Result;

/// The conformance suite's program. Beside it lies the simulated device's library, which it loads.
pub(crate) fn conformance(sh: &Shell) -> Result<PathBuf> {
    let format = "json-render-diagnostics";
    let options = ["--workspace", "--all-features", "--test", "conformance", "--no-run"];
    let messages = cmd!(sh, "cargo test {options...} --message-format {format}").quiet().read()?;
    let found = messages.lines().find_map(|line| file(line, "test", "conformance"));
    found.ok_or_else(|| "cargo names no program for the test conformance".into())
}

/// The simulated device's library.
pub(crate) fn simulator(sh: &Shell) -> Result<PathBuf> {
    let format = "json-render-diagnostics";
    let messages = cmd!(sh, "cargo build -p fp8-cuda-sim --message-format {format}").quiet().read()?;
    let found = messages.lines().find_map(|line| file(line, "cdylib", "fp8_cuda_sim"));
    found.ok_or_else(|| "cargo names no library for fp8-cuda-sim".into())
}

/// The program, or the dynamic library, that a message of cargo's announces for this target.
fn file(message: &str, kind: &str, name: &str) -> Option<PathBuf> {
    #[derive(Deserialize)]
    struct Artifact {
        target: Target,
        executable: Option<PathBuf>,
        filenames: Vec<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
    }
    let artifact: Artifact = serde_json::from_str(message).ok()?;
    let fits = artifact.target.name == name && artifact.target.kind.iter().any(|of| of == kind);
    let is_library =
        |path: &PathBuf| path.extension().is_some_and(|end| end == "so" || end == "dylib" || end == "dll");
    fits.then(|| artifact.executable.or_else(|| artifact.filenames.into_iter().find(is_library)))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_libraries_are_told_apart_and_other_messages_passed_over() {
        let test = r#"{"reason":"compiler-artifact","target":{"name":"conformance","kind":["test"]},"executable":"/t/c-1","filenames":["/t/c-1"]}"#;
        assert_eq!(file(test, "test", "conformance"), Some("/t/c-1".into()));
        assert_eq!(file(test, "test", "snapshots"), None);
        let library = r#"{"reason":"compiler-artifact","target":{"name":"fp8_cuda_sim","kind":["cdylib","rlib"]},"executable":null,"filenames":["/t/libfp8_cuda_sim.rlib","/t/libfp8_cuda_sim.so"]}"#;
        assert_eq!(file(library, "cdylib", "fp8_cuda_sim"), Some("/t/libfp8_cuda_sim.so".into()));
        assert_eq!(file(r#"{"reason":"build-finished","success":true}"#, "test", "a"), None);
    }
}
