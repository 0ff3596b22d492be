//! The workspace: its root, its packages and targets, its files.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::Deserialize;
use xshell::{Shell, cmd};

/// The result of a task.
pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// The folder of the workspace's `Cargo.toml`.
pub(crate) fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// A shell in the workspace's root.
pub(crate) fn shell() -> Result<Shell> {
    let sh = Shell::new()?;
    sh.change_dir(root());
    Ok(sh)
}

/// All packages, as cargo sees them.
#[derive(Deserialize)]
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    /// The folder in which cargo puts what it builds.
    pub(crate) target_directory: PathBuf,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    manifest_path: PathBuf,
    /// `Some` of an empty list where `publish = false`.
    publish: Option<Vec<String>>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    kind: Vec<String>,
    /// The first file of the crate.
    src_path: PathBuf,
}

impl Workspace {
    /// Reads the workspace in a folder.
    pub(crate) fn at(folder: &Path) -> Result<Self> {
        let sh = Shell::new()?;
        sh.change_dir(folder);
        Self::read(&sh)
    }

    pub(crate) fn read(sh: &Shell) -> Result<Self> {
        let json = cmd!(sh, "cargo metadata --no-deps --format-version 1").quiet().read()?;
        Ok(serde_json::from_str(&json)?)
    }

    /// All targets of a kind (`bench`, `example`, …), each with its package.
    pub(crate) fn targets<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = (&'a Package, &'a Target)> {
        self.packages.iter().flat_map(move |package| {
            let of_kind = package.targets.iter().filter(move |target| target.kind.iter().any(|k| k == kind));
            of_kind.map(move |target| (package, target))
        })
    }
}

impl Package {
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }

    /// The first files of the library and the programs.
    pub(crate) fn crates(&self) -> impl Iterator<Item = &Path> {
        let kinds = ["bin", "cdylib", "lib", "proc-macro", "rlib"];
        let is_crate = move |target: &&Target| target.kind.iter().any(|kind| kinds.contains(&kind.as_str()));
        self.targets.iter().filter(is_crate).map(|target| target.src_path.as_path())
    }

    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(&self.manifest_path)
    }
}

/// All files below `folder`, sorted, without `.git` and `target`.
pub(crate) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_file() {
                found.push(entry.path());
            } else if kind.is_dir() && entry.file_name() != ".git" && entry.file_name() != "target" {
                folders.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}
