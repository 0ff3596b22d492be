//! A copy of the workspace without xtask, kept in cargo's folder, so that what does not change is built once.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::suites::{BIN, LIB, Suite};
use crate::artifact;
use crate::mutants::refresh;
use crate::workspace::{Result, Workspace, files, root, shell};

const MEMBERS: &str = "members = [";
/// Not copied: packages that only start the others' tests, and what is no package.
const WITHOUT: [&str; 6] =
    ["xtask", "fuzz", ".github", "fp8-format/bench-codec", "fp8-nn/bench-gpu", "fp8-nn/bench-peers"];

pub(super) struct Copied {
    /// The folder of the copy, of cargo's build of it, and of the results.
    folder: PathBuf,
}

impl Copied {
    pub(super) fn new() -> Result<Self> {
        let copy = Self { folder: Workspace::read(&shell()?)?.target_directory.join("mutate-crates") };
        let manifest = without_members(&fs::read_to_string(root().join("Cargo.toml"))?)
            .ok_or_else(|| format!("Cargo.toml: no `{MEMBERS}` in it"))?;
        let mut kept = BTreeSet::new();
        for from in files(root())? {
            let name = from.strip_prefix(root())?.to_path_buf();
            if WITHOUT.iter().any(|part| name.starts_with(part)) {
                continue;
            }
            let to = copy.folder().join(&name);
            let new =
                if name == Path::new("Cargo.toml") { manifest.clone().into() } else { fs::read(&from)? };
            // The lock file is cut to fit by cargo.
            let is_lock = name == Path::new("Cargo.lock") && to.is_file();
            if !is_lock {
                refresh(&to, &new)?;
            }
            kept.insert(to);
        }
        for file in files(&copy.folder())?.iter().filter(|file| !kept.contains(*file)) {
            fs::remove_file(file)?;
        }
        Ok(copy)
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.folder.join("workspace")
    }

    /// Returns the path of the file with a crate's results.
    pub(super) fn results(&self, package: &str) -> PathBuf {
        self.folder.join(format!("{package}.json"))
    }

    pub(super) fn read(&self, file: &str) -> Result<String> {
        Ok(fs::read_to_string(self.folder().join(file))?)
    }

    /// A hash of files and of all files in folders, which are relative to the workspace; of what is missing, too.
    pub(super) fn hash(&self, paths: &[PathBuf]) -> Result<String> {
        let mut hash = Sha256::new();
        for path in paths {
            let path = self.folder().join(path);
            let all = if path.is_dir() { files(&path)? } else { vec![path] };
            for file in all.iter().filter(|file| file.is_file()) {
                hash.update(file.strip_prefix(self.folder())?.to_string_lossy().as_bytes());
                hash.update(Sha256::digest(fs::read(file)?));
            }
        }
        Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }

    /// The programs of a suite in its order; `Err` with what the compiler said if there are none.
    pub(super) fn build(&self, suite: &Suite) -> Result<std::result::Result<Vec<PathBuf>, String>> {
        let mut cargo = Command::new("cargo");
        cargo.args([
            "test",
            "--all-features",
            "--no-run",
            "--message-format",
            "json-render-diagnostics",
            "-p",
        ]);
        cargo.arg(suite.package).current_dir(self.folder());
        for target in suite.targets {
            match *target {
                LIB => cargo.arg("--lib"),
                BIN => cargo.arg("--bins"),
                test => cargo.args(["--test", test]),
            };
        }
        cargo.env("CARGO_TARGET_DIR", self.folder.join("target"));
        cargo.envs([("CARGO_INCREMENTAL", "1"), ("CARGO_PROFILE_DEV_DEBUG", "false")]);
        let built = cargo.output()?;
        if !built.status.success() {
            return Ok(Err(String::from_utf8_lossy(&built.stderr).into_owned()));
        }
        let messages = String::from_utf8_lossy(&built.stdout);
        let all: Vec<artifact::Built> = messages.lines().filter_map(artifact::built).collect();
        let mut programs = Vec::new();
        for target in suite.targets {
            let program = all.iter().find(|built| match *target {
                LIB => built.is(suite.package, "lib", &suite.package.replace('-', "_")),
                BIN => built.is_of(suite.package, "bin"),
                test => built.is(suite.package, "test", test),
            });
            programs
                .push(program.ok_or_else(|| format!("cargo reports no program for {target}"))?.file.clone());
        }
        Ok(Ok(programs))
    }

    /// Returns the command that starts a program of the suite.
    pub(super) fn command(&self, program: &Path, suite: &Suite) -> Command {
        let package = self.folder().join(suite.package);
        let mut command = Command::new(program);
        // Tests look for their data there. `cargo xtask` has set it to the folder of this program.
        command.env("CARGO_MANIFEST_DIR", &package).current_dir(package).args(suite.arguments);
        command
    }
}

/// The manifest without the packages that are not copied.
fn without_members(manifest: &str) -> Option<String> {
    let (before, rest) = manifest.split_once(MEMBERS)?;
    let (members, after) = rest.split_once(']')?;
    let kept = members.split(',').map(str::trim);
    let is_left_out =
        |member: &str| WITHOUT.iter().any(|part| Path::new(member.trim_matches('"')).starts_with(part));
    let kept: Vec<&str> = kept.filter(|member| !is_left_out(member)).collect();
    Some(format!("{before}{MEMBERS}{}]{after}", kept.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_are_not_copied_are_no_members() {
        let manifest = "[workspace]\nmembers = [\"fp8-nn\", \"fp8-format/bench-codec\", \"fp8-nn/bench-peers\", \"xtask\", \"xtask/checks\"]\nexclude = []\n";
        assert_eq!(without_members(manifest).unwrap(), "[workspace]\nmembers = [\"fp8-nn\"]\nexclude = []\n");
        assert_eq!(without_members("[package]"), None);
    }
}
