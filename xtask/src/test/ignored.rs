//! Tests that exist but did not run, with their reasons: a skip is a result.
//!
//! No test is switched off here: this file reads the attributes of others. The harness lists the names. The reason of a
//! `#[test]` stands in its source, in the attribute `ignore`; a case of a conformance suite carries it in its name, in
//! parentheses.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use xshell::{Shell, cmd};

use crate::workspace::{Result, files, root};

pub(crate) struct Ignored {
    name: String,
    reason: String,
}

/// Asks all test programs. They are built already, so this takes a second.
pub(crate) fn list(sh: &Shell) -> Result<Vec<Ignored>> {
    let targets = ["--workspace", "--all-features", "--lib", "--bins", "--tests"];
    let list = ["--list", "--ignored", "--format", "terse"];
    let names = cmd!(sh, "cargo test --quiet {targets...} -- {list...}").quiet().ignore_stderr().read()?;
    let reasons = reasons(root())?;
    Ok(names
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(|name| parse(name, &reasons))
        .collect())
}

/// Grouped by reason, with counts.
pub(crate) fn summary(ignored: &[Ignored]) -> String {
    let mut groups = BTreeMap::<&str, Vec<&str>>::new();
    for test in ignored {
        groups.entry(&test.reason).or_default().push(&test.name);
    }
    let mut text = format!("ignored tests: {}\n", ignored.len());
    for (reason, names) in groups {
        text += &format!("  {:>4}  {reason}: {}", names.len(), names[..names.len().min(3)].join(", "));
        text += if names.len() > 3 { ", …\n" } else { "\n" };
    }
    text
}

fn parse(name: &str, reasons: &BTreeMap<String, String>) -> Ignored {
    let in_name = name.strip_suffix(')').and_then(|name| name.split_once(" ("));
    let function = name.rsplit("::").next().unwrap_or(name);
    let (name, reason) = match in_name {
        Some((name, reason)) => (name, reason),
        None => (name, reasons.get(function).map_or("no reason given", String::as_str)),
    };
    Ignored { name: name.to_owned(), reason: reason.to_owned() }
}

/// Reasons by the function's name, from all sources.
fn reasons(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut reasons = BTreeMap::new();
    for path in files(root)?.iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
        collect(&fs::read_to_string(path)?, &mut reasons);
    }
    Ok(reasons)
}

/// The start of the attribute, spelled so that this line is not mistaken for one.
const ATTRIBUTE: &str = concat!("#[", "ignore = \"");

fn collect(source: &str, reasons: &mut BTreeMap<String, String>) {
    let mut reason = None;
    for line in source.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix(ATTRIBUTE) {
            reason = rest.strip_suffix("\"]").map(str::to_owned);
        } else if let Some((_, signature)) = line.split_once("fn ")
            && let Some(reason) = reason.take()
        {
            let name: String = signature.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            reasons.insert(name, reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_come_from_the_attribute_or_from_the_name() {
        let mut reasons = BTreeMap::new();
        let source = format!("#[test]\n    {ATTRIBUTE}takes an hour\"]\n    fn all_pairs() {{\n");
        collect(&source, &mut reasons);
        let tests = ["codec::all_pairs", "cuda::gemm (no device 0)", "cuda::cast (no device 0)", "other"];
        let ignored: Vec<_> = tests.iter().map(|name| parse(name, &reasons)).collect();
        assert_eq!(
            summary(&ignored),
            "ignored tests: 4\n     2  no device 0: cuda::gemm, cuda::cast\n     1  no reason given: other\n     \
             1  takes an hour: codec::all_pairs\n"
        );
    }
}
