//! A dry run of the peers' scripts, which needs no GPU: each case runs on the CPU, in a small size, and has the name of a
//! case of `gpu_bench`. A stand-in that computes in the CPU's memory (`xtask/checks/examples/te_core_stand_in`) replaces Transformer
//! Engine's core library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, root};
use crate::{artifact, sim};

/// A function that takes part in two cases, both of which fail if it does.
const FAILING: &str = "nvte_swiglu";
const CALLS: &str = "te_core_check.py";
const CORE: &str = "bench_te_core.py";
/// Without what torch compiles, which takes minutes.
const PEERS: [&str; 3] = ["bench_peers.py", "--compiled", "no"];

/// The calls of the core library in any Python; all cases where a Python has torch.
pub(crate) fn dry_run(sh: &Shell) -> Result<String> {
    if cmd!(sh, "python3 --version").quiet().ignore_stderr().ignore_stdout().run().is_err() {
        return Ok("skipped: python3 is not installed".to_owned());
    }
    let built = Programs::build(sh)?;
    let checks = built.script(Path::new("python3"), &[CALLS], &[])?.trim().to_owned();
    let Some(python) = with_torch(sh)? else {
        return Ok(format!("{checks} of the calls; cases skipped: no Python on this machine has torch"));
    };
    let core = built.rows(&python, &[CORE], &[])?;
    let peers = built.rows(&python, &PEERS, &[])?;
    let ours = built.our_cases()?;
    for row in core.iter().chain(&peers) {
        if !row.ran() {
            return Err(format!("a peer's case did not run: {row:?}").into());
        }
        if row.section != "copy" && !ours.contains(&format!("{} {}", row.section, row.case)) {
            return Err(format!("no case of gpu_bench has the name of {row:?}").into());
        }
    }

    let failing = built.rows(&python, &[CORE], &[("FP8_STAND_IN_FAILS", FAILING)])?;
    let ended = format!("failed: ended by signal SIGABRT: {FAILING} was told to fail");
    let noted = failing.iter().filter(|row| row.note == ended).count();
    if (failing.len(), noted) != (core.len(), 2) {
        return Err(format!(
            "{} rows of a failing function, {noted} of them report the failure",
            failing.len()
        )
        .into());
    }
    let wrong = built.rows(&python, &[CORE], &[("FP8_STAND_IN_WRONG", FAILING)])?;
    match wrong.iter().filter(|row| row.note.starts_with("failed: Differs")).count() {
        2 => Ok(format!("{checks} of the calls, {} cases", core.len() + peers.len())),
        count => Err(format!("{count} of 2 cases with a wrong result are detected").into()),
    }
}

#[derive(Debug, Deserialize)]
struct Row {
    section: String,
    case: String,
    note: String,
}

impl Row {
    fn ran(&self) -> bool {
        self.note == "dry run"
    }
}

struct Programs {
    stand_in: PathBuf,
    gpu_bench: PathBuf,
    simulator: PathBuf,
}

impl Programs {
    /// All examples: what the step of the examples builds.
    fn build(sh: &Shell) -> Result<Self> {
        let format = "json-render-diagnostics";
        let options = ["--workspace", "--all-features", "--examples"];
        let messages = cmd!(sh, "cargo build {options...} --message-format {format}").quiet().read()?;
        let find = |kind, name| {
            let found = messages.lines().find_map(|line| artifact::file(line, kind, name));
            found.ok_or_else(|| format!("cargo reports no file for the {kind} {name}"))
        };
        Ok(Self {
            stand_in: find("example", "te_core_stand_in")?,
            gpu_bench: find("example", "gpu_bench")?,
            simulator: find("cdylib", "fp8_cuda_sim")?,
        })
    }

    /// Runs a script and returns its standard output.
    fn script(&self, python: &Path, words: &[&str], environment: &[(&str, &str)]) -> Result<String> {
        let mut command = Command::new(python);
        // -B: no __pycache__ beside the sources.
        command.arg("-B").arg(root().join("xtask/src/gpu_bundle").join(words[0])).args(&words[1..]);
        if words[0] != CALLS {
            command.arg("--dry-run");
        }
        command.env("FP8_TE_LIBRARY", &self.stand_in).envs(environment.iter().copied());
        finish(command)
    }

    fn rows(&self, python: &Path, words: &[&str], environment: &[(&str, &str)]) -> Result<Vec<Row>> {
        let text = self.script(python, words, environment)?;
        let row = |line| serde_json::from_str(line).map_err(|error| format!("{line}: {error}").into());
        text.lines().map(row).collect()
    }

    /// Section and case of all that `gpu_bench` measures.
    fn our_cases(&self) -> Result<BTreeSet<String>> {
        let folder = tempfile::tempdir()?;
        sim::fill(folder.path(), &self.simulator)?;
        let mut command = Command::new(&self.gpu_bench);
        command.arg("--dry-run").env("FP8_CUDA_LIB_DIR", folder.path());
        // ran SECTION CASE (how)
        let case = |line: &str| Some(line.strip_prefix("ran ")?.rsplit_once(" (")?.0.to_owned());
        Ok(finish(command)?.lines().filter_map(case).collect())
    }
}

/// Runs a program and returns its standard output, or an error if the program fails.
fn finish(mut command: Command) -> Result<String> {
    let Output { status, stdout, stderr } =
        command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if status.success() {
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    } else {
        Err(format!("{command:?}: {status}: {}", String::from_utf8_lossy(&stderr)).into())
    }
}

/// That of the codec's benchmark, or the system's.
fn with_torch(sh: &Shell) -> Result<Option<PathBuf>> {
    let peers = Workspace::read(sh)?.target_directory.join("peers/bin/python");
    let has_torch = |python: &PathBuf| {
        cmd!(sh, "{python} -c").arg("import torch").quiet().ignore_stderr().ignore_stdout().run().is_ok()
    };
    Ok([peers, PathBuf::from("python3")].into_iter().find(has_torch))
}
