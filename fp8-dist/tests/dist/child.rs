//! Ranks in processes of their own: this test program once more, for one of its tests.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "how a child answers, or fails"
)]

use fp8_dist::Environment;
use std::process::{Child, Command, Stdio};

/// Set in a child only.
const MARK: &str = "FP8_DIST_TEST_CHILD";
const ANSWER: &str = "answer ";

/// Whether this process was started by [`start`].
pub(crate) fn is_child() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Says a line to the parent.
pub(crate) fn answer(text: impl std::fmt::Display) {
    println!("{ANSWER}{text}");
}

/// Starts the test `name` of this program as the rank that `environment` says, with the four variables that a job on CPUs
/// needs.
pub(crate) fn start(name: &str, environment: &Environment, more: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(MARK, "1");
    let numbers = [
        ("RANK", environment.rank),
        ("WORLD_SIZE", environment.world_size),
        ("MASTER_PORT", environment.master_port.into()),
    ];
    command.envs(numbers.map(|(name, value)| (name, value.to_string())));
    command.env("MASTER_ADDR", &environment.master_addr).env_remove("FP8_PORT").env_remove("LOCAL_RANK");
    command.env("TORCHELASTIC_RUN_ID", &environment.run_id).env("FP8_DIST_TOKEN", &environment.token);
    command.env_remove("SLURM_JOB_ID").env_remove("PMIX_NAMESPACE");
    command.envs(more.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The lines that a child answered with, and whether it succeeded.
pub(crate) fn finish(child: Child) -> (Vec<String>, bool) {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // The first answer stands behind what the test program says of the test.
    let lines: Vec<String> =
        text.lines().filter_map(|line| Some(line.split_once(ANSWER)?.1.to_owned())).collect();
    if !output.status.success() {
        eprintln!("{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    (lines, output.status.success())
}
