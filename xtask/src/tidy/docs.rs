//! The docs of the published crates say what a user needs.
//!
//! - Every public item that has a page of its own (struct, enum, trait, function, macro) shows an example that runs: a code block
//!   in its doc comment or in that of one of its methods, fields or variants. A link to another item is enough if that item's
//!   example uses this one, as `Linear`'s does with `LinearOptions`. [`WITHOUT_EXAMPLE`] lists the exceptions.
//! - Every public field of an options struct or a recipe states its default: `Default: 0.95.`, or `Required.` where there is none
//!   that works. A stated value is compared with the one in `impl Default`.
//! - No doc comment sends the reader to a text that rustdoc does not render.

mod items;
mod value;

use std::path::Path;

use items::Item;
use value::Value;

use crate::workspace::Result;

/// The published crates, and whether a gap in their docs is an error. Of the others, gaps are counted.
const CRATES: [(&str, bool); 6] = [
    ("fp8-format", true),
    ("fp8-kernels", true),
    ("fp8-recipe", true),
    ("fp8-dist", true),
    ("fp8-nn", true),
    ("fp8-hf", true),
];

/// Items that need no example of their own, and why. A path may contain one `*`. An entry that no item needs is an error.
const WITHOUT_EXAMPLE: [(&str, &str); 4] = [
    ("fp8_*::Error", "its variants show their texts; functions that fail show how it is matched"),
    ("fp8_dist::nccl", "needs a GPU for each process, so its example is compiled but not run"),
    (
        "fp8_kernels::ops::*Saved",
        "returned by an operation and passed to its backward, whose example shows both",
    ),
    (
        "fp8_nn::*Saved",
        "returned by a layer's `forward` and passed to its `backward`, as the layer's example shows",
    ),
];

/// The ends of the names of structs whose fields are options.
const OPTIONS: [&str; 4] = ["Options", "Scaling", "Schedule", "Tuning"];

/// Texts that point at something rustdoc does not render.
const PRIVATE_TEXT: [&str; 6] = [
    "module's text",
    "module's header",
    "module's docs",
    "header of the module",
    "text of the module",
    "file's head",
];

/// The gaps in the docs of one crate.
#[derive(Debug, Default, PartialEq)]
struct Gaps {
    examples: Vec<String>,
    defaults: Vec<String>,
    pointers: Vec<String>,
}

/// Gaps in the docs of the crates below `root`: errors first, then one line for each crate that may still have some.
pub(super) fn gaps(root: &Path) -> Result<(Vec<String>, Vec<String>)> {
    let (mut errors, mut counts) = (Vec::new(), Vec::new());
    let mut excepted = Vec::new();
    for (name, is_enforced) in CRATES {
        let items = items::public_items(&root.join(name), &name.replace('-', "_"))?;
        let gaps = Gaps::of(&items, &WITHOUT_EXAMPLE, &mut excepted);
        if is_enforced {
            errors.extend(gaps.lines());
        } else if gaps != Gaps::default() {
            counts.push(format!("{name}: {}", gaps.summary()));
        }
    }
    errors.extend(WITHOUT_EXAMPLE.iter().filter(|(path, _)| !excepted.contains(path)).map(|(path, _)| {
        format!(
            "docs: exception `{path}` in xtask/src/tidy/docs.rs matches no item without an example: remove it"
        )
    }));
    Ok((errors, counts))
}

impl Gaps {
    fn of<'a>(items: &[Item], exceptions: &[(&'a str, &str)], excepted: &mut Vec<&'a str>) -> Self {
        let mut gaps = Self::default();
        for item in items {
            if examples(item).is_empty() && !is_shown_elsewhere(item, items) {
                match exceptions.iter().find(|(path, _)| matches(path, &item.path)) {
                    Some((path, _)) => excepted.push(path),
                    None => gaps.examples.push(item.path.clone()),
                }
            }
            if OPTIONS.iter().any(|end| item.name().ends_with(end)) {
                gaps.defaults.extend(defaults(item));
            }
            for docs in item.all_docs() {
                let text = words(docs).to_lowercase();
                let found = PRIVATE_TEXT.iter().filter(|phrase| text.contains(**phrase));
                gaps.pointers.extend(found.map(|phrase| format!("{}: \"{phrase}\"", item.path)));
            }
        }
        gaps
    }

    fn lines(&self) -> Vec<String> {
        let examples = self.examples.iter().map(|path| format!("docs: {path} has no example that runs"));
        let defaults = self.defaults.iter().map(|line| format!("docs: {line}"));
        let pointers = self
            .pointers
            .iter()
            .map(|line| format!("docs: {line} points at text that users do not see: say it here"));
        examples.chain(defaults).chain(pointers).collect()
    }

    fn summary(&self) -> String {
        format!(
            "{} items without an example, {} options without their default, {} references to private text",
            self.examples.len(),
            self.defaults.len(),
            self.pointers.len()
        )
    }
}

/// Whether a path is this pattern, in which a `*` stands for any text.
fn matches(pattern: &str, path: &str) -> bool {
    match pattern.split_once('*') {
        Some((start, end)) => {
            path.len() >= start.len() + end.len() && path.starts_with(start) && path.ends_with(end)
        }
        None => path == pattern,
    }
}

/// Whether the item's docs link to an item whose example uses this one.
fn is_shown_elsewhere(item: &Item, items: &[Item]) -> bool {
    let links = item.docs.split("[`").skip(1).filter_map(|rest| rest.split('`').next());
    let linked: Vec<&str> = links.flat_map(|path| path.trim_end_matches("()").split("::")).collect();
    let others = items.iter().filter(|other| other.path != item.path && linked.contains(&other.name()));
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    others.flat_map(examples).any(|code| code.split(|c| !is_word(c)).any(|word| word == item.name()))
}

/// The code blocks in the docs of an item and its parts that are compiled and run.
fn examples(item: &Item) -> Vec<String> {
    item.all_docs().flat_map(code_blocks).collect()
}

/// The code blocks of a doc comment that are compiled and run.
fn code_blocks(docs: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    // The fence of the block that is open, and the block's text if it runs.
    let mut open: Option<(&str, Option<String>)> = None;
    for line in docs.lines() {
        let trimmed = line.trim_start();
        let mark = &trimmed[..trimmed.len() - trimmed.trim_start_matches(['`', '~']).len()];
        let info = &trimmed[mark.len()..];
        open = match open {
            Some((fence, block)) if mark.starts_with(fence) && info.trim().is_empty() => {
                blocks.extend(block);
                None
            }
            Some((fence, block)) => Some((fence, block.map(|block| block + line + "\n"))),
            None if mark.len() >= 3 => Some((mark, runs(info).then(String::new))),
            None => None,
        };
    }
    blocks
}

/// Whether rustdoc runs a block with these words behind its opening fence.
fn runs(info: &str) -> bool {
    let mut words = info.split([',', ' ', '\t']).filter(|word| !word.is_empty());
    words.all(|word| matches!(word, "rust" | "should_panic") || word.starts_with("edition"))
}

/// One line for each public field of a struct that does not state its default, or states another than `impl Default`.
fn defaults(item: &Item) -> Vec<String> {
    let mut found = Vec::new();
    for field in &item.fields {
        let place = format!("{}::{}", item.path, field.name);
        let docs = words(&field.docs);
        let (is_required, stated) = (sentence(&docs, "Required").is_some(), sentence(&docs, "Default:"));
        let actual =
            item.default.as_ref().and_then(|values| values.get(&field.name)).and_then(Option::as_ref);
        match (stated, actual) {
            (None, _) if is_required => {}
            (None, _) => found
                .push(format!("{place} does not state its default: write \"Default: …\" or \"Required.\"")),
            (Some(_), _) if item.default.is_none() => {
                found.push(format!(
                    "{place} states a default, but the struct has no `Default`: write \"Required.\""
                ));
            }
            (Some(rest), Some(actual)) => {
                let stated = stated_value(rest);
                if Value::parse(stated).as_ref() != Some(actual) {
                    found.push(format!("{place} states the default `{stated}`; `Default` gives `{actual}`"));
                }
            }
            (Some(_), None) => {}
        }
    }
    found
}

/// Returns the text after `start`, if a sentence begins with `start`.
fn sentence<'a>(docs: &'a str, start: &str) -> Option<&'a str> {
    let mut from = 0;
    while let Some(at) = docs[from..].find(start).map(|at| from + at) {
        let rest = &docs[at + start.len()..];
        if (at == 0 || docs[..at].ends_with(". ")) && !rest.starts_with(char::is_alphabetic) {
            return Some(rest);
        }
        from = at + start.len();
    }
    None
}

/// The value at the start of a text: what is between backquotes or parentheses, or all up to the end of the clause.
fn stated_value(text: &str) -> &str {
    let text = text.trim_start();
    let text = text.strip_prefix('[').unwrap_or(text);
    if let Some(code) = text.strip_prefix('`') {
        return code.split('`').next().unwrap_or(code);
    }
    if text.starts_with('(') {
        return text.find(')').map_or(text, |end| &text[..=end]);
    }
    let ends = [". ", ", ", "; ", ": ", " ("].iter().filter_map(|mark| text.find(mark));
    let clause = &text[..ends.min().unwrap_or(text.len())];
    clause.strip_suffix('.').unwrap_or(clause)
}

/// A doc comment on one line.
fn words(docs: &str) -> String {
    docs.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
