//! `cargo xtask gpu-test`: the suite on the CUDA device of this machine. That nothing ran is a failure.

use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::conformance::{Backend, Job, Outcome};
use crate::workspace::{Result, shell};
use crate::{artifact, process};

const LIMIT: Duration = Duration::from_secs(60 * 60);

pub(crate) fn run() -> Result<ExitCode> {
    println!("devices:\n{}", devices());
    let program = artifact::conformance(&shell()?)?;
    let mut command = Job { backend: Backend::Cuda, seed: None, skipped: Vec::new() }.command(&program);
    // Sizes and repetitions that only a real device does in reasonable time.
    command.env("FP8_CONFORMANCE_STRESS", "1");
    let finished = process::watch(command, LIMIT, |_| false)?;
    print!("{}", finished.output);

    let outcome = Outcome::read(&finished.output, finished.succeeded());
    let on_device = outcome.passed.iter().filter(|name| name.starts_with("cuda::")).count();
    if on_device == 0 && outcome.failed.is_empty() {
        println!("error: gpu-test: no case ran on a CUDA device: {}", reason(&outcome));
        return Ok(ExitCode::FAILURE);
    }
    println!("{}", outcome.line());
    Ok(if outcome.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The suite names the library that is missing and where it was looked for.
fn reason(outcome: &Outcome) -> &str {
    let first = outcome.ignored.iter().find(|(name, _)| name.starts_with("cuda::"));
    match (first, outcome.broken) {
        (Some((_, reason)), _) => reason,
        (None, Some(broken)) => broken,
        (None, None) => "the suite has no cases for it: was it built with the feature cuda?",
    }
}

fn devices() -> String {
    let listed = Command::new("nvidia-smi").arg("-L").output();
    match listed {
        Ok(listed) if listed.status.success() => String::from_utf8_lossy(&listed.stdout).into_owned(),
        Ok(listed) => {
            format!("  nvidia-smi -L: {}: {}", listed.status, String::from_utf8_lossy(&listed.stdout))
        }
        Err(error) => format!("  unknown: nvidia-smi: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_suites_own_where_it_gives_one() {
        let ignored = "test cuda::norm::rows (no library) ... ignored\ntest result: ok.\n";
        assert_eq!(reason(&Outcome::read(ignored, true)), "no library");
        assert_eq!(reason(&Outcome::read("", false)), "the process broke down before its end");
    }
}
