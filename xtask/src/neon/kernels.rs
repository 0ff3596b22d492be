//! The CPU backend on NEON: the unit tests of fp8-kernels, among them those of the products of every set of vectors, and the
//! conformance cases of the CPU.

use xshell::cmd;

use super::emulated::Emulated;
use crate::workspace::Result;

/// Runs the tests; returns how many passed, and an error if one did not.
pub(super) fn test(machine: &Emulated) -> Result<u64> {
    // That test starts itself again, which takes an emulator that the system knows.
    let own: &[&str] = &["--lib", "--", "--skip", "fp4_products_are_right"];
    let runs = [own, &["--test", "conformance", "--", "cpu::"]];
    runs.into_iter().map(|arguments| run(machine, arguments)).sum()
}

fn run(machine: &Emulated, arguments: &[&str]) -> Result<u64> {
    let (options, filter) =
        arguments.split_at(arguments.iter().position(|a| *a == "--").unwrap_or(arguments.len()));
    let command = machine.emulate(cmd!(machine.sh, "cargo test --quiet --package fp8-kernels {options...}"));
    // Products would be computed by another path without a word.
    let command = command.args(filter).env("FP8_CPU_PATH", "neon");
    let finished = command.ignore_status().output()?;
    let output = String::from_utf8_lossy(&finished.stdout);
    if !finished.status.success() {
        return Err(format!("neon: tests of fp8-kernels failed:\n{output}").into());
    }
    passed(&output).ok_or_else(|| format!("neon: no line says how many tests passed:\n{output}").into())
}

/// Returns the number of tests that libtest's last line says passed; `None` if there was none.
fn passed(output: &str) -> Option<u64> {
    let line = output.lines().rfind(|line| line.starts_with("test result: ok. "))?;
    let count: u64 = line.strip_prefix("test result: ok. ")?.split_once(" passed")?.0.parse().ok()?;
    (count > 0).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_did_not_run_did_not_pass() {
        let line = |passed: u64| {
            format!("running 3 tests\n\ntest result: ok. {passed} passed; 0 failed; 0 ignored\n")
        };
        assert_eq!(passed(&line(55)), Some(55));
        assert_eq!(passed(&line(0)), None);
        assert_eq!(passed("running 0 tests"), None);
    }
}
