//! `cargo xtask neon`: the NEON paths on a machine that has no NEON. Tests are compiled for AArch64 and run by an emulator,
//! which shows results, not speed: those of fp8-format, a sweep over the patterns of f32, judged by the integer oracle, and the
//! products and all operations of the CPU backend.
//!
//! The tests of fp8-format are built as a package of their own: its own has dev-dependencies that take longer to compile for
//! another target than the tests take to run.

mod debian;
mod emulated;
mod kernels;

use std::process::ExitCode;
use std::time::Instant;

use crate::workspace::{Result, root};
pub(crate) use emulated::Emulated;
use emulated::{SUITES, SWEEP};

/// Patterns between two of a sweep that is not of all.
const STRIDE: u32 = 251;

#[derive(clap::Args)]
pub(crate) struct Neon {
    /// Tests all 2³² patterns of f32 instead of every 251st (more than an hour)
    #[arg(long)]
    all: bool,
    /// Tests the codec alone
    #[arg(long)]
    codec: bool,
}

pub(crate) fn run(options: &Neon) -> Result<ExitCode> {
    let mut times = Vec::new();
    let mut start = Instant::now();
    let mut lap = |what: &str| {
        times.push(format!("{what} {:.0} s", start.elapsed().as_secs_f64()));
        start = Instant::now();
    };
    let machine = Emulated::new(&root().join("fp8-format"), "package")?;
    lap("tools");
    let all = SUITES.iter().chain([&SWEEP]).flat_map(|suite| ["--test", suite]);
    machine.cargo_test().args(all).arg("--no-run").run()?;
    lap("build");
    let suites = SUITES.iter().flat_map(|suite| ["--test", suite]);
    machine.cargo_test().args(suites).arg("--no-fail-fast").run()?;
    lap("tests");

    let stride = if options.all { 1 } else { STRIDE };
    println!("sweep: one of every {stride} of 2³² patterns");
    let sweep = machine.cargo_test().args(["--test", SWEEP, "--", "--nocapture"]);
    let finished = sweep.env("FP8_SWEEP_STRIDE", stride.to_string()).ignore_status().output()?;
    let output = String::from_utf8_lossy(&finished.stdout);
    print!("{output}");
    lap("sweep");

    let total = swept(&output)?;
    let is_good = finished.status.success() && total.mismatches == 0;
    let mut passed = format!("{} suites of the codec", SUITES.len());
    if !options.codec {
        passed += &format!(", {} tests of the CPU backend", kernels::test(&machine)?);
        lap("kernels");
    }
    println!("neon: {passed} passed; {total}; {}", times.join(", "));
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(Debug, PartialEq)]
struct Swept {
    conversions: u64,
    mismatches: u64,
}

impl std::fmt::Display for Swept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} conversions, {} mismatches", self.conversions, self.mismatches)
    }
}

/// Adds up the counts that the sweep printed for all paths. It is an error if NEON was not among them.
fn swept(output: &str) -> Result<Swept> {
    let mut total = Swept { conversions: 0, mismatches: 0 };
    let mut has_neon = false;
    for line in output.lines() {
        let Some((path, counts)) = line.split_once(": ") else { continue };
        let counts =
            counts.strip_suffix(" mismatches").and_then(|counts| counts.split_once(" conversions, "));
        let Some((conversions, mismatches)) = counts else { continue };
        let conversions: u64 = conversions.parse()?;
        total.conversions += conversions;
        total.mismatches += mismatches.parse::<u64>()?;
        has_neon |= path == "neon" && conversions > 0;
    }
    if !has_neon {
        return Err("neon: the sweep did not run on the NEON path; see its output above".into());
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use xshell::cmd;

    use super::emulated::write_package;
    use super::*;
    use crate::workspace::{Workspace, shell};

    #[test]
    fn counts_are_added_and_want_a_line_of_neon() {
        let scalar = "running 1 test\nscalar: 20 conversions, 0 mismatches\n";
        let both =
            format!("{scalar}neon E4M3: 0x1 gives 2\nneon: 20 conversions, 3 mismatches\ntest a ... ok\n");
        assert_eq!(swept(&both).unwrap(), Swept { conversions: 40, mismatches: 3 });
        assert!(swept(scalar).is_err());
        assert!(swept(&format!("{scalar}neon: 0 conversions, 0 mismatches\n")).is_err());
    }

    /// Checks that the package has everything that its tests use, by compiling it for this machine. No emulator is needed.
    #[test]
    fn the_package_compiles() {
        let sh = shell().unwrap();
        let folder = Workspace::read(&sh).unwrap().target_directory.join("neon-check");
        write_package(&sh, &root().join("fp8-format"), &folder).unwrap();
        let (manifest, target) = (folder.join("Cargo.toml"), folder.join("target"));
        let checked =
            cmd!(sh, "cargo check --offline --tests --manifest-path {manifest} --target-dir {target}")
                .quiet()
                .ignore_status()
                .output()
                .unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }

    #[test]
    fn every_suite_is_a_file() {
        for suite in SUITES.iter().chain([&SWEEP]) {
            assert!(root().join("fp8-format/tests").join(suite).with_extension("rs").is_file(), "{suite}");
        }
    }
}
