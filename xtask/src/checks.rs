//! `cargo xtask attack`, `golden`, `exhaustive` and `real-training`: build the program `checks`, which needs the product, and start it.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, shell};
use crate::{artifact, sim};

/// Arguments that xtask passes on.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    words: Vec<String>,
}

/// The program as the workspace's tests build it, and the simulated GPU's library.
pub(crate) struct Checks {
    pub(crate) program: PathBuf,
    pub(crate) simulator: PathBuf,
}

impl Checks {
    /// Builds both with the features that tests have, so that nothing is built twice.
    pub(crate) fn build(sh: &Shell) -> Result<Self> {
        let format = "json-render-diagnostics";
        let options =
            ["--workspace", "--all-features", "--package", "checks", "--test", "program", "--no-run"];
        let messages = cmd!(sh, "cargo test {options...} --message-format {format}").quiet().read()?;
        let find = |kind: &str, name: &str| {
            let found = messages.lines().find_map(|line| artifact::file(line, kind, name));
            found.ok_or_else(|| format!("cargo reports no file for the {kind} {name}"))
        };
        Ok(Self { program: find("bin", "checks")?, simulator: find("cdylib", "fp8_cuda_sim")? })
    }

    /// A command that attacks, with the simulated GPU at hand.
    fn attack(&self, sh: &Shell) -> Result<Command> {
        let mut command = Command::new(&self.program);
        command.arg("attack");
        if cfg!(target_os = "linux") {
            let folder = Workspace::read(sh)?.target_directory.join("attack");
            sim::fill(&folder, &self.simulator)?;
            command.arg("--libraries").arg(folder);
        }
        Ok(command)
    }
}

pub(crate) fn attack(passed: &Passed) -> Result<ExitCode> {
    let sh = shell()?;
    let mut command = Checks::build(&sh)?.attack(&sh)?;
    finish(command.args(&passed.words))
}

/// A short draw, for `cargo xtask test`.
pub(crate) fn short_attack(sh: &Shell) -> Result<String> {
    let output = Checks::build(sh)?.attack(sh)?.arg("--short").output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().last().unwrap_or_default().to_owned();
    if output.status.success() {
        return Ok(line);
    }
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    Err(line.into())
}

pub(crate) fn golden(passed: &Passed) -> Result<ExitCode> {
    finish(Command::new(Checks::build(&shell()?)?.program).arg("golden").args(&passed.words))
}

/// Billions of conversions, and models of real sizes, want the optimizer.
pub(crate) fn optimized(check: &str, passed: &Passed) -> Result<ExitCode> {
    let sh = shell()?;
    let mut command = Command::new("cargo");
    command.current_dir(sh.current_dir()).args(["run", "--quiet", "--release", "--package", "checks", "--"]);
    finish(command.arg(check).args(&passed.words))
}

fn finish(command: &mut Command) -> Result<ExitCode> {
    let status = command.status()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
