//! What of the peers' scripts needs no GPU: their calls of Transformer Engine's core library, on a library that stands in
//! for it and computes in the CPU's memory (`examples/te_core_stand_in.rs`).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use xshell::{Shell, cmd};

use crate::artifact;
use crate::workspace::{Result, Workspace, root};

/// A function that takes part in two cases, both of which fail if it does.
const FAILING: &str = "nvte_swiglu";

/// The calls in any Python; all cases where a Python has torch.
pub(crate) fn dry_run(sh: &Shell) -> Result<String> {
    if cmd!(sh, "python3 --version").quiet().ignore_stderr().ignore_stdout().run().is_err() {
        return Ok("left out: python3 is not at hand".to_owned());
    }
    let library = stand_in(sh)?;
    let checks = run(Path::new("python3"), "te_core_check.py", &library, &[])?;
    let checks = ended_well(&checks)?.trim().to_owned();
    let Some(python) = with_torch(sh)? else {
        return Ok(format!("{checks} of the calls; left out: the cases, for no Python here has torch"));
    };
    let rows = cases(&python, &library, &[])?;
    if let Some(row) = rows.iter().find(|row| !row.contains("\"dry run\"")) {
        return Err(format!("a peer's case did not run: {row}").into());
    }
    let failing = cases(&python, &library, &[("FP8_STAND_IN_FAILS", FAILING)])?;
    let ended = format!("ended by signal SIGABRT: {FAILING} was told to fail");
    let failed: Vec<_> = failing.iter().filter(|row| !row.contains("\"dry run\"")).collect();
    if failing.len() != rows.len() || failed.len() != 2 || !failed.iter().all(|row| row.contains(&ended)) {
        return Err(format!(
            "{} of {} rows beside a failing function: {failed:?}",
            failing.len(),
            rows.len()
        )
        .into());
    }
    let wrong = cases(&python, &library, &[("FP8_STAND_IN_WRONG", FAILING)])?;
    match wrong.iter().filter(|row| row.contains("failed: Differs")).count() {
        2 => Ok(format!("{checks} of the calls, {} cases", rows.len())),
        count => Err(format!("{count} of 2 cases with a wrong result are noticed").into()),
    }
}

/// The rows that all cases print.
fn cases(python: &Path, library: &Path, environment: &[(&str, &str)]) -> Result<Vec<String>> {
    let output = run(python, "bench_te_core.py", library, environment)?;
    Ok(ended_well(&output)?.lines().map(str::to_owned).collect())
}

fn run(python: &Path, script: &str, library: &Path, environment: &[(&str, &str)]) -> Result<Output> {
    let mut command = Command::new(python);
    // No __pycache__ beside the sources.
    command.arg("-B").arg(root().join("xtask/src/gpu_bundle").join(script));
    if script == "bench_te_core.py" {
        command.arg("--dry-run");
    }
    command.env("FP8_TE_LIBRARY", library).envs(environment.iter().copied());
    Ok(command.output().map_err(|error| format!("{}: {error}", python.display()))?)
}

fn ended_well(output: &Output) -> Result<String> {
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into())
    }
}

fn stand_in(sh: &Shell) -> Result<PathBuf> {
    const NAME: &str = "te_core_stand_in";
    let format = "json-render-diagnostics";
    // All examples: what the step of the examples builds.
    let messages = cmd!(sh, "cargo build --workspace --all-features --examples --message-format {format}")
        .quiet()
        .read()?;
    let found = messages.lines().find_map(|line| artifact::file(line, "example", NAME));
    found.ok_or_else(|| format!("cargo names no library for the example {NAME}").into())
}

/// That of the codec's benchmark, or the system's.
fn with_torch(sh: &Shell) -> Result<Option<PathBuf>> {
    let peers = Workspace::read(sh)?.target_directory.join("peers/bin/python");
    let has_torch = |python: &Path| {
        cmd!(sh, "{python} -c").arg("import torch").quiet().ignore_stderr().ignore_stdout().run().is_ok()
    };
    Ok([peers, PathBuf::from("python3")].into_iter().find(|python| has_torch(python)))
}
