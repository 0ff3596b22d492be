//! `cargo xtask neon`: the NEON paths on a machine that has no NEON. Tests are compiled for AArch64 and run by an emulator,
//! which shows results, not speed: those of fp8-format, a sweep over the patterns of f32, judged by the integer oracle, and the
//! products and all operations of the CPU backend.
//!
//! The tests of fp8-format are built as a package of their own: its own has dev-dependencies that take longer to compile for
//! another target than the tests take to run.

mod debian;
mod kernels;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use xshell::{Cmd, Shell, cmd};

use crate::workspace::{Result, Workspace, root, shell};

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Test files of fp8-format that need nothing but it and `half`; `SWEEP` is another.
const SUITES: [&str; 4] = ["golden", "number", "paths", "slice"];
const SWEEP: &str = "sweep";

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

/// A machine that this one emulates, with a package of fp8-format's test files.
pub(crate) struct Emulated {
    sh: Shell,
    /// The folder in which cargo builds.
    build: PathBuf,
    package: PathBuf,
}

impl Emulated {
    /// Installs what is missing and writes the package `name`, for the sources and tests in `format`.
    pub(crate) fn new(format: &Path, name: &str) -> Result<Self> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            return Err(
                "neon: the emulator is set up on Linux on x86-64 only; a machine with AArch64 runs the NEON \
                        path itself, by cargo test -p fp8-format"
                    .into(),
            );
        }
        let sh = shell()?;
        let folder = Workspace::read(&sh)?.target_directory.join("neon");
        let (build, package) = (folder.join("build"), folder.join(name));
        fs::create_dir_all(&folder)?;
        debian::install(&sh)?;
        write_package(&sh, format, &package)?;
        Ok(Self { sh, build, package })
    }

    /// `cargo test` of the package, for AArch64 and by the emulator.
    pub(crate) fn cargo_test(&self) -> Cmd<'_> {
        let manifest = self.package.join("Cargo.toml");
        self.emulate(cmd!(self.sh, "cargo test --quiet --release --manifest-path {manifest}"))
    }

    /// Lets `command` of cargo build for AArch64 and run by the emulator.
    fn emulate<'a>(&self, command: Cmd<'a>) -> Cmd<'a> {
        let emulator = format!("{} -L {}", debian::EMULATOR, debian::SYSROOT);
        command
            .quiet()
            .args(["--target", TARGET, "--target-dir"])
            .arg(&self.build)
            // Flags for this machine's processor are not for that one.
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", debian::LINKER)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", emulator)
    }

    /// A test program that was built.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(debian::EMULATOR);
        command.args(["-L", debian::SYSROOT]).arg(program).current_dir(&self.package);
        command
    }
}

/// A package with the versions of the workspace's `Cargo.lock`.
fn write_package(sh: &Shell, format: &Path, package: &Path) -> Result {
    fs::create_dir_all(package)?;
    fs::copy(root().join("Cargo.lock"), package.join("Cargo.lock"))?;
    fs::write(package.join("lib.rs"), "")?;
    // Tests read their data below their package.
    let (tests, link) = (format.join("tests"), package.join("tests"));
    cmd!(sh, "ln -sfn {tests} {link}").quiet().run()?;
    fs::write(package.join("Cargo.toml"), manifest(format))?;
    Ok(())
}

fn manifest(format: &Path) -> String {
    let suites = SUITES.iter().chain([&SWEEP]);
    let tests = suites.map(|suite| format!("[[test]]\nname = \"{suite}\"\npath = \"tests/{suite}.rs\"\n"));
    format!(
        "[workspace]\n\
         [package]\nname = \"fp8-format-tests\"\nversion = \"0.0.0\"\nedition = \"2024\"\npublish = false\nautotests = false\n\
         [lib]\npath = \"lib.rs\"\n\
         [features]\ndefault = [\"rayon\"]\nrayon = [\"dep:rayon\"]\n\
         [dependencies]\n\
         fp8-format = {{ path = {:?}, features = [\"rayon\"] }}\n\
         half = {{ version = \"*\", default-features = false }}\n\
         rayon = {{ version = \"*\", optional = true }}\n\
         {}",
        format.display().to_string(),
        tests.collect::<String>()
    )
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
    use super::*;

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
