//! `cargo xtask gpu-test`: the suites of all crates on the CUDA device of this machine, those that `gpu-bundle` takes along.
//!
//! With `FP8_TEST_ARCH` they run on the simulated GPU, which is then of this architecture. A suite of which nothing ran is a
//! failure.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use xshell::{Shell, cmd};

use crate::artifact::{self, Built};
use crate::conformance::Outcome;
use crate::gpu_bundle::{Program, suites};
use crate::process;
use crate::workspace::{Result, root, shell};

const LIMIT: Duration = Duration::from_secs(60 * 60);

/// The variable that names the architecture of the simulated GPU.
pub(crate) const VARIABLE: &str = "FP8_TEST_ARCH";

/// The GPU on which suites run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gpu {
    Here,
    /// A simulated GPU of this architecture.
    Simulated(u32),
}

impl Gpu {
    /// Reads the value of [`VARIABLE`].
    fn parse(value: &str) -> Result<Self> {
        if value.is_empty() {
            return Ok(Self::Here);
        }
        match value.strip_prefix("sm_").unwrap_or(value) {
            arch @ ("89" | "90" | "100" | "120") => Ok(Self::Simulated(arch.parse()?)),
            _ => Err(format!(
                "{VARIABLE}={value}: expected 89, 90, 100 or 120, or nothing for this machine's GPU"
            )
            .into()),
        }
    }

    /// The process of a suite, in its package's folder.
    fn command(self, suite: &Program, file: &Path) -> Command {
        let package = root().join(suite.package);
        let mut command = Command::new(file);
        command.current_dir(&package).env("CARGO_MANIFEST_DIR", &package);
        match self {
            Self::Here => {
                command.env("FP8_CONFORMANCE_BACKEND", "cuda").env("FP8_TEST_DEVICE", "cuda");
                // Sizes and repetitions that only a real device does in reasonable time.
                command.env("FP8_CONFORMANCE_STRESS", "1");
                command.args(suite.on_hardware);
            }
            Self::Simulated(arch) => {
                command.env("FP8_CONFORMANCE_BACKEND", "cuda-sim").env("FP8_SIM_ARCH", arch.to_string());
                command.env_remove("FP8_TEST_DEVICE");
            }
        }
        command
    }

    fn title(self) -> String {
        match self {
            Self::Here => format!("devices:\n{}", devices()),
            Self::Simulated(arch) => format!("the simulated GPU, sm_{arch}\n"),
        }
    }
}

pub(crate) fn run() -> Result<ExitCode> {
    let gpu = Gpu::parse(&std::env::var(VARIABLE).unwrap_or_default())?;
    print!("{}", gpu.title());
    let suites: Vec<_> = suites().collect();
    let built = build(&shell()?, &suites)?;
    let mut is_good = true;
    let mut lines = Vec::new();
    for suite in suites {
        let (outcome, output) = outcome(gpu, suite, &built)?;
        print!("{output}");
        is_good &= outcome.is_good() && !outcome.passed.is_empty();
        lines.push(line(suite, &outcome));
    }
    println!("{}", lines.join("\n"));
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a suite of `package` on the simulated GPU of each architecture.
pub(crate) fn simulated(sh: &Shell, package: &str, archs: &[u32]) -> Result<String> {
    let suites: Vec<_> = suites().filter(|suite| suite.package == package).collect();
    let built = build(sh, &suites)?;
    let runs: Vec<_> =
        archs.iter().flat_map(|&arch| suites.iter().map(move |&suite| (arch, suite))).collect();
    let lines = process::each(&runs, process::cores(), |_, &(arch, suite)| {
        let run = || -> Result<String> {
            let (outcome, output) = outcome(Gpu::Simulated(arch), suite, &built)?;
            let line = format!("sm_{arch}: {}", line(suite, &outcome));
            if !outcome.is_good() || outcome.passed.is_empty() {
                return Err(format!("{}\n{line}", outcome.failures(&output)).into());
            }
            Ok(line)
        };
        run().map_err(|error| error.to_string()) // which can go to another thread
    });
    let lines = lines.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(lines.join("; "))
}

/// Everything in one go, with the features that the workspace's tests have.
fn build(sh: &Shell, suites: &[&Program]) -> Result<Vec<Built>> {
    let tests = suites.iter().flat_map(|suite| ["--test", suite.target]);
    let format = "json-render-diagnostics";
    let arguments: Vec<_> = ["--workspace", "--all-features", "--no-run"].into_iter().chain(tests).collect();
    let messages = cmd!(sh, "cargo test {arguments...} --message-format {format}").quiet().read()?;
    Ok(messages.lines().filter_map(artifact::built).collect())
}

fn outcome(gpu: Gpu, suite: &Program, built: &[Built]) -> Result<(Outcome, String)> {
    let Program { package, kind, target, .. } = suite;
    let file = built.iter().find(|built| built.is(package, kind, target));
    let file =
        file.ok_or_else(|| format!("cargo reports no program for the {kind} {target} of {package}"))?;
    let finished = process::watch(gpu.command(suite, &file.file), LIMIT, |_| false)?;
    Ok((Outcome::read(&finished.output, finished.succeeded()), finished.output))
}

/// A suite's name and counts. Of one that ran nothing, why.
fn line(suite: &Program, outcome: &Outcome) -> String {
    let name = format!("{} {}", suite.package, suite.target);
    if outcome.passed.is_empty() && outcome.failed.is_empty() {
        return format!("{name}: error: no case ran on the GPU: {}", reason(outcome));
    }
    format!("{name}: {}", outcome.line())
}

/// The suite names the library that is missing and where it was looked for.
fn reason(outcome: &Outcome) -> &str {
    match (outcome.ignored.first(), outcome.broken) {
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
        Err(error) => format!("  unknown: nvidia-smi: {error}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crates_suite_runs() {
        let suites: Vec<_> = suites().map(|suite| format!("{} {}", suite.package, suite.target)).collect();
        let all =
            ["fp8-kernels conformance", "fp8-recipe suite_on_gpu", "fp8-nn suite_on_gpu", "fp8-dist nccl"];
        assert_eq!(suites, all);
    }

    #[test]
    fn the_architecture_is_one_that_multiplies_fp8() {
        for (value, gpu) in [("", Gpu::Here), ("89", Gpu::Simulated(89)), ("sm_100", Gpu::Simulated(100))] {
            assert_eq!(Gpu::parse(value).unwrap(), gpu);
        }
        for value in ["80", "h100", "90 ", "sm_"] {
            let error = Gpu::parse(value).unwrap_err().to_string();
            let expected = "expected 89, 90, 100 or 120, or nothing for this machine's GPU";
            assert_eq!(error, format!("FP8_TEST_ARCH={value}: {expected}"));
        }
    }

    #[test]
    fn suites_on_this_machine_leave_tests_of_the_simulated_gpu_out() {
        let nccl = suites().find(|suite| suite.target == "nccl").unwrap();
        let arguments = |gpu: Gpu| {
            let command = gpu.command(nccl, Path::new("nccl"));
            command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert_eq!(arguments(Gpu::Here), ["hardware::"]);
        assert!(arguments(Gpu::Simulated(100)).is_empty());
    }

    #[test]
    fn the_reason_is_the_suites_own_where_it_gives_one() {
        let ignored = "test cuda::norm::rows (no library) ... ignored\ntest result: ok.\n";
        assert_eq!(reason(&Outcome::read(ignored, true)), "no library");
        assert_eq!(reason(&Outcome::read("", false)), "the process broke down before its end");
    }
}
