//! Reads the names in a source: the modules, items and imports that it declares, and the paths that it mentions.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::LitStr;

use super::impls::{self, Impl};
use super::tokens::{ITEMS, attribute, inner, is_colons, is_for_tests, is_mark, item, line, mark, word};
use crate::workspace::Result;

/// Words that may be between `const` or `static` and the rest.
const MODIFIERS: [&str; 5] = ["async", "extern", "fn", "mut", "unsafe"];

/// A module, without the code for tests.
#[derive(Debug, Default)]
pub(super) struct Body {
    pub(super) modules: Vec<Child>,
    /// Names of items, except modules and what a macro's call makes.
    pub(super) items: BTreeSet<String>,
    /// Also those inside functions.
    pub(super) imports: Vec<Import>,
    /// Paths of two words or more outside `use`, each with the line of its first mention.
    pub(super) paths: BTreeMap<Vec<String>, usize>,
    /// Single words outside `use`, each with the line of its first mention.
    pub(super) words: BTreeMap<String, usize>,
    pub(super) impls: Vec<Impl>,
}

/// A module inside another.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) name: String,
    /// From `#[path = "…"]`.
    pub(super) path: Option<String>,
    /// `None` if it has a file of its own.
    pub(super) body: Option<Body>,
}

/// One name, or all names of a module, brought in by `use`.
#[derive(Debug, PartialEq)]
pub(super) struct Import {
    pub(super) path: Vec<String>,
    /// `None` for `*`.
    pub(super) name: Option<String>,
    pub(super) is_re_export: bool,
    pub(super) line: usize,
}

pub(super) fn read(text: &str) -> Result<Body> {
    let mut body = Body::default();
    body.scan(text.parse()?, true);
    Ok(body)
}

impl Body {
    /// Reads a module's items, or the code inside one.
    fn scan(&mut self, stream: TokenStream, is_module: bool) {
        let trees: Vec<TokenTree> = stream.into_iter().collect();
        let mut at = 0;
        let mut file = None;
        while at < trees.len() {
            let rest = &trees[at..];
            if let Some((length, attribute)) = attribute(rest) {
                at += length;
                if is_for_tests(&attribute) {
                    at += item(&trees[at..]);
                } else {
                    file = file_of(&attribute).or(file);
                }
                continue;
            }
            at += match (word(rest, 0).as_deref(), word(rest, 1)) {
                (Some("use"), _) if !mark(rest, 1, '<') => {
                    self.imports(rest, is_re_export(&trees[..at]));
                    rest.iter().position(|tree| is_mark(tree, ';')).unwrap_or(rest.len())
                }
                (Some("mod"), Some(name)) if is_module => {
                    let body = inner(rest.get(2)).map(|stream| {
                        let mut body = Self::default();
                        body.scan(stream, true);
                        body
                    });
                    self.modules.push(Child { name, path: file.take(), body });
                    3
                }
                (Some("macro_rules"), None) if is_module && mark(rest, 1, '!') => {
                    self.items.extend(word(rest, 2));
                    3
                }
                (Some("impl"), _) if is_module && impls::begins(&trees[..at]) => {
                    self.impls.extend(Impl::read(rest));
                    1
                }
                (Some(kind), Some(name))
                    if is_module && ITEMS.contains(&kind) && !MODIFIERS.contains(&name.as_str()) =>
                {
                    self.items.insert(name);
                    2
                }
                (Some(_), _) => self.mention(&trees, at),
                (None, _) => {
                    if let TokenTree::Group(group) = &rest[0] {
                        self.scan(group.stream(), false);
                    }
                    1
                }
            };
        }
    }

    /// Notes the word or path that begins at a place, and returns its length.
    fn mention(&mut self, trees: &[TokenTree], start: usize) -> usize {
        let mut path = Vec::new();
        let mut at = start;
        while let Some(word) = word(trees, at) {
            path.push(word);
            if !is_colons(trees, at + 1) {
                break;
            }
            at += 3;
        }
        let length = (path.len() * 3 - 2).min(trees.len() - start);
        let line = line(&trees[start]);
        let continues_another = start >= 2 && is_colons(trees, start - 2);
        match path.as_slice() {
            _ if continues_another => {}
            [word] => _ = self.words.entry(word.clone()).or_insert(line),
            _ => _ = self.paths.entry(path).or_insert(line),
        }
        length
    }

    /// Reads the imports of a `use` that begins here.
    fn imports(&mut self, trees: &[TokenTree], is_re_export: bool) {
        let end = trees.iter().position(|tree| is_mark(tree, ';')).unwrap_or(trees.len());
        self.tree(&trees[1..end], &[], is_re_export);
    }

    /// Reads a part of a `use` between commas.
    fn tree(&mut self, trees: &[TokenTree], before: &[String], is_re_export: bool) {
        let mut path = before.to_vec();
        let mut name = None;
        let mut at = 0;
        while at < trees.len() {
            if let Some(inside) = inner(trees.get(at)) {
                let inside: Vec<TokenTree> = inside.into_iter().collect();
                for part in inside.split(|tree| is_mark(tree, ',')).filter(|part| !part.is_empty()) {
                    self.tree(part, &path, is_re_export);
                }
                return;
            }
            match word(trees, at).as_deref() {
                Some("as") => {
                    name = word(trees, at + 1);
                    at += 1;
                }
                Some("self") if !path.is_empty() => {}
                Some(word) => path.push(word.to_owned()),
                None if mark(trees, at, '*') => {
                    let line = line(&trees[at]);
                    self.imports.push(Import { path, name: None, is_re_export, line });
                    return;
                }
                None => {}
            }
            at += 1;
        }
        if let Some(name) = name.or_else(|| path.last().cloned()) {
            let line = trees.last().map_or(0, line);
            self.imports.push(Import { path, name: Some(name), is_re_export, line });
        }
    }
}

/// The file that an attribute `path = "…"` names.
fn file_of(attribute: &[TokenTree]) -> Option<String> {
    match attribute {
        [TokenTree::Ident(name), _, TokenTree::Literal(file)] if name == "path" => {
            syn::parse_str::<LitStr>(&file.to_string()).ok().map(|file| file.value())
        }
        _ => None,
    }
}

/// Whether `pub` or `pub(…)` is just before.
fn is_re_export(before: &[TokenTree]) -> bool {
    let before = match before {
        [before @ .., TokenTree::Group(group)] if group.delimiter() == Delimiter::Parenthesis => before,
        before => before,
    };
    matches!(before, [.., TokenTree::Ident(word)] if word == "pub")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(text: &str) -> Vec<(String, Option<String>, bool)> {
        let imports = read(text).unwrap().imports.into_iter();
        imports.map(|import| (import.path.join("::"), import.name, import.is_re_export)).collect()
    }

    #[test]
    fn a_use_is_split_into_its_names() {
        let found = imports("use a::{self, b::{C, D as E}, f::*}; pub(crate) use g; fn f() { use self::H; }");
        let expected = [
            ("a", Some("a"), false),
            ("a::b::C", Some("C"), false),
            ("a::b::D", Some("E"), false),
            ("a::f", None, false),
            ("g", Some("g"), true),
            ("self::H", Some("H"), false),
        ];
        let expected =
            expected.map(|(path, name, public)| (path.to_owned(), name.map(str::to_owned), public));
        assert_eq!(found, expected);
    }

    #[test]
    fn items_paths_and_words_are_told_apart() {
        let body = read(
            "const fn f() -> a::B<c::D> { ::std::mem::drop(x.y::<Vec<u8>>()) } static S: T = T; pub union U {}
             fn g<'a>() -> impl Fn() + use<'a> { h!(super::i::J { k }) }",
        )
        .unwrap();
        assert_eq!(body.items.into_iter().collect::<Vec<_>>(), ["S", "U", "f", "g"]);
        let paths: Vec<String> = body.paths.keys().map(|path| path.join("::")).collect();
        assert_eq!(paths, ["a::B", "c::D", "super::i::J"]);
        assert!(
            body.words.contains_key("k") && body.words.contains_key("T") && !body.words.contains_key("J")
        );
        assert_eq!(body.imports, []);
    }
}
