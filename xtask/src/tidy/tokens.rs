//! Rust source as words, marks and string literals, without comments: as much as is needed to find errors and tests.

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

/// Splits a source; each token has its line, from 1 on.
pub(super) fn tokens(source: &str) -> Vec<(usize, Token)> {
    let mut reader = Reader { rest: source.chars().collect(), at: 0, line: 1 };
    let mut found = Vec::new();
    while let Some(c) = reader.peek(0) {
        let line = reader.line;
        if let Some(token) = reader.token(c) {
            found.push((line, token));
        }
    }
    found
}

struct Reader {
    rest: Vec<char>,
    at: usize,
    line: usize,
}

impl Reader {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.rest.get(self.at + ahead).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek(0)?;
        self.at += 1;
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn skip(&mut self, count: usize) {
        for _ in 0..count {
            self.next();
        }
    }

    fn token(&mut self, c: char) -> Option<Token> {
        match (c, self.peek(1)) {
            ('/', Some('/')) => {
                while self.peek(0).is_some_and(|c| c != '\n') {
                    self.next();
                }
                None
            }
            ('/', Some('*')) => {
                self.comment();
                None
            }
            ('"', _) => {
                self.next();
                Some(Token::Text(self.string()))
            }
            ('\'', _) => {
                self.character();
                None
            }
            _ if c.is_alphanumeric() || c == '_' => Some(self.word()),
            _ => {
                self.next();
                (!c.is_whitespace()).then_some(Token::Mark(c))
            }
        }
    }

    /// A block comment, with those inside it.
    fn comment(&mut self) {
        let mut depth = 0;
        loop {
            match (self.peek(0), self.peek(1)) {
                (Some('/'), Some('*')) => depth += 1,
                (Some('*'), Some('/')) => depth -= 1,
                (Some(_), _) => {
                    self.next();
                    continue;
                }
                (None, _) => return,
            }
            self.skip(2);
            if depth == 0 {
                return;
            }
        }
    }

    /// A word, a number, or the literal whose prefix the word is: `r"…"`, `br#"…"#`, `c"…"`.
    fn word(&mut self) -> Token {
        let mut word = String::new();
        while let Some(c) = self.peek(0).filter(|c| c.is_alphanumeric() || *c == '_') {
            word.push(c);
            self.next();
        }
        let hashes = (0..).take_while(|ahead| self.peek(*ahead) == Some('#')).count();
        match word.as_str() {
            "r" | "br" | "cr" if self.peek(hashes) == Some('"') => {
                self.skip(hashes + 1);
                Token::Text(self.raw(hashes))
            }
            "b" | "c" if self.peek(0) == Some('"') => {
                self.next();
                Token::Text(self.string())
            }
            _ => Token::Word(word),
        }
    }

    fn raw(&mut self, hashes: usize) -> String {
        let mut text = String::new();
        while let Some(c) = self.next() {
            if c == '"' && (0..hashes).all(|ahead| self.peek(ahead) == Some('#')) {
                self.skip(hashes);
                break;
            }
            text.push(c);
        }
        text
    }

    /// Behind the opening quote.
    fn string(&mut self) -> String {
        let mut text = String::new();
        while let Some(c) = self.next() {
            match c {
                '"' => break,
                '\\' => match self.next() {
                    Some('\n') => {
                        while self.peek(0).is_some_and(char::is_whitespace) {
                            self.next();
                        }
                    }
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some(c) => text.push(c),
                    None => break,
                },
                _ => text.push(c),
            }
        }
        text
    }

    /// A character, or the quote of a lifetime.
    fn character(&mut self) {
        self.next();
        if self.peek(0) == Some('\\') {
            self.skip(2);
            while self.peek(0).is_some_and(|c| c != '\'') {
                self.next();
            }
            self.next();
        } else if self.peek(1) == Some('\'') {
            self.skip(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<String> {
        let text = |(_, token)| if let Token::Text(text) = token { Some(text) } else { None };
        tokens(source).into_iter().filter_map(text).collect()
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
    }

    #[test]
    fn words_and_marks_have_their_lines() {
        let found = tokens("pub enum E {\n    A,\n}");
        assert_eq!(found[1], (1, Token::Word("enum".to_owned())));
        assert_eq!(found[4], (2, Token::Word("A".to_owned())));
        assert!(found[6].1.is('}') && found[6].0 == 3);
    }
}
