//! Mistakes in Rust code: a number one larger, `<` for `<=`, `+` for `-`.

use std::fmt;

/// One mistake in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Edit {
    /// The file, as the list names it.
    pub(super) file: &'static str,
    /// The line's number, from 0 on.
    pub(super) line: usize,
    /// The bytes of the line that are replaced.
    at: std::ops::Range<usize>,
    text: String,
    new: String,
}

/// File and line with the mistake marked: how the list of survivors names it, along with all that are spelled alike.
impl fmt::Display for Edit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, at, text, new, .. } = self;
        let (before, after) = (text[..at.start].trim_start(), &text[at.end..]);
        write!(f, "{file}: {before}«{}→{new}»{after}", &text[at.clone()])
    }
}

impl Edit {
    /// The file's text with the mistake.
    pub(super) fn apply(&self, source: &str) -> String {
        let mut lines: Vec<String> = source.lines().map(str::to_owned).collect();
        lines[self.line].replace_range(self.at.clone(), &self.new);
        lines.join("\n") + "\n"
    }
}

/// All mistakes of a file, but for the bodies of these functions.
pub(super) fn edits(file: &'static str, source: &str, without: &[&str]) -> Vec<Edit> {
    let mut edits = Vec::new();
    let mut function = None;
    for (line, text) in source.lines().enumerate() {
        if let Some((_, rest)) = text.split_once("fn ").filter(|_| !text.trim_start().starts_with("//")) {
            function = rest.split(['(', '<']).next();
            continue;
        }
        if text.starts_with('}') {
            function = None;
        }
        let is_code = !text.contains('"')
            && !["//", "#", "use ", "impl", "pub(crate) use "]
                .iter()
                .any(|start| text.trim_start().starts_with(start));
        if !is_code || text.contains("impl ") || function.is_some_and(|name| without.contains(&name)) {
            continue;
        }
        let code = text.split(" //").next().unwrap_or(text);
        edits.extend(replacements(code).into_iter().map(|(at, new)| Edit {
            file,
            line,
            at,
            text: code.to_owned(),
            new,
        }));
    }
    edits
}

type Replacement = (std::ops::Range<usize>, String);

fn replacements(code: &str) -> Vec<Replacement> {
    const OPERATORS: [(&str, &str); 6] =
        [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" + ", " - "), (" - ", " + ")];
    let mut found: Vec<Replacement> = OPERATORS
        .iter()
        .flat_map(|(old, new)| {
            let (old, new) = (old.trim(), new.trim());
            let spaced = format!(" {old} ");
            code.match_indices(&spaced)
                .map(move |(at, _)| (at + 1..at + 1 + old.len(), new.to_owned()))
                .collect::<Vec<_>>()
        })
        .collect();
    let mut at = 0;
    while let Some(start) =
        code[at..].find(|c: char| c.is_ascii_alphanumeric() || c == '_').map(|first| at + first)
    {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let end = |from: usize| code[from..].find(|c| !is_word(c)).map_or(code.len(), |length| from + length);
        let mut stop = end(start);
        let is_number = code[start..].starts_with(|c: char| c.is_ascii_digit());
        // A decimal point, unless a range or a method follows it.
        let rest = &code[stop..];
        if is_number && rest.starts_with('.') && rest[1..].starts_with(|c: char| c.is_ascii_digit()) {
            stop = end(stop + 1);
        }
        // `x.0` is a field.
        let is_field = code[..start].ends_with('.') && !code[..start].ends_with("..");
        if is_number && !is_field {
            found.extend(larger(&code[start..stop]).map(|new| (start..stop, new)));
        }
        at = stop;
    }
    found.sort_by_key(|(at, _)| at.start);
    found
}

/// The number one larger; one smaller where all its bits are ones, as the larger one may not fit its type.
fn larger(literal: &str) -> Option<String> {
    let plain: String = literal.chars().filter(|c| *c != '_').collect();
    if let Some((whole, rest)) = plain.split_once('.') {
        return Some(format!("{}.{rest}", whole.parse::<u64>().ok()? + 1));
    }
    let (radix, digits) = match plain.get(..2) {
        Some("0x") => (16, &plain[2..]),
        Some("0b") => (2, &plain[2..]),
        _ => (10, &*plain),
    };
    // A type may follow; in hexadecimal numbers none does here.
    let length = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    let (digits, suffix) = digits.split_at(length);
    let value = u64::from_str_radix(digits, radix).ok()?;
    let is_all_ones = value >= 0x7F && value.wrapping_add(1).is_power_of_two();
    let new = if is_all_ones { value - 1 } else { value.checked_add(1)? };
    Some(if radix == 10 {
        format!("{new}{suffix}")
    } else {
        format!("{new:#X}{suffix}").replacen("0X", "0x", 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(source: &str, without: &[&str]) -> Vec<String> {
        edits("f.rs", source, without).iter().map(Edit::to_string).collect()
    }

    #[test]
    fn numbers_and_operators_are_changed_and_names_are_not() {
        let source = "fn f() {\n    let x2 = y.0 + (z << 23); // 7 bits\n    if x2 < 0x7F { 0..=16 } else { 1.5 }\n}\n";
        assert_eq!(
            spelled(source, &[]),
            [
                "f.rs: let x2 = y.0 «+→-» (z << 23);",
                "f.rs: let x2 = y.0 + (z << «23→24»);",
                "f.rs: if x2 «<→<=» 0x7F { 0..=16 } else { 1.5 }",
                "f.rs: if x2 < «0x7F→0x7E» { 0..=16 } else { 1.5 }",
                "f.rs: if x2 < 0x7F { «0→1»..=16 } else { 1.5 }",
                "f.rs: if x2 < 0x7F { 0..=«16→17» } else { 1.5 }",
                "f.rs: if x2 < 0x7F { 0..=16 } else { «1.5→2.5» }",
            ]
        );
        assert_eq!(spelled(source, &["f"]), [""; 0]);
        assert_eq!(larger("0b1011").as_deref(), Some("0xC"));
        assert_eq!(larger("0xAAAA_AAAA").as_deref(), Some("0xAAAAAAAB"));
        assert_eq!(larger("2_u32").as_deref(), Some("3u32"));
        assert_eq!(larger("0xFFFF_FFFF_FFFF_FFFF"), None);
    }

    #[test]
    fn an_edit_changes_its_place_alone() {
        let source = "const A: u8 = 3;\nconst B: u8 = 3;\n";
        let edits = edits("f.rs", source, &[]);
        assert_eq!(edits[1].apply(source), "const A: u8 = 3;\nconst B: u8 = 4;\n");
    }
}
