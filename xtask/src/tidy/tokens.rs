//! Rust source as words, marks and string literals, without comments: as much as is needed to find errors and tests.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use syn::Lit;

use crate::workspace::Result;

/// A part of a source.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Word(String),
    Mark(char),
    /// A string literal as the compiler reads it: escapes and continued lines are resolved.
    Text(String),
}

impl Token {
    pub(super) fn is(&self, mark: char) -> bool {
        *self == Self::Mark(mark)
    }

    pub(super) fn word(&self) -> Option<&str> {
        if let Self::Word(word) = self { Some(word) } else { None }
    }
}

/// Splits a source. What is in brackets is between their marks.
pub(super) fn tokens(source: &str) -> Result<Vec<Token>> {
    let mut found = Vec::new();
    flatten(source.parse()?, &mut found);
    Ok(found)
}

fn flatten(stream: TokenStream, found: &mut Vec<Token>) {
    for tree in stream {
        match tree {
            TokenTree::Ident(word) => found.push(Token::Word(word.to_string())),
            TokenTree::Punct(mark) => found.push(Token::Mark(mark.as_char())),
            TokenTree::Literal(literal) => match Lit::new(literal) {
                Lit::Str(text) => found.push(Token::Text(text.value())),
                Lit::ByteStr(text) => {
                    found.push(Token::Text(String::from_utf8_lossy(&text.value()).into_owned()));
                }
                Lit::CStr(text) => found.push(Token::Text(text.value().to_string_lossy().into_owned())),
                _ => {} // numbers, and characters
            },
            TokenTree::Group(group) => {
                if is_documentation(&group) {
                    // A comment: its marks are `#`, or `#!` inside a module.
                    while found.pop_if(|token| token.is('!') || token.is('#')).is_some() {}
                    continue;
                }
                let marks = match group.delimiter() {
                    Delimiter::Parenthesis => Some(['(', ')']),
                    Delimiter::Brace => Some(['{', '}']),
                    Delimiter::Bracket => Some(['[', ']']),
                    Delimiter::None => None,
                };
                found.extend(marks.map(|[open, _]| Token::Mark(open)));
                flatten(group.stream(), found);
                found.extend(marks.map(|[_, close]| Token::Mark(close)));
            }
        }
    }
}

/// Whether this is the attribute that a comment of documentation becomes, without its `#`.
fn is_documentation(group: &Group) -> bool {
    let first = group.stream().into_iter().next();
    group.delimiter() == Delimiter::Bracket && matches!(first, Some(TokenTree::Ident(name)) if name == "doc")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<String> {
        let text = |token| if let Token::Text(text) = token { Some(text) } else { None };
        tokens(source).unwrap().into_iter().filter_map(text).collect()
    }

    #[test]
    fn literals_are_found_and_comments_are_not() {
        assert_eq!(texts("// \"a\"\n/// \"b\"\n/* \"c\" /* \"d\" */ \"e\" */ \"f\""), ["f"]);
        assert_eq!(
            texts(r##"let a = r#"a "b" \n"#; b"c"; br"\d"; 'e'; '"'; '\''; '\u{41}'; "f""##),
            ["a \"b\" \\n", "c", "\\d", "f"]
        );
        assert_eq!(texts("fn a<'a>(b: &'a str) -> &'static str { \"g\" }"), ["g"]);
        assert_eq!(texts("\"a\\\n    b \\\"c\\\" \\\\\""), ["ab \"c\" \\"]);
        assert_eq!(texts("//! \"a\"\nmod b { //! \"c\"\n const D: &str = \"e\"; }"), ["e"]);
    }

    #[test]
    fn words_and_marks_come_in_order() {
        let found = tokens("pub enum E {\n    A,\n}").unwrap();
        assert_eq!(found[1], Token::Word("enum".to_owned()));
        assert_eq!(found[4], Token::Word("A".to_owned()));
        assert!(found[6].is('}'));
    }
}
