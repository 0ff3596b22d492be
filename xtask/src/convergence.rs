//! `cargo xtask convergence`: small models trained in FP8 and in high precision, from all seeds and under all recipes.
//!
//! `cargo xtask test` takes one model from the first seed with per-tensor scales only. One process runs all tests, so that they share the trainings in high precision.

use std::process::ExitCode;

use xshell::cmd;

use crate::workspace::{Result, shell};

pub(crate) fn run() -> Result<ExitCode> {
    let sh = shell()?;
    let build = ["--workspace", "--all-features", "--test", "convergence"];
    cmd!(sh, "cargo test {build...} -- --include-ignored --nocapture").run()?;
    Ok(ExitCode::SUCCESS)
}
