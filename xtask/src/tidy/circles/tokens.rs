//! Tokens of a source: words, marks, attributes, and what is only for tests.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// Words in front of the name of an item.
pub(super) const ITEMS: [&str; 8] = ["const", "enum", "fn", "static", "struct", "trait", "type", "union"];

pub(super) fn line(tree: &TokenTree) -> usize {
    tree.span().start().line
}

pub(super) fn word(trees: &[TokenTree], at: usize) -> Option<String> {
    if let Some(TokenTree::Ident(word)) = trees.get(at) { Some(word.to_string()) } else { None }
}

pub(super) fn is_mark(tree: &TokenTree, mark: char) -> bool {
    matches!(tree, TokenTree::Punct(found) if found.as_char() == mark)
}

pub(super) fn mark(trees: &[TokenTree], at: usize, mark: char) -> bool {
    trees.get(at).is_some_and(|tree| is_mark(tree, mark))
}

/// Whether `::` is here.
pub(super) fn is_colons(trees: &[TokenTree], at: usize) -> bool {
    let joint = matches!(trees.get(at), Some(TokenTree::Punct(first)) if first.spacing() == Spacing::Joint);
    joint && mark(trees, at, ':') && mark(trees, at + 1, ':')
}

/// Returns the trees of a stream without what is only for tests.
pub(super) fn without_tests(stream: TokenStream) -> Vec<TokenTree> {
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    let mut left = Vec::new();
    let mut at = 0;
    while at < trees.len() {
        let rest = &trees[at..];
        at += match attribute(rest) {
            Some((length, attribute)) if is_for_tests(&attribute) => length + item(&rest[length..]),
            _ => {
                left.push(rest[0].clone());
                1
            }
        };
    }
    left
}

/// Returns the contents of a group in braces.
pub(super) fn inner(tree: Option<&TokenTree>) -> Option<TokenStream> {
    match tree {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => Some(group.stream()),
        _ => None,
    }
}

/// The length of the attribute that begins here, and what is in its brackets.
pub(super) fn attribute(trees: &[TokenTree]) -> Option<(usize, Vec<TokenTree>)> {
    let at = 1 + usize::from(mark(trees, 1, '!'));
    match trees.get(at) {
        Some(TokenTree::Group(group)) if mark(trees, 0, '#') && group.delimiter() == Delimiter::Bracket => {
            Some((at + 1, group.stream().into_iter().collect()))
        }
        _ => None,
    }
}

/// Whether an attribute is `cfg(test)` or `cfg(all(test, …))`.
pub(super) fn is_for_tests(attribute: &[TokenTree]) -> bool {
    let text: TokenStream = attribute.iter().cloned().collect();
    let text: String = text.to_string().split_whitespace().collect();
    text == "cfg(test)" || text.starts_with("cfg(all(test,")
}

/// The length of the item, field or variant that begins here.
pub(super) fn item(trees: &[TokenTree]) -> usize {
    let keywords = ["impl", "mod", "use", "extern", "unsafe", "async", "macro_rules", "let"];
    let is_keyword = |word: &str| ITEMS.contains(&word) || keywords.contains(&word);
    let mut is_item = false;
    for (at, tree) in trees.iter().enumerate() {
        match tree {
            TokenTree::Ident(word) => is_item = is_item || is_keyword(&word.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return at + 1,
            tree if is_mark(tree, ';') || is_mark(tree, ',') && !is_item => return at + 1,
            _ => {}
        }
    }
    trees.len()
}
