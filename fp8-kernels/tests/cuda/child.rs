//! Tests in processes of their own, where the environment is part of what is tested.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "how a child answers")]

use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Set in a child only.
const MARK: &str = "FP8_CUDA_TEST_CHILD";
const ANSWER: &str = "answer ";

/// Whether this process was started by [`start`].
pub(crate) fn is_child() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Says a line to the parent.
pub(crate) fn answer(text: impl std::fmt::Display) {
    println!("{ANSWER}{text}");
}

/// Starts the test `name` of this program with `variables`, and without those that lead to libraries or a cache.
pub(crate) fn start(name: &str, variables: &[(&str, &Path)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(MARK, "1");
    for (inherited, _) in std::env::vars_os() {
        if inherited.to_string_lossy().starts_with("FP8_") && inherited != *MARK {
            command.env_remove(inherited);
        }
    }
    for name in ["LD_LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "HOME"] {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The lines that the child answered with; its failure is this test's.
pub(crate) fn finish(child: Child) -> Vec<String> {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    // The first answer stands behind what the test program says of the test.
    text.lines().filter_map(|line| Some(line.split_once(ANSWER)?.1.to_owned())).collect()
}

pub(crate) fn run(name: &str, variables: &[(&str, &Path)]) -> Vec<String> {
    finish(start(name, variables))
}
