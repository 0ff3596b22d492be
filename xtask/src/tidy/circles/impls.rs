//! Reads the `impl` blocks of a source: the type, the functions that the block defines, and those of `Self` that it uses.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenTree};

use super::tokens::{is_colons, is_mark, line, mark, without_tests, word};

/// An `impl` block of a type, or of a trait for a type.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Impl {
    /// The path of the type, without generic arguments.
    pub(super) of: Vec<String>,
    /// Names of functions and constants.
    pub(super) defines: BTreeSet<String>,
    /// The names after `self.` (in calls) and `Self::`, each with the line of its first mention.
    pub(super) uses: BTreeMap<String, usize>,
}

/// Whether a word `impl` after these trees begins a block, and not a type.
pub(super) fn begins(before: &[TokenTree]) -> bool {
    match before.last() {
        Some(TokenTree::Punct(mark)) => mark.as_char() == ';',
        Some(TokenTree::Ident(word)) => word == "unsafe" || word == "default",
        _ => true,
    }
}

/// Whether the `>` at a place ends `->` or `=>`.
fn is_arrow(trees: &[TokenTree], at: usize) -> bool {
    is_mark(&trees[at - 1], '-') || is_mark(&trees[at - 1], '=')
}

/// Returns the path that begins a type, without its generic arguments.
fn path(trees: &[TokenTree]) -> Option<Vec<String>> {
    let mut path = Vec::new();
    let mut at = if is_colons(trees, 0) { 2 } else { 0 };
    while let Some(word) = word(trees, at).filter(|word| word != "dyn") {
        path.push(word);
        if !is_colons(trees, at + 1) {
            break;
        }
        at += 3;
    }
    (!path.is_empty()).then_some(path)
}

impl Impl {
    /// Reads the block that begins here, unless its type has no path, as a reference or a slice.
    pub(super) fn read(trees: &[TokenTree]) -> Option<Self> {
        let mut depth = 0;
        let (mut start, mut end) = (1, None);
        for (at, tree) in trees.iter().enumerate().skip(1) {
            match tree {
                TokenTree::Punct(mark) if mark.as_char() == '<' => depth += 1,
                TokenTree::Punct(mark) if mark.as_char() == '>' && !is_arrow(trees, at) => {
                    depth -= 1;
                    // Behind the parameters of the block itself.
                    if depth == 0 && start == 1 && is_mark(&trees[1], '<') {
                        start = at + 1;
                    }
                }
                TokenTree::Ident(word) if depth == 0 && word == "where" => end = end.or(Some(at)),
                TokenTree::Ident(word) if depth == 0 && word == "for" && end.is_none() => start = at + 1,
                TokenTree::Group(group) if depth == 0 && group.delimiter() == Delimiter::Brace => {
                    let of = path(&trees[start..end.unwrap_or(at)])?;
                    let mut block = Self { of, ..Self::default() };
                    let trees = without_tests(group.stream());
                    block.define(&trees);
                    block.mention(&trees);
                    return Some(block);
                }
                _ => {}
            }
        }
        None
    }

    fn define(&mut self, trees: &[TokenTree]) {
        for at in 0..trees.len() {
            if let Some("fn" | "const") = word(trees, at).as_deref() {
                self.defines.extend(word(trees, at + 1).filter(|name| name != "fn" && name != "unsafe"));
            }
        }
    }

    fn mention(&mut self, trees: &[TokenTree]) {
        for (at, tree) in trees.iter().enumerate() {
            let name = match word(trees, at).as_deref() {
                Some("self") if mark(trees, at + 1, '.') && is_call(trees, at + 3) => word(trees, at + 2),
                Some("Self") if is_colons(trees, at + 1) => word(trees, at + 3),
                _ => None,
            };
            if let Some(name) = name {
                self.uses.entry(name).or_insert(line(tree));
            }
            if let TokenTree::Group(group) = tree {
                self.mention(&without_tests(group.stream()));
            }
        }
    }
}

/// Whether arguments, or generic ones in front of them, are here.
fn is_call(trees: &[TokenTree], at: usize) -> bool {
    let is_arguments =
        matches!(trees.get(at), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
    is_arguments || is_colons(trees, at)
}

#[cfg(test)]
mod tests {
    use super::super::source::read;

    fn types(text: &str) -> Vec<String> {
        read(text).unwrap().impls.iter().map(|block| block.of.join("::")).collect()
    }

    #[test]
    fn the_type_of_a_block_is_told_from_its_parameters_and_trait() {
        assert_eq!(types("impl A {} pub struct X; impl<T: F<u8> + Fn() -> u8> a::B<T> {}"), ["A", "a::B"]);
        assert_eq!(types("unsafe impl<'a> T<A> for C<'a, { 3 }> where for<'b> &'b D: E {}"), ["C"]);
        assert_eq!(types("impl T for &A {} impl T for [A] {} impl T for dyn A {}"), Vec::<String>::new());
        assert_eq!(types("fn f() -> impl A {} const B: Option<impl C> = None;"), Vec::<String>::new());
    }

    #[test]
    fn a_block_defines_functions_and_uses_those_of_self() {
        let text = "impl A {
            const fn f(&self) { self.a(); self.b.c(); self.d.e; x!(Self::g::<u8>()) }
            pub const H: u8 = Self::I;
            #[cfg(test)] fn j(&self) { self.k() }
            fn l(self) { self.m::<u8>() }
        }";
        let [block] = &read(text).unwrap().impls[..] else { panic!("one block") };
        assert_eq!(block.defines.iter().collect::<Vec<_>>(), ["H", "f", "l"]);
        let uses: Vec<(&str, usize)> = block.uses.iter().map(|(name, line)| (&**name, *line)).collect();
        assert_eq!(uses, [("I", 3), ("a", 2), ("g", 2), ("m", 5)]);
    }
}
