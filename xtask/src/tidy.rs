//! `cargo xtask tidy`: rules of the tree that no compiler checks.

mod circles;
mod docs;
mod errors;
mod links;
mod named_tests;
mod tokens;

use std::fs;
use std::path::{Path, PathBuf};

use crate::workspace::{Result, Workspace, files, root, shell};

/// No file in the repository is larger.
const MAX_BYTES: u64 = 1 << 20;
/// The numbers of lines beyond which a source file should be split, and beyond which it must be.
const MANY_LINES: usize = 500;
const MAX_LINES: usize = 700;
/// A thin `main.rs` of this very program.
const MAX_MAIN_LINES: usize = 110;
/// Marks of unfinished work, spelled so that this file passes.
const UNFINISHED: [&str; 3] = [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("FIX", "ME")];
/// A doc test under this mark never runs.
const UNTESTED: &str = concat!("```", "ignore");

/// Words that no doc comment begins with: they make a riddle of what a sentence would say.
const RIDDLES: [&str; 9] = ["What", "Where", "Of", "How", "Which", "Who", "Whom", "Whose", "When"];

const LICENCES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

#[derive(Debug, Default, PartialEq)]
struct Findings {
    errors: Vec<String>,
    warnings: Vec<String>,
}

#[derive(Default, clap::Args)]
pub(crate) struct Tidy {
    /// Only lists files that refer to each other in a circle, of the checkout in this folder (default: of this one)
    #[arg(long, value_name = "FOLDER", num_args = 0..=1)]
    circles: Option<Option<PathBuf>>,
}

pub(crate) fn run(options: &Tidy) -> Result {
    let findings = match &options.circles {
        Some(folder) => {
            let folder = folder.as_deref().unwrap_or(root()).canonicalize()?;
            Findings { errors: circles::circles(&folder)?, warnings: Vec::new() }
        }
        None => all()?,
    };
    for warning in &findings.warnings {
        println!("warning: {warning}");
    }
    for error in &findings.errors {
        println!("error: {error}");
    }
    match findings.errors.len() {
        0 => Ok(()),
        count => Err(format!("tidy: {count} errors").into()),
    }
}

fn all() -> Result<Findings> {
    let mut findings = Findings::default();
    for path in files(root())? {
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string().replace('\\', "/");
        let bytes = fs::metadata(&path)?.len();
        if bytes > MAX_BYTES {
            findings.errors.push(format!("{name}: {bytes} bytes: at most {MAX_BYTES}"));
        }
        if path.extension().is_some_and(|end| end == "rs") {
            source(&name, &fs::read_to_string(&path)?, &mut findings);
        }
    }
    for package in Workspace::read(&shell()?)?.packages {
        manifest(&package.name, &fs::read_to_string(package.folder().join("Cargo.toml"))?, &mut findings);
        if package.is_published() {
            published(&package.name, package.folder(), &mut findings)?;
        }
    }

    findings.errors.extend(errors::untested(root())?);
    findings.errors.extend(circles::circles(root())?);
    findings.errors.extend(links::broken(root())?);
    findings.errors.extend(named_tests::missing(root())?);
    let (errors, counts) = docs::gaps(root())?;
    findings.errors.extend(errors);
    findings.warnings.extend(counts);
    Ok(findings)
}

fn source(name: &str, text: &str, findings: &mut Findings) {
    for (number, line) in (1..).zip(text.lines()) {
        if line.contains('\t') {
            findings.errors.push(format!("{name}:{number}: a tab: indent with spaces, write \\t in strings"));
        }
        if line.ends_with([' ', '\t']) {
            findings.errors.push(format!("{name}:{number}: space at the end of the line"));
        }
        for word in UNFINISHED.iter().filter(|word| line.contains(**word)) {
            findings.errors.push(format!("{name}:{number}: {word}: finish it or return an error"));
        }
        if line.contains(UNTESTED) {
            findings
                .errors
                .push(format!("{name}:{number}: {UNTESTED}: make it run, or mark it no_run or text"));
        }
    }
    for (number, word) in riddles(text) {
        let remedy = "begin with a sentence that says what the item is or does";
        findings.errors.push(format!("{name}:{number}: a doc comment begins with \"{word}\": {remedy}"));
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        findings.errors.push(format!("{name}: {lines} lines: at most {MAX_LINES}; look for the seam"));
    } else if lines > MANY_LINES {
        findings.warnings.push(format!("{name}: {lines} lines: past {MANY_LINES} look for the seam"));
    }
    if name == "xtask/src/main.rs" && lines > MAX_MAIN_LINES {
        findings
            .errors
            .push(format!("{name}: {lines} lines: at most {MAX_MAIN_LINES}; a task has its own file"));
    }
}

/// The doc comments that begin with one of [`RIDDLES`], by line.
fn riddles(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let mut before = None;
    for (number, line) in (1..).zip(text.lines().map(str::trim_start)) {
        let kind =
            ["///", "//!"].into_iter().find(|mark| line.starts_with(mark) && !line.starts_with("////"));
        if let Some(mark) = kind.filter(|_| kind != before) {
            let first = line[mark.len()..]
                .split(|c: char| c.is_whitespace() || ",:;".contains(c))
                .find(|word| !word.is_empty());
            found.extend(RIDDLES.iter().find(|word| first == Some(**word)).map(|word| (number, *word)));
        }
        before = kind;
    }
    found
}

fn manifest(name: &str, text: &str, findings: &mut Findings) {
    if !text.replace('\r', "").contains("[lints]\nworkspace = true") {
        findings.errors.push(format!("{name}/Cargo.toml: [lints] workspace = true is missing"));
    }
}

fn published(name: &str, folder: &Path, findings: &mut Findings) -> Result {
    if !folder.join("README.md").is_file() {
        findings.errors.push(format!("{name}: README.md is missing: a published crate brings its own"));
    }
    for licence in LICENCES {
        let text = fs::read(root().join(licence)).map_err(|error| format!("{licence}: {error}"))?;
        if fs::read(folder.join(licence)).ok().as_ref() != Some(&text) {
            findings.errors.push(format!("{name}: {licence} is missing or differs from the root's: copy it"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, text: &str) -> Findings {
        let mut findings = Findings::default();
        source(name, text, &mut findings);
        findings
    }

    #[test]
    fn a_clean_source_passes_with_either_line_ending() {
        assert_eq!(of("a.rs", "fn a() {}\n"), Findings::default());
        assert_eq!(of("a.rs", "fn a() {}\r\n"), Findings::default());
    }

    #[test]
    fn doc_comments_begin_with_a_sentence() {
        let text = "//! Where it is.\n\n/// Adds.\n/// When it rains.\nfn a() {} // What\n    /// Of: b\n//// Who\n/// Whether.\n";
        assert_eq!(riddles(text), [(1, "Where"), (6, "Of")]);
        assert!(of("a.rs", text).errors[0].starts_with("a.rs:1: a doc comment begins with \"Where\""));
    }

    #[test]
    fn stray_characters_and_words_are_named_with_their_line() {
        assert_eq!(of("a.rs", "fn a() {}\n\tlet b;\n").errors.len(), 1);
        assert!(of("a.rs", "fn a() {} \n").errors[0].starts_with("a.rs:1: space"));
        for word in UNFINISHED {
            assert_eq!(of("a.rs", &format!("\n// {word}")).errors[0].split_once(": ").unwrap().0, "a.rs:2");
        }
        assert_eq!(of("a.rs", &format!("/// {UNTESTED}")).errors.len(), 1);
    }

    #[test]
    fn long_files_warn_then_fail() {
        assert_eq!(of("a.rs", &"\n".repeat(MANY_LINES)), Findings::default());
        assert_eq!(of("a.rs", &"\n".repeat(MAX_LINES)).warnings.len(), 1);
        assert_eq!(of("a.rs", &"\n".repeat(MAX_LINES + 1)).errors.len(), 1);
        assert_eq!(of("xtask/src/main.rs", &"\n".repeat(MAX_MAIN_LINES)), Findings::default());
        assert_eq!(of("xtask/src/main.rs", &"\n".repeat(MAX_MAIN_LINES + 1)).errors.len(), 1);
    }

    #[test]
    fn a_manifest_without_the_lints_of_the_workspace_fails() {
        let mut findings = Findings::default();
        manifest("a", "[package]\n\n[lints]\nworkspace = true\n", &mut findings);
        assert_eq!(findings, Findings::default());
        manifest("a", "[package]\n", &mut findings);
        assert_eq!(findings.errors.len(), 1);
    }
}
