//! The list of mutants that no case can or need kill, each with its reason: `tests/mutants.txt`.
//!
//! A reason that begins with `=` says that no input tells the mutant from the kernel: such mutants are no part of the score.
//! With `*` for the ordinal a line stands for all mutants of this kind of instructions that are spelled alike in the kernel,
//! with `* *` for file and kernel as well for those in all kernels.
//! A line `FILE KERNEL unreached REASON` stands for all mutants of a kernel in code that no case reaches: copies that the
//! compiler made for conditions that cannot meet.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use crate::workspace::{Result, root};

/// The word in place of kind, ordinal and instruction.
pub(crate) const UNREACHED: &str = "unreached";

const FILE: &str = "fp8-kernels/tests/mutants.txt";

/// How the reason begins where no input tells the mutant from the kernel.
const EQUAL: &str = "= ";

/// Why a mutant need not be killed.
#[derive(Debug, PartialEq)]
pub(crate) struct Reason {
    /// Whether it is the kernel, spelled in another way.
    pub(crate) is_equal: bool,
    text: String,
}

/// Reasons by key, as `Mutant::key` spells it: two words, kind, ordinal and the instruction in backquotes.
pub(crate) fn read() -> Result<BTreeMap<String, Reason>> {
    match fs::read_to_string(root().join(FILE)) {
        Ok(text) => parse(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(format!("{FILE}: {error}").into()),
    }
}

fn parse(text: &str) -> Result<BTreeMap<String, Reason>> {
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
        let (is_equal, text) = match reason.strip_prefix(EQUAL) {
            Some(text) => (true, text.trim()),
            None => (false, reason),
        };
        if matches!(text, "" | "=") {
            return Err(
                format!("{FILE}:{number}: no reason: FILE KERNEL KIND ORDINAL `INSTRUCTION` REASON").into()
            );
        }
        if reasons.insert(key, Reason { is_equal, text: text.to_owned() }).is_some() {
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
        let reason = |is_equal, text: &str| Reason { is_equal, text: text.to_owned() };
        assert_eq!(reasons["norm k delete 2 `bar.sync 0`"], reason(false, "superfluous: no store follows"));
        let unreached = parse("norm k unreached copies for another type\n").unwrap();
        assert_eq!(unreached["norm k unreached"], reason(false, "copies for another type"));
        let equal = parse("* * compare * `setp.lt.f32 %p, %f, 0f3F800000` = clamped to itself\n").unwrap();
        assert_eq!(
            equal["* * compare * `setp.lt.f32 %p, %f, 0f3F800000`"],
            reason(true, "clamped to itself")
        );
        assert!(parse("norm k delete 2 `bar.sync 0` =\n").unwrap_err().to_string().contains(":1: no reason"));
        assert!(parse("norm k unreached\n").unwrap_err().to_string().contains(":1: no reason"));
        assert!(parse("norm k delete 2 `bar.sync 0`\n").unwrap_err().to_string().contains(":1: no reason"));
        assert!(parse(&text.repeat(2)).unwrap_err().to_string().contains(":6: listed twice"));
    }
}
