//! PTX text to tokens, each with its line.
//!
//! A word takes dots, dollars, per cents and `::`, so `ld.global.L1::no_allocate.v4.u32`, `%tid.x` and `$L__BB0_3`
//! are single tokens. Comments are dropped. Numbers keep their kind: `0f3F800000` is a float's bits, not an integer.

use crate::LoadError;

/// A token of PTX text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    /// An opcode, directive, register, symbol or label.
    Word(String),
    /// An integer, before any sign.
    Int(u64),
    /// `0f` and eight hexadecimal digits: the bits of an f32.
    F32(u32),
    /// `0d` and sixteen hexadecimal digits: the bits of an f64.
    F64(u64),
    /// A quoted string, without the quotes.
    Text(String),
    /// Any other character.
    Punct(char),
}

/// A token and the line it starts on.
#[derive(Clone, Debug)]
pub(crate) struct Lexeme {
    pub(crate) token: Token,
    pub(crate) line: u32,
}

/// Splits `ptx` into tokens.
pub(crate) fn lex(ptx: &str) -> Result<Vec<Lexeme>, LoadError> {
    let mut lexer = Lexer { rest: ptx, line: 1, out: Vec::with_capacity(ptx.len() / 4) };
    while lexer.step()? {}
    Ok(lexer.out)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    out: Vec<Lexeme>,
}

fn starts_word(c: char) -> bool {
    c.is_ascii_alphabetic() || matches!(c, '_' | '$' | '%' | '.')
}

fn continues_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}

impl Lexer<'_> {
    fn error(&self, what: impl Into<String>) -> LoadError {
        LoadError::new(self.line, what)
    }

    /// Drops `n` bytes and counts their line ends.
    fn skip(&mut self, n: usize) {
        let (head, tail) = self.rest.split_at(n);
        self.line += head.bytes().filter(|&b| b == b'\n').count() as u32;
        self.rest = tail;
    }

    fn push(&mut self, token: Token, bytes: usize) {
        self.out.push(Lexeme { token, line: self.line });
        self.skip(bytes);
    }

    fn step(&mut self) -> Result<bool, LoadError> {
        let trimmed = self.rest.trim_start();
        self.skip(self.rest.len() - trimmed.len());
        let Some(first) = self.rest.chars().next() else { return Ok(false) };
        if self.rest.starts_with("//") {
            self.skip(self.rest.find('\n').unwrap_or(self.rest.len()));
        } else if self.rest.starts_with("/*") {
            let end = self.rest.find("*/").ok_or_else(|| self.error("comment without end"))?;
            self.skip(end + 2);
        } else if first == '"' {
            let end = self.rest[1..].find(['"', '\n']).filter(|&e| self.rest[1 + e..].starts_with('"'));
            let end = end.ok_or_else(|| self.error("string without end"))?;
            self.push(Token::Text(self.rest[1..1 + end].to_owned()), end + 2);
        } else if first.is_ascii_digit() {
            self.number()?;
        } else if starts_word(first) {
            self.word();
        } else if first.is_ascii_punctuation() {
            self.push(Token::Punct(first), 1);
        } else {
            return Err(self.error(format!("character {first:?} is not PTX")));
        }
        Ok(true)
    }

    fn word(&mut self) {
        let mut end = 0;
        loop {
            let tail = &self.rest[end..];
            let more = tail.find(|c| !continues_word(c)).unwrap_or(tail.len());
            end += more;
            let tail = &self.rest[end..];
            if tail.starts_with("::") && tail[2..].starts_with(continues_word) {
                end += 2;
            } else {
                break;
            }
        }
        self.push(Token::Word(self.rest[..end].to_owned()), end);
    }

    fn number(&mut self) -> Result<(), LoadError> {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(self.rest.len());
        let text = &self.rest[..end];
        let bad = || LoadError::new(self.line, format!("number {text:?} is not understood"));
        let lower = text.to_ascii_lowercase();
        let token = if let Some(hex) = lower.strip_prefix("0f") {
            let bits = u32::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 8);
            Token::F32(bits.ok_or_else(bad)?)
        } else if let Some(hex) = lower.strip_prefix("0d") {
            let bits = u64::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 16);
            Token::F64(bits.ok_or_else(bad)?)
        } else {
            let digits = lower.strip_suffix('u').unwrap_or(&lower);
            let value = if let Some(hex) = digits.strip_prefix("0x") {
                u64::from_str_radix(hex, 16)
            } else if let Some(binary) = digits.strip_prefix("0b") {
                u64::from_str_radix(binary, 2)
            } else if digits.len() > 1 && digits.starts_with('0') {
                u64::from_str_radix(digits, 8)
            } else {
                digits.parse()
            };
            Token::Int(value.map_err(|_| bad())?)
        };
        self.push(token, end);
        Ok(())
    }
}
