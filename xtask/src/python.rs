//! Python environments for what other libraries compute.

use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use crate::workspace::Result;

/// Returns an interpreter that can import these modules, which are also the names of their packages. It is in an environment of its
/// own in `folder`. Messages begin with the task.
pub(crate) fn environment(sh: &Shell, task: &str, folder: &Path, modules: &[&str]) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    let has = |module: &str| {
        cmd!(sh, "{python} -c").arg(format!("import {module}")).quiet().ignore_stderr().run().is_ok()
    };
    if modules.iter().all(|module| has(module)) {
        return Ok(python);
    }
    println!("{task}: installing {} in {}", modules.join(", "), folder.display());
    cmd!(sh, "python3 -m venv {folder}").run().map_err(|error| {
        format!(
            "{task}: no Python environment in {}: {error}; install python3 with venv and pip",
            folder.display()
        )
    })?;
    let pip = folder.join("bin/pip");
    if modules.contains(&"torch") && !has("torch") {
        // The build for CPUs alone is a tenth as large, where its index can be reached.
        let index = "https://download.pytorch.org/whl/cpu";
        let small = cmd!(sh, "{pip} install --quiet --retries 0 --timeout 10 torch --index-url {index}");
        if small.ignore_stderr().run().is_err() {
            cmd!(sh, "{pip} install --quiet --no-cache-dir torch").run()?;
        }
        // torch.compile needs it.
        cmd!(sh, "{pip} install --quiet setuptools").run()?;
    }
    cmd!(sh, "{pip} install --quiet {modules...}").run()?;
    match modules.iter().find(|module| !has(module)) {
        None => Ok(python),
        Some(module) => {
            let python = python.display();
            Err(format!("{task}: {python} cannot import {module}: remove the folder to install it anew")
                .into())
        }
    }
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
        let error = environment(&sh, "bench", &peers, &["numpy"]).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("bench: no Python environment in {}: ", peers.display())),
            "{error}"
        );
        assert!(error.ends_with("; install python3 with venv and pip"), "{error}");
    }
}
