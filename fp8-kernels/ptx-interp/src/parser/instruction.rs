//! An instruction: its guard, opcode and operands.

use super::Parser;
use crate::LoadError;
use crate::builder::{Builder, Operand, Statement};
use crate::decode;
use crate::ir::{Cond, Special};
use crate::lanes::Reg;
use crate::lexer::Token;

impl Parser {
    pub(super) fn instruction(&mut self, builder: &mut Builder) -> Result<(), LoadError> {
        let line = self.line();
        let first = self.at;
        let mut guard = None;
        if self.eat('@') {
            let negated = self.eat('!');
            let name = self.word()?;
            let Some((Reg::P(pred), _)) = builder.register(&name) else {
                return self.error(format!("guard {name:?} is no predicate"));
            };
            guard = Some(Cond { pred, negated });
        }
        let opcode = self.word()?;
        let mut operands = Vec::new();
        while !self.is(';') {
            operands.push(self.operand(builder)?);
            if !self.eat(',') {
                break;
            }
        }
        self.require(';')?;
        let text =
            self.tokens[first..self.at.min(first + 40)].iter().map(|l| show(&l.token)).collect::<String>();
        decode::instruction(
            builder,
            Statement { guard, opcode: &opcode, operands: &operands, line, text: &text },
        )
    }

    fn operand(&mut self, builder: &mut Builder) -> Result<Operand, LoadError> {
        if self.eat('[') {
            let base = self.simple(builder)?;
            let mut offset = 0i64;
            if self.eat('+') || self.is('-') {
                offset = self.integer()? as i64;
            }
            self.require(']')?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        if self.eat('{') {
            let mut parts = Vec::new();
            loop {
                parts.push(self.simple(builder)?);
                if !self.eat(',') {
                    break;
                }
            }
            self.require('}')?;
            return Ok(Operand::Vector(parts));
        }
        if self.eat('!') {
            let operand = self.simple(builder)?;
            return match operand {
                Operand::Register(Reg::P(pred), _) => Ok(Operand::Not(pred)),
                _ => self.error("'!' before something that is no predicate"),
            };
        }
        let first = self.simple(builder)?;
        if self.eat('|') {
            let second = self.simple(builder)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        if matches!(first, Operand::Symbol(..)) && self.eat('+') {
            let offset = self.integer()? as i64;
            if let Operand::Symbol(name, _) = first {
                return Ok(Operand::Symbol(name, offset));
            }
        }
        Ok(first)
    }

    fn simple(&mut self, builder: &mut Builder) -> Result<Operand, LoadError> {
        match self.peek().cloned() {
            Some(Token::F32(bits)) => {
                self.at += 1;
                Ok(Operand::F32(bits))
            }
            Some(Token::F64(bits)) => {
                self.at += 1;
                Ok(Operand::F64(bits))
            }
            Some(Token::Int(_) | Token::Punct('-')) => Ok(Operand::Integer(self.integer()?)),
            Some(Token::Word(word)) => {
                if word == "_" {
                    self.at += 1;
                    return Ok(Operand::Sink);
                }
                if let Some((reg, bits)) = builder.register(&word) {
                    self.at += 1;
                    return Ok(Operand::Register(reg, bits));
                }
                if let Some(special) = special(&word) {
                    self.at += 1;
                    return Ok(Operand::Register(builder.special(special), 32));
                }
                if word.starts_with('%') {
                    return self.error(format!("register {word:?} is not declared or not known"));
                }
                self.at += 1;
                Ok(Operand::Symbol(word, 0))
            }
            _ => self.unexpected("an operand"),
        }
    }
}

fn show(token: &Token) -> String {
    match token {
        Token::Word(word) => format!(" {word}"),
        Token::Int(value) => format!(" {value}"),
        Token::F32(bits) => format!(" 0f{bits:08X}"),
        Token::F64(bits) => format!(" 0d{bits:016X}"),
        Token::Text(text) => format!(" {text:?}"),
        Token::Punct(c) => c.to_string(),
    }
}

fn special(word: &str) -> Option<Special> {
    let axis = |name: &str| {
        let (head, axis) = name.split_once('.')?;
        Some((head.to_owned(), ["x", "y", "z"].iter().position(|a| *a == axis)?))
    };
    Some(match word {
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%nwarpid" => Special::WarpCount,
        "%lanemask_eq" => Special::MaskEq,
        "%lanemask_lt" => Special::MaskLt,
        "%lanemask_le" => Special::MaskLe,
        "%lanemask_gt" => Special::MaskGt,
        "%lanemask_ge" => Special::MaskGe,
        "%dynamic_smem_size" => Special::DynamicSize,
        "%total_smem_size" => Special::TotalSize,
        _ => match axis(word)? {
            (head, axis) if head == "%tid" => Special::Tid(axis),
            (head, axis) if head == "%ntid" => Special::Ntid(axis),
            (head, axis) if head == "%ctaid" => Special::Ctaid(axis),
            (head, axis) if head == "%nctaid" => Special::Nctaid(axis),
            _ => return None,
        },
    })
}
