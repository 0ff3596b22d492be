//! Each error has a test that asserts its text.
//!
//! The variants are those of the public enums of these crates with an attribute `#[error("…")]`; their placeholders stand for
//! any text. Tests are what is in a folder `tests` or in a module under `#[cfg(test)]`: one of their string literals must be
//! the variant's text. Most variants have words of their own, and their longest is enough, in one piece. Where a variant is a
//! frame such as `{op}: {option} = {value}: {remedy}`, the literal has to fit the whole of it, to fit no longer frame of the
//! crate, and to contain a text that the crate's sources hold: the remedy.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::tokens::{Token, tokens};
use crate::workspace::{Result, files};

const CRATES: [&str; 6] = ["fp8-format", "fp8-kernels", "fp8-recipe", "fp8-dist", "fp8-nn", "fp8-hf"];

/// So many letters tell one text from others.
const LETTERS: usize = 8;

/// The error variants and the string literals in the sources of a crate.
#[derive(Debug, Default, PartialEq)]
struct Source {
    variants: Vec<Variant>,
    /// Literals of other code.
    texts: Vec<String>,
    /// Literals of tests.
    asserted: Vec<String>,
}

/// A variant that a public enum of errors has.
#[derive(Debug, PartialEq)]
struct Variant {
    name: String,
    /// As the attribute has it.
    format: String,
}

/// One line for each error without a test.
pub(super) fn untested(root: &Path) -> Result<Vec<String>> {
    let mut crates = Vec::new();
    for name in CRATES {
        let mut source = Source::default();
        for part in ["src", "tests"] {
            for file in files(&root.join(name).join(part))? {
                if file.extension().is_some_and(|end| end == "rs") {
                    let read = source.read(&fs::read_to_string(&file)?, name, part == "tests");
                    read.map_err(|error| format!("{}: {error}", file.display()))?;
                }
            }
        }
        crates.push(source);
    }
    Ok(missing(&crates))
}

impl Source {
    fn read(&mut self, text: &str, package: &str, is_test: bool) -> Result {
        let all = tokens(text)?;
        let mut enumeration = None;
        let mut at = 0;
        while let Some(token) = all.get(at) {
            if token.is('#')
                && let Some(end) = attribute(&all[at..]).map(|length| at + length)
            {
                if is_of_tests(&all[at..end]) && !is_test {
                    let body = block(&all[end..]).map_or(0, |length| length);
                    self.asserted.extend(literals(&all[end..end + body]));
                    at = end + body;
                    continue;
                }
                if let (Some(enumeration), Some(format)) = (enumeration, format_of(&all[at..end])) {
                    self.variant(package, enumeration, format, &all[end..]);
                }
                at = end;
                continue;
            }
            match token {
                Token::Word(word) if word == "enum" => {
                    let is_public = at > 0 && all[at - 1].word() == Some("pub");
                    enumeration = all.get(at + 1).and_then(Token::word).filter(|_| is_public);
                }
                Token::Text(text) if is_test => self.asserted.push(text.clone()),
                Token::Text(text) => self.texts.push(text.clone()),
                _ => {}
            }
            at += 1;
        }
        Ok(())
    }

    fn variant(&mut self, package: &str, enumeration: &str, format: &str, rest: &[Token]) {
        let mut at = 0;
        while let Some(length) = attribute(&rest[at..]) {
            at += length;
        }
        if let Some(variant) = rest.get(at).and_then(Token::word) {
            let name = format!("{}::{enumeration}::{variant}", package.replace('-', "_"));
            self.variants.push(Variant { name, format: format.to_owned() });
        }
    }
}

/// Returns the number of tokens of the attribute that begins here.
fn attribute(tokens: &[Token]) -> Option<usize> {
    let open = match tokens {
        [hash, open, ..] if hash.is('#') && open.is('[') => 1,
        [hash, bang, open, ..] if hash.is('#') && bang.is('!') && open.is('[') => 2,
        _ => return None,
    };
    balanced(&tokens[open..], ['[', ']']).map(|length| open + length)
}

/// Returns the number of tokens up to the end of the first pair of marks.
fn balanced(tokens: &[Token], [open, close]: [char; 2]) -> Option<usize> {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        if token.is(open) {
            depth += 1;
        } else if token.is(close) {
            depth -= 1;
            if depth == 0 {
                return Some(index + 1);
            }
        }
    }
    None
}

/// Returns the number of tokens of an item that ends with a body or a semicolon.
fn block(tokens: &[Token]) -> Option<usize> {
    let open = tokens.iter().position(|token| token.is('{') || token.is(';'))?;
    if tokens[open].is(';') { Some(open + 1) } else { balanced(tokens, ['{', '}']) }
}

fn is_of_tests(attribute: &[Token]) -> bool {
    let words: Vec<&str> = attribute.iter().filter_map(Token::word).collect();
    words.first() == Some(&"cfg") && words.contains(&"test") && !words.contains(&"not")
}

/// The text of `#[error("…")]`.
fn format_of(attribute: &[Token]) -> Option<&str> {
    match attribute {
        [_, _, Token::Word(name), _, Token::Text(format), ..] if name == "error" => Some(format),
        _ => None,
    }
}

fn literals(tokens: &[Token]) -> impl Iterator<Item = String> {
    tokens.iter().filter_map(|token| if let Token::Text(text) = token { Some(text.clone()) } else { None })
}

fn missing(crates: &[Source]) -> Vec<String> {
    let asserted: Vec<&str> = crates.iter().flat_map(|source| &source.asserted).map(String::as_str).collect();
    let variants: Vec<&Variant> = crates.iter().flat_map(|source| &source.variants).collect();
    let mut missing = Vec::new();
    for source in crates {
        let own: Vec<&Variant> = source.variants.iter().collect();
        let held: Vec<String> = source.texts.iter().filter_map(|text| longest(text)).collect();
        for variant in &source.variants {
            let is_tested = match telling(variant, &variants) {
                Some(telling) => asserted.iter().any(|text| text.contains(&telling)),
                None if letters(&parts(&variant.format).concat()) >= LETTERS => {
                    asserted.iter().any(|text| is_best(variant, text, &variants))
                }
                None => {
                    let is_its = |text: &&str| {
                        is_best(variant, text, &own) && held.iter().any(|held| text.contains(held))
                    };
                    let found: BTreeSet<&str> = asserted.iter().copied().filter(is_its).collect();
                    // Those of one form need a text each.
                    let alike =
                        own.iter().filter(|other| parts(&other.format) == parts(&variant.format)).count();
                    found.len() >= alike
                }
            };
            if !is_tested {
                missing.push(format!(
                    "error `{}` has no test that asserts its text: {}",
                    variant.name, variant.format
                ));
            }
        }
    }
    missing
}

/// The longest of the parts between placeholders that no other variant has, if it is long enough.
fn telling(variant: &Variant, all: &[&Variant]) -> Option<String> {
    let is_shared = |part: &String| {
        all.iter().any(|other| {
            other.name != variant.name && parts(&other.format).join("\0").contains(part.as_str())
        })
    };
    let own = parts(&variant.format).into_iter().map(|part| words(&part).to_owned());
    own.filter(|part| letters(part) >= LETTERS && !is_shared(part)).max_by_key(|part| letters(part))
}

/// The longest part of a text, if it is long enough.
fn longest(text: &str) -> Option<String> {
    let longest = parts(text).into_iter().max_by_key(|part| letters(part))?;
    let longest = words(&longest);
    (letters(longest) >= LETTERS).then(|| longest.to_owned())
}

/// Without spaces and marks at both ends, by which a test may join the parts of a text.
fn words(part: &str) -> &str {
    part.trim_matches(|c: char| !c.is_alphanumeric())
}

fn letters(text: &str) -> usize {
    text.chars().filter(|c| c.is_alphabetic()).count()
}

/// Whether a text fits the variant's format and none that has more letters and marks besides its placeholders.
fn is_best(variant: &Variant, text: &str, all: &[&Variant]) -> bool {
    let weight = |variant: &Variant| parts(&variant.format).concat().len();
    fits(text, &parts(&variant.format))
        && !all.iter().any(|other| weight(other) > weight(variant) && fits(text, &parts(&other.format)))
}

/// Whether a text is these parts with something between them.
fn fits(text: &str, parts: &[String]) -> bool {
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return false };
    if parts.len() == 1 {
        return text == first;
    }
    let Some(mut rest) = text.strip_prefix(first.as_str()) else { return false };
    for part in &parts[1..parts.len() - 1] {
        match rest.char_indices().nth(1).and_then(|(one, _)| Some((one, rest[one..].find(part.as_str())?))) {
            Some((one, found)) => rest = &rest[one + found + part.len()..],
            None => return false,
        }
    }
    rest.len() > last.len() && rest.ends_with(last.as_str())
}

/// Returns the pieces of a format between its placeholders; `{{` and `}}` are single braces.
fn parts(format: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        let is_twice = chars.peek() == Some(&c);
        match c {
            '{' if !is_twice => {
                chars.by_ref().take_while(|c| *c != '}').for_each(drop);
                parts.push(String::new());
            }
            '{' | '}' if is_twice => {
                chars.next();
                parts.last_mut().into_iter().for_each(|part| part.push(c));
            }
            _ => parts.last_mut().into_iter().for_each(|part| part.push(c)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERRORS: &str = r#"
        /// "Not a literal".
        #[derive(Debug, thiserror::Error)]
        pub enum Error {
            /// A frame.
            #[error("{op}: {option} = {value}: {remedy}")]
            Option { op: &'static str },
            #[error("{op}: shape {shape}: {remedy}")]
            Shape { op: &'static str },
            #[error("rank {rank} gave up early")]
            #[doc = "another attribute"]
            GaveUp { rank: usize },
            #[error(transparent)]
            Io(std::io::Error),
        }
        #[derive(thiserror::Error)]
        enum Private {
            #[error("a private error")]
            One,
        }
        fn check() -> Error { option("a drop probability is at least 0") }
    "#;

    /// The names of variants that these tests leave out.
    fn left_out(tests: &str) -> Vec<String> {
        let mut source = Source::default();
        let module = format!(
            "{ERRORS}\n#[cfg(test)]\nmod tests {{ {tests}\n}}\nconst LATER: &str = \"rank 3 gave up early\";"
        );
        source.read(&module, "fp8-a", false).unwrap();
        assert_eq!(source.variants.len(), 3, "{source:?}");
        let name = |line: &String| line.split('`').nth(1).unwrap().to_owned();
        missing(&[source]).iter().map(name).collect()
    }

    #[test]
    fn a_variant_without_a_test_of_its_text_is_named_with_it() {
        assert_eq!(left_out("").join(" "), "fp8_a::Error::Option fp8_a::Error::Shape fp8_a::Error::GaveUp");
        let mut source = Source::default();
        source.read(ERRORS, "fp8-a", false).unwrap();
        let text =
            "error `fp8_a::Error::GaveUp` has no test that asserts its text: rank {rank} gave up early";
        assert_eq!(missing(&[source])[2], text);
    }

    #[test]
    fn words_of_its_own_are_enough() {
        assert!(
            !left_out(r#"assert(e, "rank 3 gave up early");"#).contains(&"fp8_a::Error::GaveUp".to_owned())
        );
        assert!(
            !left_out(r#"assert(e, format!("group: rank {n} gave up early"));"#).join(" ").contains("GaveUp")
        );
        assert!(
            left_out(r#"// "rank 3 gave up early""#).join(" ").contains("GaveUp"),
            "a comment asserts nothing"
        );
    }

    #[test]
    fn a_frame_needs_the_whole_of_it_and_a_remedy() {
        let is_tested = |text: &str| !left_out(&format!("assert(e, {text:?});")).join(" ").contains("Option");
        assert!(is_tested("dropout: p = 1: a drop probability is at least 0"));
        assert!(!is_tested("a drop probability is at least 0"), "not the whole");
        assert!(!is_tested("dropout: p = 1: something else that no source says"), "no remedy");
        // The longest frame that fits takes it.
        let shape = "dropout: shape [2] = x: a drop probability is at least 0";
        assert_eq!(left_out(&format!("{shape:?}")), ["fp8_a::Error::Option", "fp8_a::Error::GaveUp"]);
    }

    #[test]
    fn a_text_fits_a_format_with_something_in_each_place() {
        let fits = |text, format| fits(text, &parts(format));
        assert!(fits("a: b = c: d", "{op}: {option} = {value}: {remedy}"));
        assert!(!fits("a: b = : d", "{op}: {option} = {value}:{remedy} "));
        assert!(!fits("a = c: d", "{op}: {option} = {value}: {remedy}"));
        assert!(fits("replay: d", "replay: {remedy}") && !fits("replay: ", "replay: {remedy}"));
        assert!(fits("no place", "no place") && !fits("no places", "no place"));
        assert_eq!(parts("a {{b}} {c:?}d"), ["a {b} ", "d"]);
    }
}
