//! The tools that compile and run programs for AArch64: the standard library comes from rustup; the linker, the C library
//! and the emulator come from Debian's archive.

use std::path::Path;

use xshell::{Shell, cmd};

use crate::workspace::Result;

pub(super) const TARGET: &str = "aarch64-unknown-linux-gnu";
pub(super) const LINKER: &str = "aarch64-linux-gnu-gcc";
pub(super) const EMULATOR: &str = "qemu-aarch64";
/// The folder with the libraries of AArch64.
pub(super) const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// Installs what is missing.
pub(super) fn install(sh: &Shell) -> Result {
    if !has_target(sh) {
        cmd!(sh, "rustup target add {TARGET}").run().map_err(|error| {
            format!(
                "neon: the compiler has no standard library for {TARGET}, and rustup cannot add it: {error}"
            )
        })?;
    }
    let missing = missing(sh);
    if missing.is_empty() { Ok(()) } else { install_packages(sh, &missing) }
}

/// Whether the compiler that cargo takes has the standard library of AArch64.
fn has_target(sh: &Shell) -> bool {
    let folder = cmd!(sh, "rustc --print target-libdir --target {TARGET}").quiet().ignore_stderr().read();
    folder.is_ok_and(|folder| Path::new(&folder).is_dir())
}

/// Packages of which something is not there.
fn missing(sh: &Shell) -> Vec<String> {
    let runs = |program: &str| {
        let command = cmd!(sh, "{program} --version").quiet();
        command.ignore_stdout().ignore_stderr().run().is_ok()
    };
    let packages = [
        ("gcc-aarch64-linux-gnu", runs(LINKER)),
        ("libc6-dev-arm64-cross", Path::new(SYSROOT).join("include/stdlib.h").is_file()),
        ("qemu-user", runs(EMULATOR)),
    ];
    packages.into_iter().filter(|(_, is_there)| !is_there).map(|(package, _)| package.to_owned()).collect()
}

fn install_packages(sh: &Shell, packages: &[String]) -> Result {
    let names = packages.join(" ");
    if cmd!(sh, "apt-get --version").quiet().ignore_stdout().ignore_stderr().run().is_err() {
        return Err(format!(
            "neon: no apt-get here, which would install {names}: {LINKER}, {EMULATOR} and the C library of AArch64 in \
             {SYSROOT}; install them with this system's package manager"
        )
        .into());
    }
    if cmd!(sh, "id -u").quiet().read()? != "0" {
        return Err(format!(
            "neon: not there, and only root can install them: {names}; run sudo apt-get install \
             --no-install-recommends {names}"
        )
        .into());
    }
    println!("installing {names}");
    // A source that is out of reach is no harm as long as Debian's own are not: what is missing then is named by the next command.
    cmd!(sh, "apt-get -qq update").quiet().ignore_status().run()?;
    let install = cmd!(sh, "apt-get -qq -y --no-install-recommends install {packages...}");
    Ok(install.quiet().env("DEBIAN_FRONTEND", "noninteractive").ignore_stdout().run()?)
}
