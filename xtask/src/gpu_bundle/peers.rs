//! A dry run of the peers' scripts, which needs no GPU: each case runs on the CPU, in a small size, and has the name of a
//! case of `gpu_bench`. Of the cases of Transformer Engine's core library, only the arguments of the calls are checked.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, root};
use crate::{artifact, sim};

/// Checks the calls of Transformer Engine's core library in any Python.
const CORE: [&str; 1] = ["te_core_check.py"];
/// Checks the script that cuts a library to one architecture.
const CUT: [&str; 2] = ["cut_library.py", "--self-test"];
/// Leaves out what torch compiles, which takes minutes.
const PEERS: [&str; 4] = ["bench_peers.py", "--dry-run", "--compiled", "no"];

/// Runs the cases of the core library in any Python, those of the other peers where a Python has torch.
pub(crate) fn dry_run(sh: &Shell) -> Result<String> {
    if cmd!(sh, "python3 --version").quiet().ignore_stderr().ignore_stdout().run().is_err() {
        return Ok("skipped: python3 is not installed".to_owned());
    }
    let built = Programs::build(sh)?;
    rows(Path::new("python3"), &CUT)?;
    let mut found = rows(Path::new("python3"), &CORE)?;
    let core = found.len();
    let python = with_torch(sh)?;
    if let Some(python) = &python {
        found.extend(rows(python, &PEERS)?);
    }
    let ours = built.our_cases()?;
    for row in &found {
        if !row.ran() {
            return Err(format!("a peer's case did not run: {row:?}").into());
        }
        if row.section != "copy" && !ours.contains(&format!("{} {}", row.section, row.case)) {
            return Err(format!("no case of gpu_bench has the name of {row:?}").into());
        }
    }
    let others = match python {
        Some(_) => format!("{} of other peers", found.len() - core),
        None => "other peers skipped: no Python on this machine has torch".to_owned(),
    };
    Ok(format!("{core} cases of Transformer Engine's core library, {others}"))
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
    gpu_bench: PathBuf,
    simulator: PathBuf,
}

impl Programs {
    fn build(sh: &Shell) -> Result<Self> {
        let [gpu_bench, simulator] = artifact::with_simulator(sh, "gpu_bench")?;
        Ok(Self { gpu_bench, simulator })
    }

    /// Section and case of all that `gpu_bench` measures.
    fn our_cases(&self) -> Result<BTreeSet<String>> {
        let folder = tempfile::tempdir()?;
        sim::fill(folder.path(), &self.simulator)?;
        let mut command = Command::new(&self.gpu_bench);
        command.arg("--dry-run").env("FP8_CUDA_LIB_DIR", folder.path()).env("FP8_SIM_CUDNN", "92801");
        // ran SECTION CASE (how)
        let case = |line: &str| Some(line.strip_prefix("ran ")?.rsplit_once(" (")?.0.to_owned());
        Ok(finish(command)?.lines().filter_map(case).collect())
    }
}

/// Runs a script and returns the rows that it prints.
fn rows(python: &Path, words: &[&str]) -> Result<Vec<Row>> {
    let mut command = Command::new(python);
    // -B: no __pycache__ beside the sources.
    command.arg("-B").arg(root().join("xtask/src/gpu_bundle").join(words[0])).args(&words[1..]);
    let row = |line| serde_json::from_str(line).map_err(|error| format!("{line}: {error}").into());
    finish(command)?.lines().map(row).collect()
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
