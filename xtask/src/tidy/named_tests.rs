//! The page about Transformer Engine names a test for each option that is here: every one of them exists.

use std::fs;
use std::path::Path;

use crate::workspace::Result;

const PAGE: &str = "docs/transformer-engine.md";
const HEADING: &str = "## What is here";
/// The folders of the file in `file::test`.
const FOLDERS: [&str; 2] = ["fp8-nn/tests/suite", "fp8-nn/tests/suite/every_device"];

/// Returns an error for each test that the table names and the suite does not have.
pub(super) fn missing(root: &Path) -> Result<Vec<String>> {
    let page = fs::read_to_string(root.join(PAGE))?;
    let read = |file: &str| {
        let paths = FOLDERS.map(|folder| root.join(folder).join(format!("{file}.rs")));
        paths.iter().find_map(|path| fs::read_to_string(path).ok())
    };
    Ok(in_text(&page, read))
}

fn in_text(page: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut errors = Vec::new();
    let section = page.split_once(HEADING).map_or("", |(_, rest)| rest);
    let section = section.split("\n## ").next().unwrap_or_default();
    if !section.contains("::") {
        errors.push(format!("{PAGE}: no tests below {HEADING}"));
    }
    // Every second piece is between backticks. Operations are named with their module, `ops`.
    for name in section.split('`').skip(1).step_by(2) {
        let Some((file, test)) = name.split_once("::").filter(|(file, _)| *file != "ops") else { continue };
        let is_test = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
        };
        if !is_test(file) || !is_test(test) {
            continue;
        }
        if !read(file).is_some_and(|source| source.contains(&format!("fn {test}("))) {
            errors.push(format!("{PAGE}: `{name}`: no {file}.rs below {} has such a test", FOLDERS[0]));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_are_missing_are_named() {
        let page = "`a::b`\n## What is here\n| `Linear` | `suite::one`, `suite::two` |\n| `Diagonal::BottomRight` | `gone::three` |\n## Next\n`x::y`";
        let read = |file: &str| (file == "suite").then(|| "fn one() {}".to_owned());
        let errors = in_text(page, read);
        assert_eq!(
            errors,
            [
                "docs/transformer-engine.md: `suite::two`: no suite.rs below fp8-nn/tests/suite has such a test",
                "docs/transformer-engine.md: `gone::three`: no gone.rs below fp8-nn/tests/suite has such a test"
            ]
        );
        assert_eq!(in_text("nothing", read), ["docs/transformer-engine.md: no tests below ## What is here"]);
    }
}
