//! A machine that this one emulates, and the package of tests that it runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xshell::{Cmd, Shell, cmd};

use super::debian;
use crate::workspace::{Result, Workspace, root, shell};

/// Test files of fp8-format that need nothing but it and `half`; `SWEEP` is another.
pub(crate) const SUITES: [&str; 5] = ["e2m1", "golden", "number", "paths", "slice"];

pub(crate) const SWEEP: &str = "sweep";

/// A machine that this one emulates, with a package of fp8-format's test files.
pub(crate) struct Emulated {
    pub(crate) sh: Shell,
    /// The folder in which cargo builds.
    pub(crate) build: PathBuf,
    pub(crate) package: PathBuf,
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
    pub(crate) fn emulate<'a>(&self, command: Cmd<'a>) -> Cmd<'a> {
        let emulator = format!("{} -L {}", debian::EMULATOR, debian::SYSROOT);
        command
            .quiet()
            .args(["--target", debian::TARGET, "--target-dir"])
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
pub(crate) fn write_package(sh: &Shell, format: &Path, package: &Path) -> Result {
    fs::create_dir_all(package)?;
    fs::copy(root().join("Cargo.lock"), package.join("Cargo.lock"))?;
    fs::write(package.join("lib.rs"), "")?;
    // Tests read their data below their package.
    let (tests, link) = (format.join("tests"), package.join("tests"));
    cmd!(sh, "ln -sfn {tests} {link}").quiet().run()?;
    fs::write(package.join("Cargo.toml"), manifest(format))?;
    Ok(())
}

pub(crate) fn manifest(format: &Path) -> String {
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
