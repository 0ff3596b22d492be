//! Other libraries to compare with, in a folder of cargo's target folder.

use std::env::consts::EXE_SUFFIX;
use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use crate::python;
use crate::workspace::Result;

/// The modules that the scripts import. Each package has the name of its module.
const MODULES: [&str; 4] = ["torch", "numpy", "ml_dtypes", "safetensors"];

/// Returns an interpreter that has all [`MODULES`], in an environment of its own in `folder`.
pub(super) fn python(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    python::environment(sh, "bench", folder, &MODULES)
}

/// Returns the program that multiplies with the crates faer and gemm. It is a workspace of its own, so that nothing else
/// compiles them.
pub(super) fn crates(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    let (manifest, target) = ("fp8-nn/bench-peers/crates/Cargo.toml", folder.join("crates"));
    cmd!(sh, "cargo build --quiet --release --manifest-path {manifest} --target-dir {target}").run()?;
    Ok(target.join(format!("release/bench-crates{EXE_SUFFIX}")))
}
