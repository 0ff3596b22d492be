//! The packages that have changed since the last commit, for tests while one works.

use std::collections::BTreeSet;
use std::path::Path;

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, root};

/// The files of the workspace that every package depends on.
const SHARED: [&str; 3] = ["Cargo.toml", "Cargo.lock", ".cargo"];

/// Returns the names of the packages with changed files; `None` if nothing has changed, or something that all depend on.
pub(super) fn packages(sh: &Shell, workspace: &Workspace) -> Result<Option<BTreeSet<String>>> {
    let status = cmd!(sh, "git status --porcelain --untracked-files=all --no-renames").quiet().read()?;
    // Two letters and a space stand before each path.
    let paths = status.lines().filter_map(|line| line.get(3..));
    let folders = workspace.packages.iter().map(|package| {
        (package.name.as_str(), package.folder().strip_prefix(root()).unwrap_or(package.folder()))
    });
    Ok(changed(paths, &folders.collect::<Vec<_>>()))
}

fn changed<'a>(paths: impl Iterator<Item = &'a str>, folders: &[(&str, &Path)]) -> Option<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for path in paths {
        let path = Path::new(path.trim_matches('"'));
        if SHARED.iter().any(|shared| path.starts_with(shared)) {
            return None;
        }
        // The innermost package that the file is in. Documents of the workspace are in none.
        let of = folders.iter().filter(|(_, folder)| path.starts_with(folder));
        names.extend(
            of.max_by_key(|(_, folder)| folder.components().count()).map(|(name, _)| (*name).to_owned()),
        );
    }
    (!names.is_empty()).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_belong_to_the_innermost_package() {
        let folders = [("kernels", "kernels"), ("sim", "kernels/sim"), ("nn", "nn")];
        let folders = folders.map(|(name, folder)| (name, Path::new(folder)));
        let of = |paths: &[&str]| changed(paths.iter().copied(), &folders);
        let names = |names: &[&str]| Some(names.iter().map(|&name| name.to_owned()).collect());
        assert_eq!(of(&["kernels/src/a.rs", "nn/README.md", "nn/src/b.rs"]), names(&["kernels", "nn"]));
        assert_eq!(of(&["kernels/sim/src/a.rs", "README.md"]), names(&["sim"]));
        assert_eq!(of(&["\"nn/tests/a b\""]), names(&["nn"]));
        assert_eq!(of(&["nn/src/a.rs", "Cargo.lock"]), None);
        assert_eq!(of(&["nnn/src/a.rs"]), None);
        assert_eq!(of(&[]), None);
    }
}
