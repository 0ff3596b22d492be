//! The list of mutants that no case can or need kill, each with its reason: `tests/mutants.txt`, whose head says how a
//! line is spelled.
//!
//! A reason that begins with `=` says that no input tells the mutant from the kernel: such mutants are no part of the
//! score. No line stands for kernels that it does not name, nor for more mutants than it says: so that a reason never
//! covers what nobody looked at.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use crate::workspace::{Result, root};

/// The word in place of kind, ordinal and instruction.
pub(crate) const UNREACHED: &str = "unreached";

const FILE: &str = "fp8-kernels/tests/mutants.txt";

/// The format of a line.
const FORMAT: &str = "FILE KERNEL[,KERNEL…] KIND ORDINAL `INSTRUCTION` REASON, or xCOUNT for ORDINAL, or \
                      FILE KERNEL[,KERNEL…] unreached REASON";

/// The start of the reason for a mutant that no input can tell from the kernel.
const EQUAL: &str = "= ";

/// Why a mutant need not be killed.
#[derive(Debug, PartialEq)]
pub(crate) struct Reason {
    /// Whether it is the kernel, spelled in another way.
    pub(crate) is_equal: bool,
    /// The number of mutants that the line covers, if it is for all that are spelled alike.
    pub(crate) count: Option<usize>,
    /// The number of the line in the list, from 1.
    pub(crate) number: usize,
    text: String,
}

/// Reasons by key, one for each kernel of a line.
pub(crate) type Known = BTreeMap<String, Reason>;

/// The key of one mutant: its line without the reason.
pub(crate) fn key(file: &str, kernel: &str, kind: &str, ordinal: usize, instruction: &str) -> String {
    format!("{file} {kernel} {kind} {ordinal} `{instruction}`")
}

/// The key of all that are spelled and changed alike in a kernel. Their number is not in it.
pub(crate) fn key_of_all(file: &str, kernel: &str, kind: &str, instruction: &str) -> String {
    format!("{file} {kernel} {kind} x `{instruction}`")
}

/// The key of all that no case reaches in a kernel.
pub(crate) fn key_of_unreached(file: &str, kernel: &str) -> String {
    format!("{file} {kernel} {UNREACHED}")
}

/// The list, empty where there is none.
pub(crate) fn read() -> Result<Known> {
    match fs::read_to_string(root().join(FILE)) {
        Ok(text) => parse(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Known::new()),
        Err(error) => Err(format!("{FILE}: {error}").into()),
    }
}

pub(super) fn parse(text: &str) -> Result<Known> {
    let mut known = Known::new();
    for (number, text) in (1..).zip(text.lines()) {
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let line = Line::read(text).map_err(|why| format!("{FILE}:{number}: {why}"))?;
        let (is_equal, text) = match line.reason.strip_prefix(EQUAL) {
            Some(text) => (true, text.trim()),
            None => (false, line.reason),
        };
        if matches!(text, "" | "=") {
            return Err(format!("{FILE}:{number}: no reason: expected {FORMAT}").into());
        }
        let count = match line.which {
            Which::All(count) => Some(count),
            Which::One(_) | Which::Unreached => None,
        };
        for kernel in line.kernels.split(',') {
            let reason = Reason { is_equal, count, number, text: text.to_owned() };
            if let Some(before) = known.insert(line.key(kernel), reason) {
                let before = before.number;
                return Err(format!("{FILE}:{number}: listed twice, also in line {before}").into());
            }
        }
    }
    Ok(known)
}

/// The mutants of its kernels that a line covers.
enum Which {
    /// The one with this ordinal.
    One(usize),
    /// All that are spelled alike, this many.
    All(usize),
    Unreached,
}

/// A line in parts.
struct Line<'a> {
    file: &'a str,
    kernels: &'a str,
    kind: &'a str,
    which: Which,
    instruction: &'a str,
    reason: &'a str,
}

impl<'a> Line<'a> {
    fn read(text: &'a str) -> std::result::Result<Self, String> {
        let wrong = || format!("expected {FORMAT}");
        let (file, rest) = text.split_once(' ').ok_or_else(wrong)?;
        let (kernels, rest) = rest.split_once(' ').ok_or_else(wrong)?;
        if file.contains('*') || kernels.contains('*') {
            return Err(format!(
                "* for a file or a kernel: a reason holds where someone looked; name the kernels: {FORMAT}"
            ));
        }
        if kernels.split(',').any(str::is_empty) {
            return Err(format!("a kernel without a name in '{kernels}': {}", wrong()));
        }
        let (kind, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        if kind == UNREACHED {
            let (which, instruction, reason) = (Which::Unreached, "", rest.trim());
            return Ok(Self { file, kernels, kind, which, instruction, reason });
        }
        let (which, rest) = rest.split_once(' ').ok_or_else(wrong)?;
        let which = Self::which(which)?;
        let (instruction, reason) =
            rest.strip_prefix('`').and_then(|rest| rest.split_once('`')).ok_or_else(wrong)?;
        Ok(Self { file, kernels, kind, which, instruction, reason: reason.trim() })
    }

    fn which(word: &str) -> std::result::Result<Which, String> {
        if word == "*" {
            return Err(format!("* for the ordinal: say how many mutants these are, as in x3: {FORMAT}"));
        }
        let number = |digits: &str| digits.parse().ok().filter(|number| *number > 0);
        let which = match word.strip_prefix('x') {
            Some(count) => number(count).map(Which::All),
            None => number(word).map(Which::One),
        };
        which.ok_or_else(|| {
            format!("ordinal '{word}': expected a number from 1 on, or x and a count: {FORMAT}")
        })
    }

    fn key(&self, kernel: &str) -> String {
        let Self { file, kind, instruction, .. } = self;
        match self.which {
            Which::One(ordinal) => key(file, kernel, kind, ordinal, instruction),
            Which::All(_) => key_of_all(file, kernel, kind, instruction),
            Which::Unreached => key_of_unreached(file, kernel),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn lines_are_keys_with_reasons() {
        let text = "# a comment\n\nnorm k delete 2 `bar.sync 0` superfluous: no store follows\n";
        let known = parse(text).unwrap();
        let reason =
            |is_equal, count, number, text: &str| Reason { is_equal, count, number, text: text.to_owned() };
        let expected = reason(false, None, 3, "superfluous: no store follows");
        assert_eq!(known[&key("norm", "k", "delete", 2, "bar.sync 0")], expected);
        let known = parse("norm k,l unreached copies for another type\n").unwrap();
        assert_eq!(known.len(), 2);
        assert_eq!(known[&key_of_unreached("norm", "l")], reason(false, None, 1, "copies for another type"));
        let known = parse("norm k,l compare x3 `setp.lt.f32 %p, %f, 1` = clamped to itself\n").unwrap();
        assert_eq!(known.len(), 2);
        for kernel in ["k", "l"] {
            let key = key_of_all("norm", kernel, "compare", "setp.lt.f32 %p, %f, 1");
            assert_eq!(known[&key], reason(true, Some(3), 1, "clamped to itself"));
        }
    }

    #[test]
    fn a_line_without_a_reason_is_named() {
        for line in [
            "norm k delete 2 `bar.sync 0` =",
            "norm k delete 2 `bar.sync 0`",
            "norm k delete x2 `bar.sync 0` = ",
            "norm k unreached",
        ] {
            assert!(
                error(&format!("# first\n{line}\n")).contains("mutants.txt:2: no reason: expected FILE "),
                "{line}"
            );
        }
    }

    #[test]
    fn a_line_stands_for_what_it_names_alone() {
        for line in ["* * compare 1 `ret` = so", "norm * compare 1 `ret` = so", "norm k,* unreached so"] {
            let error = error(line);
            assert!(error.contains("mutants.txt:1: * for a file or a kernel"), "{error}");
        }
        let error = error("norm k compare * `ret` = so");
        assert!(
            error.contains("mutants.txt:1: * for the ordinal: say how many mutants these are, as in x3"),
            "{error}"
        );
    }

    #[test]
    fn what_is_spelled_in_another_way_is_named_with_what_was_expected() {
        for (line, why) in [
            ("norm", "expected FILE KERNEL"),
            ("norm k compare", "expected FILE KERNEL"),
            ("norm k compare 1 ret = so", "expected FILE KERNEL"),
            ("norm k, compare 1 `ret` = so", "a kernel without a name in 'k,'"),
            ("norm k compare 0 `ret` = so", "ordinal '0': expected a number from 1 on, or x and a count"),
            ("norm k compare x `ret` = so", "ordinal 'x': expected"),
            ("norm k compare x0 `ret` = so", "ordinal 'x0': expected"),
        ] {
            let error = error(&format!("\n{line}\n"));
            assert!(error.starts_with(&format!("{FILE}:2: {why}")), "{error}");
        }
    }

    #[test]
    fn what_is_listed_twice_is_named_with_both_lines() {
        let line = "norm k delete 2 `bar.sync 0` so\n";
        assert!(error(&format!("{line}\n{line}")).ends_with(":3: listed twice, also in line 1"));
        let all = error("norm k delete x2 `ret` so\nnorm j,k delete x3 `ret` so\n");
        assert!(all.ends_with(":2: listed twice, also in line 1"), "{all}");
    }
}
