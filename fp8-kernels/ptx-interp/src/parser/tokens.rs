//! Tokens one by one: what is next, what must be, and the error with its line.

use super::Parser;
use crate::LoadError;
use crate::lexer::Token;

impl Parser {
    pub(super) fn line(&self) -> u32 {
        let last = self.tokens.get(self.at).or_else(|| self.tokens.last());
        last.map_or(1, |lexeme| lexeme.line)
    }

    pub(super) fn error<T>(&self, what: impl Into<String>) -> Result<T, LoadError> {
        Err(LoadError::new(self.line(), what))
    }

    pub(super) fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|lexeme| &lexeme.token)
    }

    pub(super) fn peek_word(&self) -> Option<&str> {
        if let Some(Token::Word(word)) = self.peek() { Some(word) } else { None }
    }

    pub(super) fn unexpected<T>(&self, wanted: &str) -> Result<T, LoadError> {
        match self.peek() {
            Some(Token::Word(word)) => self.error(format!("{word:?} where {wanted} belongs")),
            Some(token) => self.error(format!("{token:?} where {wanted} belongs")),
            None => self.error(format!("the text ends where {wanted} belongs")),
        }
    }

    pub(super) fn is(&self, c: char) -> bool {
        self.peek() == Some(&Token::Punct(c))
    }

    pub(super) fn eat(&mut self, c: char) -> bool {
        let found = self.is(c);
        self.at += usize::from(found);
        found
    }

    pub(super) fn require(&mut self, c: char) -> Result<(), LoadError> {
        if self.eat(c) { Ok(()) } else { self.unexpected(&format!("{c:?}")) }
    }

    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek_word() == Some(word);
        self.at += usize::from(found);
        found
    }

    pub(super) fn word(&mut self) -> Result<String, LoadError> {
        let Some(word) = self.peek_word().map(str::to_owned) else { return self.unexpected("a word") };
        self.at += 1;
        Ok(word)
    }

    pub(super) fn integer(&mut self) -> Result<u64, LoadError> {
        let negative = self.eat('-');
        let Some(&Token::Int(value)) = self.peek() else { return self.unexpected("an integer") };
        self.at += 1;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    pub(super) fn size(&mut self) -> Result<usize, LoadError> {
        let value = self.integer()?;
        let limit = 1 << 31;
        if value > limit { self.error(format!("size {value}: at most {limit}")) } else { Ok(value as usize) }
    }

    pub(super) fn text(&mut self) -> Result<String, LoadError> {
        let Some(Token::Text(text)) = self.peek().cloned() else { return self.unexpected("a string") };
        self.at += 1;
        Ok(text)
    }
}
