//! The list of mutants that no case can or need kill, each with its reason: `tests/mutants.txt`.
//!
//! With `*` for the ordinal a line stands for all mutants of this kind of instructions that are spelled alike in the kernel.
//! A line `FILE KERNEL unreached REASON` stands for all mutants of a kernel in code that no case reaches: copies that the
//! compiler made for conditions that cannot meet.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use crate::workspace::{Result, root};

/// The word in place of kind, ordinal and instruction.
pub(crate) const UNREACHED: &str = "unreached";

const FILE: &str = "fp8-kernels/tests/mutants.txt";

/// Reasons by key, as `Mutant::key` spells it: two words, kind, ordinal and the instruction in backquotes.
pub(crate) fn read() -> Result<BTreeMap<String, String>> {
    match fs::read_to_string(root().join(FILE)) {
        Ok(text) => parse(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(format!("{FILE}: {error}").into()),
    }
}

fn parse(text: &str) -> Result<BTreeMap<String, String>> {
    let mut reasons = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (key, reason) = match line.split(' ').nth(2) {
            Some(UNREACHED) => line
                .split_once(&format!(" {UNREACHED} "))
                .map_or((line.to_owned(), ""), |(kernel, reason)| {
                    (format!("{kernel} {UNREACHED}"), reason.trim())
                }),
            _ => line
                .rsplit_once("` ")
                .map_or((line.to_owned(), ""), |(key, reason)| (format!("{key}`"), reason.trim())),
        };
        if reason.is_empty() {
            return Err(
                format!("{FILE}:{number}: no reason: FILE KERNEL KIND ORDINAL `INSTRUCTION` REASON").into()
            );
        }
        if reasons.insert(key, reason.to_owned()).is_some() {
            return Err(format!("{FILE}:{number}: listed twice").into());
        }
    }
    Ok(reasons)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_keys_with_reasons() {
        let text = "# a comment\n\nnorm k delete 2 `bar.sync 0` superfluous: no store follows\n";
        let reasons = parse(text).unwrap();
        assert_eq!(reasons["norm k delete 2 `bar.sync 0`"], "superfluous: no store follows");
        let unreached = parse("norm k unreached copies for another type\n").unwrap();
        assert_eq!(unreached["norm k unreached"], "copies for another type");
        assert!(parse("norm k unreached\n").unwrap_err().to_string().contains(":1: no reason"));
        assert!(parse("norm k delete 2 `bar.sync 0`\n").unwrap_err().to_string().contains(":1: no reason"));
        assert!(parse(&text.repeat(2)).unwrap_err().to_string().contains(":6: listed twice"));
    }
}
