//! `cargo xtask asan`: the tests of fp8-format's slices under AddressSanitizer.
//!
//! On one thread and split between several. Its vectors are loaded and stored through pointers, with instructions that Miri does not know. The sanitizer is an unstable
//! option that the stable compiler takes, too, where it is asked to; a target is named so that build scripts go without.

use std::process::ExitCode;

use xshell::cmd;

use crate::workspace::{Result, Workspace, shell};

const TARGET: &str = "x86_64-unknown-linux-gnu";

pub(crate) fn run() -> Result<ExitCode> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(format!("asan: this is not {TARGET}: run it there").into());
    }
    let sh = shell()?;
    let folder = Workspace::read(&sh)?.target_directory.join("asan");
    let tests = ["--test", "paths", "--test", "slice", "--test", "nvfp4"];
    cmd!(sh, "cargo test -p fp8-format --features rayon --target {TARGET} --target-dir {folder} {tests...}")
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        // Leaks are not what is looked for.
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .run()?;
    Ok(ExitCode::SUCCESS)
}
