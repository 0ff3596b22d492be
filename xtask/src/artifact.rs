//! The programs and libraries that cargo built, and their paths, as cargo reports them.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::workspace::Result;

/// The conformance suite's program. Beside it lies the simulated device's library, which it loads.
pub(crate) fn conformance(sh: &Shell) -> Result<PathBuf> {
    let found = of_tests(sh, "test", "conformance")?;
    found.ok_or_else(|| "cargo reports no program for the test conformance".into())
}

/// Builds the conformance suite and returns the file of this kind and name that cargo reports.
fn of_tests(sh: &Shell, kind: &str, name: &str) -> Result<Option<PathBuf>> {
    let format = "json-render-diagnostics";
    let options = ["--workspace", "--all-features", "--test", "conformance", "--no-run"];
    let messages = cmd!(sh, "cargo test {options...} --message-format {format}").quiet().read()?;
    Ok(messages.lines().find_map(|line| file(line, kind, name)))
}

/// Builds a program and the simulated device's library, with the features that all tests use, because the examples depend on the library.
/// Returns both files.
pub(crate) fn with_simulator(sh: &Shell, program: &str) -> Result<[PathBuf; 2]> {
    let format = "json-render-diagnostics";
    let options = ["--workspace", "--all-features", "--examples", "--bin", program];
    let messages = cmd!(sh, "cargo build {options...} --message-format {format}").quiet().read()?;
    let find = |kind, name| {
        let found = messages.lines().find_map(|line| file(line, kind, name));
        found.ok_or_else(|| format!("cargo reports no file for the {kind} {name}"))
    };
    Ok([find("bin", program)?, find("cdylib", "fp8_cuda_sim")?])
}

/// The simulated device's library.
pub(crate) fn simulator(sh: &Shell) -> Result<PathBuf> {
    let format = "json-render-diagnostics";
    let messages = cmd!(sh, "cargo build -p fp8-cuda-sim --message-format {format}").quiet().read()?;
    let found = messages.lines().find_map(|line| file(line, "cdylib", "fp8_cuda_sim"));
    found.ok_or_else(|| "cargo reports no library for fp8-cuda-sim".into())
}

/// A program or a dynamic library that cargo built.
pub(crate) struct Built {
    /// The name of its package's folder.
    folder: String,
    name: String,
    kind: Vec<String>,
    pub(crate) file: PathBuf,
}

impl Built {
    pub(crate) fn is(&self, folder: &str, kind: &str, name: &str) -> bool {
        self.is_a(kind, name) && self.folder == folder
    }

    /// Whether it is of this kind and of the package in this folder, whatever its name is.
    pub(crate) fn is_of(&self, folder: &str, kind: &str) -> bool {
        self.is_a(kind, &self.name) && self.folder == folder
    }

    fn is_a(&self, kind: &str, name: &str) -> bool {
        self.name == name && self.kind.iter().any(|of| of == kind)
    }
}

/// Returns the program or the dynamic library that a message of cargo's announces, if it announces one.
pub(crate) fn built(message: &str) -> Option<Built> {
    #[derive(Deserialize)]
    struct Artifact {
        #[serde(default)]
        manifest_path: PathBuf,
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
    let is_library =
        |path: &PathBuf| path.extension().is_some_and(|end| end == "so" || end == "dylib" || end == "dll");
    let file = artifact.executable.or_else(|| artifact.filenames.into_iter().find(is_library))?;
    let folder = artifact.manifest_path.parent().and_then(Path::file_name).unwrap_or_default();
    let Target { name, kind } = artifact.target;
    Some(Built { folder: folder.to_string_lossy().into_owned(), name, kind, file })
}

/// The program, or the dynamic library, that a message of cargo's announces for this target.
pub(crate) fn file(message: &str, kind: &str, name: &str) -> Option<PathBuf> {
    built(message).filter(|built| built.is_a(kind, name)).map(|built| built.file)
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
