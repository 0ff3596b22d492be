//! Other libraries to compare with, in a folder of cargo's target folder.

use std::env::consts::EXE_SUFFIX;
use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use crate::workspace::Result;

/// What the scripts import, which are also the names of the packages.
const MODULES: [&str; 4] = ["torch", "numpy", "ml_dtypes", "safetensors"];

/// Returns an interpreter that has all [`MODULES`], in an environment of its own in `folder`.
pub(super) fn python(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    let has = |module: &str| {
        cmd!(sh, "{python} -c").arg(format!("import {module}")).quiet().ignore_stderr().run().is_ok()
    };
    if MODULES.iter().all(|module| has(module)) {
        return Ok(python);
    }
    println!("bench: installing {} in {}", MODULES.join(", "), folder.display());
    cmd!(sh, "python3 -m venv {folder}").run().map_err(|error| {
        format!(
            "bench: no Python environment in {}: {error}; install python3 with venv and pip",
            folder.display()
        )
    })?;
    let pip = folder.join("bin/pip");
    if !has("torch") {
        // The build for CPUs alone is a tenth as large, where its index can be reached.
        let index = "https://download.pytorch.org/whl/cpu";
        let small = cmd!(sh, "{pip} install --quiet --retries 0 --timeout 10 torch --index-url {index}");
        if small.ignore_stderr().run().is_err() {
            cmd!(sh, "{pip} install --quiet --no-cache-dir torch").run()?;
        }
    }
    // torch.compile needs setuptools.
    cmd!(sh, "{pip} install --quiet {MODULES...} setuptools").run()?;
    match MODULES.iter().find(|module| !has(module)) {
        None => Ok(python),
        Some(module) => {
            let python = python.display();
            Err(format!("bench: {python} cannot import {module}: remove the folder to install it anew")
                .into())
        }
    }
}

/// Returns the program that multiplies with the crates faer and gemm. It is a workspace of its own, so that nothing else
/// compiles them.
pub(super) fn crates(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    let (manifest, target) = ("fp8-nn/bench-peers/crates/Cargo.toml", folder.join("crates"));
    cmd!(sh, "cargo build --quiet --release --manifest-path {manifest} --target-dir {target}").run()?;
    Ok(target.join(format!("release/bench-crates{EXE_SUFFIX}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_python_is_told_what_to_install() {
        let folder = tempfile::tempdir().unwrap();
        let sh = crate::workspace::shell().unwrap();
        sh.set_var("PATH", folder.path());
        let peers = folder.path().join("peers");
        let error = python(&sh, &peers).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("bench: no Python environment in {}: ", peers.display())),
            "{error}"
        );
        assert!(error.ends_with("; install python3 with venv and pip"), "{error}");
    }
}
