//! One mutant of a crate, as cargo-mutants describes it: where it is, what replaces the code, and what the list calls it.

use std::fmt;
use std::process::Command;

use serde::Deserialize;

use super::copied::Copied;
use crate::mutants::shuffle;
use crate::workspace::Result;

/// The version whose JSON this file reads.
const VERSION: &str = "27";

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mutant {
    /// The file, relative to the workspace.
    pub(super) file: String,
    /// The first line of the change, from 1 on.
    pub(super) line: usize,
    /// The name of the mutant in the list of survivors, which all mutants that are spelled alike share.
    key: String,
    /// Tells it from others with this key: 1 for the first in its file.
    ordinal: usize,
    /// The bytes of the file that are replaced.
    at: std::ops::Range<usize>,
    new: String,
}

/// The key: the file below `src`, and the line with the change marked or a description of it.
impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)
    }
}

impl Mutant {
    /// A name that no other mutant of the crate has.
    pub(super) fn id(&self) -> String {
        format!("{} #{}", self.key, self.ordinal)
    }

    /// The file's text with the change.
    pub(super) fn apply(&self, source: &str) -> Result<String> {
        let old = source.get(self.at.clone()).ok_or_else(|| format!("{}: changed meanwhile", self.file))?;
        let (before, after) = (&source[..self.at.start], &source[self.at.start + old.len()..]);
        Ok([before, &self.new, after].concat())
    }
}

/// A mutant, as `cargo mutants --list --json` prints it.
#[derive(Deserialize)]
struct Listed {
    name: String,
    file: String,
    genre: String,
    replacement: String,
    span: Span,
}

#[derive(Deserialize)]
struct Span {
    start: Place,
    end: Place,
}

/// Both from 1 on; columns count characters.
#[derive(Clone, Copy, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

impl Place {
    fn offset(self, source: &str) -> Option<usize> {
        let line = source.split_inclusive('\n').take(self.line.checked_sub(1)?).map(str::len).sum::<usize>();
        let column = self.column.checked_sub(1)?;
        let rest = source.get(line..)?;
        Some(line + rest.chars().take(column).map(char::len_utf8).sum::<usize>())
    }
}

/// All mutants of a crate in the copy of the workspace.
pub(super) fn list(copy: &Copied, package: &str) -> Result<Vec<Mutant>> {
    let output = command()?
        .args(["mutants", "--list", "--json", "--colors", "never", "--package", package, "--dir"])
        .arg(copy.folder())
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo mutants --list: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    read(&String::from_utf8(output.stdout)?, package, |file| copy.read(file))
}

/// cargo-mutants, from the folder that this task's error message names or from the path.
fn command() -> Result<Command> {
    let root = "target/tools";
    let here = crate::workspace::root().join(root).join("bin/cargo-mutants");
    for program in [here.as_os_str(), "cargo-mutants".as_ref()] {
        let version = Command::new(program).args(["mutants", "--version"]).output();
        let is_it =
            |text: &str| text.split(' ').nth(1).is_some_and(|it| it.split('.').next() == Some(VERSION));
        if version.is_ok_and(|version| is_it(&String::from_utf8_lossy(&version.stdout))) {
            return Ok(Command::new(program));
        }
    }
    Err(format!(
        "mutate-crates: cargo-mutants {VERSION} is not installed: \
         cargo install --locked cargo-mutants@^{VERSION} --root {root}"
    )
    .into())
}

fn read(json: &str, package: &str, source: impl Fn(&str) -> Result<String>) -> Result<Vec<Mutant>> {
    let listed: Vec<Listed> = serde_json::from_str(json)?;
    let mut mutants: Vec<Mutant> = Vec::with_capacity(listed.len());
    for listed in listed {
        let text = source(&listed.file)?;
        let places = [listed.span.start, listed.span.end].map(|place| place.offset(&text));
        let [Some(start), Some(end)] = places else {
            return Err(format!("{}: no such place", listed.name).into());
        };
        let short = listed.file.strip_prefix(&format!("{package}/src/")).unwrap_or(&listed.file);
        let key = key(&listed, short, &text, start..end);
        let ordinal = 1 + mutants.iter().filter(|mutant| mutant.key == key).count();
        let Listed { file, replacement: new, span, .. } = listed;
        mutants.push(Mutant { file, line: span.start.line, key, ordinal, at: start..end, new });
    }
    Ok(mutants)
}

/// An operator is marked in its line; what may be long is described as cargo-mutants does, without its place.
fn key(listed: &Listed, file: &str, source: &str, at: std::ops::Range<usize>) -> String {
    let old = &source[at.clone()];
    if listed.genre.ends_with("Operator") && !old.contains('\n') {
        let begin = source[..at.start].rfind('\n').map_or(0, |newline| newline + 1);
        let end = source[at.end..].find('\n').map_or(source.len(), |newline| at.end + newline);
        let (before, after) = (source[begin..at.start].trim_start(), &source[at.end..end]);
        return format!("{file}: {before}«{old}→{}»{}", listed.replacement, after.trim_end());
    }
    let description = listed.name.splitn(4, ':').last().unwrap_or_default();
    format!("{file}: {}", description.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// As many mutants as asked for: the same for the same seed, and hardly others where a few come or go.
pub(super) fn draw(mut all: Vec<Mutant>, count: usize, seed: u64) -> Vec<Mutant> {
    shuffle(&mut all, |mutant| format!("{seed} {}", mutant.id()));
    all.truncate(count);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "fn f(a: u8) -> u8 {\n    let µ = a + 1;\n    µ\n}\nfn g(a: u8) -> u8 {\n    let µ = a + 1;\n    µ\n}\n";

    fn mutants() -> Vec<Mutant> {
        let operator = |line: usize| {
            format!(
                r#"{{"name": "p/src/a.rs:{line}:15: replace + with - in f", "file": "p/src/a.rs", "genre": "BinaryOperator",
                    "replacement": "-", "function": null, "package": "p", "diff": "",
                    "span": {{"start": {{"line": {line}, "column": 15}}, "end": {{"line": {line}, "column": 16}}}}}}"#
            )
        };
        let body = r#"{"name": "p/src/a.rs:2:5: replace f -> u8 with\n 0", "file": "p/src/a.rs", "genre": "FnValue",
            "replacement": "0", "span": {"start": {"line": 2, "column": 5}, "end": {"line": 3, "column": 6}}}"#;
        let json = format!("[{}, {}, {body}]", operator(2), operator(6));
        read(
            &json,
            "p",
            |file| if file == "p/src/a.rs" { Ok(SOURCE.to_owned()) } else { Err("no file".into()) },
        )
        .unwrap()
    }

    #[test]
    fn a_mutant_is_named_by_its_line_or_its_function_and_applied_where_it_is() {
        let [first, second, body] = <[Mutant; 3]>::try_from(mutants()).unwrap();
        assert_eq!(first.to_string(), "a.rs: let µ = a «+→-» 1;");
        assert_eq!((first.to_string(), 1, 2), (second.to_string(), first.ordinal, second.ordinal));
        assert_ne!(first.id(), second.id());
        assert_eq!(body.to_string(), "a.rs: replace f -> u8 with 0");
        assert_eq!(first.apply(SOURCE).unwrap(), SOURCE.replacen("a + 1", "a - 1", 1));
        assert_eq!(second.apply(SOURCE).unwrap().matches("a - 1").count(), 1);
        assert!(second.apply(SOURCE).unwrap().starts_with(&SOURCE[..40]));
        assert!(body.apply(SOURCE).unwrap().starts_with("fn f(a: u8) -> u8 {\n    0\n}\n"));
        assert!(body.apply("").unwrap_err().to_string().contains("changed meanwhile"));
    }

    #[test]
    fn a_draw_is_the_seeds_and_differs_between_seeds() {
        let all: Vec<Mutant> = (1..=40).map(|ordinal| Mutant { ordinal, ..mutants().remove(0) }).collect();
        let ids = |seed| draw(all.clone(), 10, seed).iter().map(Mutant::id).collect::<Vec<_>>();
        assert_eq!((ids(1).len(), ids(1)), (10, ids(1)));
        assert_ne!(ids(1), ids(2));
    }
}
