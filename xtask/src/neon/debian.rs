//! What compiles and runs programs for AArch64, from Debian's archive.
//!
//! Linker, C library and emulator are installed. A compiler whose standard library is there for AArch64 is Debian's own;
//! where rustup's has none, it is unpacked into a folder, for the two cannot be installed side by side. That the machine
//! has packages of one architecture only stays so: lists and cache of the other are in the folder, too.

use std::fs;
use std::path::{Path, PathBuf};

use xshell::{Cmd, Shell, cmd};

use super::TARGET;
use crate::workspace::Result;

pub(super) const LINKER: &str = "aarch64-linux-gnu-gcc";
pub(super) const EMULATOR: &str = "qemu-aarch64";
/// Where the libraries of AArch64 are.
pub(super) const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// The compiler to use.
pub(super) enum Tools {
    /// The one that is there anyway.
    Installed,
    /// Debian's, which finds its own libraries in a folder.
    Unpacked { rustc: PathBuf, libraries: PathBuf },
}

/// Installs what is missing. `folder` keeps what is unpacked for the next time.
pub(super) fn tools(sh: &Shell, folder: &Path) -> Result<Tools> {
    let mut missing = missing(sh);
    if has_target(sh) {
        if !missing.is_empty() {
            Apt::new(sh, folder)?.install(&missing)?;
        }
        return Ok(Tools::Installed);
    }
    let rust = folder.join("rust");
    let is_unpacked = rust.is_dir();
    if !is_unpacked || !missing.is_empty() {
        let apt = Apt::new(sh, folder)?;
        if !is_unpacked {
            println!("unpacking Debian's rustc for {TARGET}");
            missing.extend(unpack(sh, &apt, folder, &rust)?);
        }
        if !missing.is_empty() {
            apt.install(&missing)?;
        }
        apt.clear()?;
    }
    let usr = rust.join("usr");
    Ok(Tools::Unpacked { rustc: usr.join("bin/rustc"), libraries: usr.join("lib/x86_64-linux-gnu") })
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

/// Unpacks the compiler with its standard libraries. Returns packages that it needs and the machine lacks.
fn unpack(sh: &Shell, apt: &Apt, folder: &Path, rust: &Path) -> Result<Vec<String>> {
    let dev = "libstd-rust-web-dev";
    let libraries = apt.dependency(dev, "libstd-rust-web-")?;
    let llvm = apt.dependency(&libraries, "libllvm")?;
    let packages = ["rustc-web", dev, &format!("{dev}:arm64"), &libraries, &llvm];
    let (debs, new) = (folder.join("debs"), folder.join("rust.new"));
    for folder in [&debs, &new] {
        sh.remove_path(folder)?;
        sh.create_dir(folder)?;
    }
    apt.download(&packages, &debs)?;
    for deb in sh.read_dir(&debs)? {
        cmd!(sh, "dpkg -x {deb} {new}").quiet().run()?;
    }
    sh.remove_path(&debs)?;
    let needed = apt.dependencies(&llvm)?;
    let lacking = needed.into_iter().filter(|package| !is_installed(sh, package)).collect();
    // Whole from here on.
    fs::rename(new, rust)?;
    Ok(lacking)
}

fn is_installed(sh: &Shell, package: &str) -> bool {
    let format = "${db:Status-Status}";
    let status = cmd!(sh, "dpkg-query -W -f={format} {package}").quiet().ignore_stderr().read();
    status.is_ok_and(|status| status.starts_with("installed"))
}

/// apt with lists of its own, fresh ones, of two architectures.
struct Apt<'a> {
    sh: &'a Shell,
    folder: PathBuf,
}

impl<'a> Apt<'a> {
    fn new(sh: &'a Shell, folder: &Path) -> Result<Self> {
        let is_debian = cmd!(sh, "apt-get --version").quiet().ignore_stdout().ignore_stderr().run().is_ok();
        if !is_debian {
            return Err(format!(
                "neon: no apt-get here, which would install {LINKER}, {EMULATOR} and the C library of AArch64 in \
                 {SYSROOT}; install them with this system's package manager, then rustup target add {TARGET}"
            )
            .into());
        }
        let apt = Self { sh, folder: folder.join("apt") };
        for part in ["lists/partial", "cache/archives/partial"] {
            sh.create_dir(apt.folder.join(part))?;
        }
        // A source that is out of reach is no harm as long as Debian's own are not: what is missing then is named later.
        let (options, both) = (apt.options(), BOTH);
        let update = cmd!(sh, "apt-get {options...} {both...} -qq update").quiet();
        update.ignore_status().run()?;
        Ok(apt)
    }

    fn options(&self) -> Vec<String> {
        let folder = self.folder.display();
        [
            format!("Dir::State::Lists={folder}/lists"),
            format!("Dir::Cache={folder}/cache"),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
        ]
        .into_iter()
        .flat_map(|option| ["-o".to_owned(), option])
        .collect()
    }

    fn dependencies(&self, package: &str) -> Result<Vec<String>> {
        let (sh, options) = (self.sh, self.options());
        let text = cmd!(sh, "apt-cache {options...} {BOTH...} depends {package}").quiet().ignore_stderr();
        Ok(depends(&text.read().unwrap_or_default()))
    }

    /// The dependency that begins with `prefix`: its name holds a version.
    fn dependency(&self, package: &str, prefix: &str) -> Result<String> {
        let all = self.dependencies(package)?;
        all.into_iter().find(|name| name.starts_with(prefix)).ok_or_else(|| {
            format!(
                "neon: apt knows no package {package} that depends on {prefix}…: Debian 12 or newer has it, if its \
                 security updates are among apt's sources; or give rustup's compiler the target: rustup target add \
                 {TARGET}"
            )
            .into()
        })
    }

    fn download(&self, packages: &[&str], into: &Path) -> Result {
        let (sh, options) = (self.sh, self.options());
        let _inside = sh.push_dir(into);
        Ok(cmd!(sh, "apt-get {options...} {BOTH...} -qq download {packages...}").quiet().run()?)
    }

    /// Needs root. Of the machine's own architecture only, or apt would make the other one known to dpkg.
    fn install(&self, packages: &[String]) -> Result {
        let (sh, options) = (self.sh, self.options());
        let names = packages.join(" ");
        if cmd!(sh, "id -u").quiet().read()? != "0" {
            return Err(format!(
                "neon: not there, and only root can install them: {names}; run sudo apt-get install \
                 --no-install-recommends {names}"
            )
            .into());
        }
        println!("installing {names}");
        let install: Cmd<'_> =
            cmd!(sh, "apt-get {options...} -qq -y --no-install-recommends install {packages...}");
        Ok(install.quiet().env("DEBIAN_FRONTEND", "noninteractive").ignore_stdout().run()?)
    }

    /// Lists and cache are large, and old the next time.
    fn clear(&self) -> Result {
        Ok(self.sh.remove_path(&self.folder)?)
    }
}

/// Options for packages of both architectures.
const BOTH: [&str; 6] =
    ["-o", "APT::Architecture=amd64", "-o", "APT::Architectures::=amd64", "-o", "APT::Architectures::=arm64"];

/// Names in what `apt-cache depends` prints.
fn depends(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| line.trim_start().strip_prefix("Depends: "));
    names.filter(|name| !name.starts_with('<')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_real_packages() {
        let text = "libstd-rust-web-dev\n  Depends: libstd-rust-web-1.96\n  Depends: <libc-dev>\n    libc6-dev\n  \
                    Conflicts: <rustup>\n  Depends: libc6\n  Replaces: libstd-rust-dev\n";
        assert_eq!(depends(text), ["libstd-rust-web-1.96", "libc6"]);
        assert!(depends("").is_empty());
    }
}
