//! Checks that crates.io would accept the packages: every published crate packs, and its sources include no file that its
//! package lacks.
//!
//! CI's `cargo package` also builds the libraries from their packages, which takes minutes. It cannot see examples.

use std::collections::BTreeSet;
use std::fs;

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace};

/// The starts of macro calls that include a file by a path relative to the source.
const INCLUDES: [&str; 3] = ["include_str!(\"", "include_bytes!(\"", "include!(\""];
/// The item below it is compiled by doc tests alone, in the repository.
const DOCTEST: &str = "#[cfg(doctest)]";

/// Packs all published crates and returns how many there are.
pub(crate) fn check(sh: &Shell, workspace: &Workspace) -> Result<String> {
    let published: Vec<_> = workspace.packages.iter().filter(|package| package.is_published()).collect();
    let arguments = published.iter().flat_map(|package| ["--package", &package.name]);
    cmd!(sh, "cargo package --quiet --no-verify --allow-dirty --offline {arguments...}").run()?;
    let mut lacking = Vec::new();
    for package in &published {
        let name = &package.name;
        let list = cmd!(sh, "cargo package --quiet --list --allow-dirty --offline --package {name}");
        let list = list.quiet().read()?.replace('\\', "/");
        let packed: BTreeSet<&str> = list.lines().collect();
        for file in packed.iter().filter(|file| file.ends_with(".rs")) {
            let text = fs::read_to_string(package.folder().join(file))?;
            for included in includes(file, &text).iter().filter(|path| !packed.contains(path.as_str())) {
                lacking.push(format!("{name}/{file} includes {included}, which is not packed"));
            }
        }
    }
    if lacking.is_empty() {
        Ok(format!("{} crates", published.len()))
    } else {
        Err(lacking.join("\n").into())
    }
}

/// The files that a source includes, as paths in its package; `..` at the start leads out of it.
fn includes(file: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut before = "";
    for line in text.lines() {
        let starts = INCLUDES.iter().filter(|_| before.trim() != DOCTEST);
        for rest in starts.flat_map(|start| line.split(start).skip(1)) {
            let path = rest.split('"').next().unwrap_or_default();
            found.push(beside(file, path));
        }
        before = line;
    }
    found
}

/// `path` as seen from the folder of `file`.
fn beside(file: &str, path: &str) -> String {
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_the_sources_folder() {
        assert_eq!(beside("src/lib.rs", "../README.md"), "README.md");
        assert_eq!(beside("src/backend/cuda/ops/source.rs", "cast.cu"), "src/backend/cuda/ops/cast.cu");
        assert_eq!(beside("examples/train/text.rs", "../../data/text.txt"), "data/text.txt");
        assert_eq!(beside("examples/train/text.rs", "../../../other/src/lib.rs"), "../other/src/lib.rs");
        assert_eq!(beside("build.rs", "./a.txt"), "a.txt");
    }

    #[test]
    fn includes_are_found_in_every_line_but_those_of_doc_tests() {
        let quote = |start: &str, path: &str| format!("{start}{path}\")");
        let text = format!(
            "#![doc = {}]\nconst B: (&[u8], &str) = ({}, {});\n{DOCTEST}\n#[doc = {}]\nstruct Readme;\n",
            quote(INCLUDES[0], "../README.md"),
            quote(INCLUDES[1], "a.bin"),
            quote(INCLUDES[0], "../../b.txt"),
            quote(INCLUDES[0], "../../README.md"),
        );
        assert_eq!(includes("src/lib.rs", &text), ["README.md", "../b.txt", "src/a.bin"]);
    }
}
