//! Modifiers and operands as the families of instructions take them, with checks of types and widths.

use crate::LoadError;
use crate::builder::{Builder, Operand, Statement};
use crate::ir::{Cond, Op, Ty};
use crate::lanes::{Map, Reg};
use crate::numeric::Round;

pub(super) type Result<T> = std::result::Result<T, LoadError>;

/// The modifiers of an opcode, taken from left to right.
pub(super) struct Mods<'a> {
    parts: Vec<&'a str>,
    at: usize,
}

impl<'a> Mods<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let parts = if text.is_empty() { Vec::new() } else { text.split('.').collect() };
        Self { parts, at: 0 }
    }

    /// The first modifier that was not taken yet.
    pub(super) fn left(&self) -> Option<&'a str> {
        self.parts.get(self.at).copied()
    }

    pub(super) fn take(&mut self, word: &str) -> bool {
        let found = self.left() == Some(word);
        self.at += usize::from(found);
        found
    }

    /// Takes the next modifier, whatever it is.
    pub(super) fn take_any(&mut self) -> Option<&'a str> {
        let left = self.left();
        self.at += 1;
        left
    }

    /// The modifier that was taken last.
    pub(super) fn last_taken(&self) -> Option<&'a str> {
        self.at.checked_sub(1).and_then(|at| self.parts.get(at)).copied()
    }

    /// The table's entry for the next modifier.
    pub(super) fn one_of<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let found = self.left().and_then(|word| table.iter().find(|(name, _)| *name == word));
        self.at += usize::from(found.is_some());
        found.map(|(_, value)| *value)
    }

    pub(super) fn round(&mut self) -> Option<Round> {
        self.one_of(&[("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)])
    }

    pub(super) fn ty(&mut self) -> Option<Ty> {
        let ty = self.left().and_then(Ty::parse);
        self.at += usize::from(ty.is_some());
        ty
    }

    /// The type that the last modifier names.
    pub(super) fn last_ty(&self) -> Option<Ty> {
        self.parts.last().and_then(|part| Ty::parse(part))
    }
}

impl Statement<'_> {
    pub(super) fn count(&self, wanted: usize) -> Result<()> {
        let found = self.operands.len();
        if found == wanted { Ok(()) } else { self.error(format!("{found} operands: {wanted} belong here")) }
    }

    pub(super) fn unknown<T>(&self) -> Result<T> {
        self.error("this combination of opcode, modifiers and type is not known")
    }

    pub(super) fn operand(&self, index: usize) -> Result<&Operand> {
        match self.operands.get(index) {
            Some(operand) => Ok(operand),
            None => self.error(format!("operand {} is missing", index + 1)),
        }
    }

    /// The destination register for a value of `ty`; `wider` where a larger register may take it.
    pub(super) fn dest(&self, operand: &Operand, ty: Ty, wider: bool) -> Result<Reg> {
        match operand {
            Operand::Register(reg, bits) if fits(*bits, ty, wider) => Ok(*reg),
            Operand::Register(_, bits) => self.error(format!("a destination of {bits} bits for {ty:?}")),
            _ => self.error("a destination register belongs here"),
        }
    }

    pub(super) fn target(&self, index: usize, ty: Ty) -> Result<Reg> {
        self.dest(self.operand(index)?, ty, false)
    }

    /// The register, perhaps of a constant, that holds a source of `ty`.
    pub(super) fn value(&self, b: &mut Builder, operand: &Operand, ty: Ty, wider: bool) -> Result<Reg> {
        let bits = ty.bits();
        let float = matches!(ty, Ty::F16 | Ty::F16x2 | Ty::BF16 | Ty::BF16x2 | Ty::F32 | Ty::F64);
        match operand {
            Operand::Register(reg, have) if fits(*have, ty, wider) => Ok(*reg),
            Operand::Register(_, have) => self.error(format!("a source of {have} bits for {ty:?}")),
            Operand::Integer(value) if bits == 64 && !float => Ok(b.constant(true, *value)),
            Operand::Integer(value) if bits > 1 && (!float || matches!(ty, Ty::F16x2 | Ty::BF16x2)) => {
                let signed = *value as i64;
                let room = -(1i64 << (bits - 1))..1i64 << bits;
                if bits < 64 && !room.contains(&signed) {
                    return self.error(format!("{signed} does not fit {ty:?}"));
                }
                let mask = u64::MAX >> (64 - bits);
                Ok(b.constant(false, value & mask))
            }
            Operand::F32(value) if matches!(ty, Ty::F32 | Ty::B32) => {
                Ok(b.constant(false, u64::from(*value)))
            }
            Operand::F64(value) if matches!(ty, Ty::F64 | Ty::B64) => Ok(b.constant(true, *value)),
            Operand::Symbol(name, offset) if bits >= 32 && !float => {
                match b.symbol(name, *offset, bits == 64) {
                    Some(reg) => Ok(reg),
                    None => self.error(format!("symbol {name:?} is not known")),
                }
            }
            _ => self.error(format!("a source of type {ty:?} belongs here")),
        }
    }

    pub(super) fn source(&self, b: &mut Builder, index: usize, ty: Ty) -> Result<Reg> {
        self.value(b, self.operand(index)?, ty, false)
    }

    /// A predicate operand.
    pub(super) fn cond(&self, index: usize) -> Result<Cond> {
        match self.operand(index)? {
            Operand::Register(Reg::P(pred), _) => Ok(Cond { pred: *pred, negated: false }),
            Operand::Not(pred) => Ok(Cond { pred: *pred, negated: true }),
            _ => self.error(format!("operand {} should be a predicate", index + 1)),
        }
    }

    pub(super) fn pred(&self, operand: &Operand) -> Result<Option<usize>> {
        match operand {
            Operand::Register(Reg::P(pred), _) => Ok(Some(*pred)),
            Operand::Sink => Ok(None),
            _ => self.error("a predicate belongs here"),
        }
    }

    /// A map with the types of its destination and sources.
    pub(super) fn map(&self, b: &mut Builder, run: Map, d: Ty, sources: &[Ty]) -> Result<Op> {
        self.count(1 + sources.len())?;
        let d = self.target(0, d)?;
        let mut s = [d; 3];
        for (index, ty) in sources.iter().enumerate().take(3) {
            s[index] = self.source(b, index + 1, *ty)?;
        }
        Ok(Op::Map { run, d, s, n: sources.len() })
    }
}

/// Whether a register of `bits` may hold a value of `ty`.
fn fits(bits: u32, ty: Ty, wider: bool) -> bool {
    let need = ty.bits();
    bits == need || wider && bits > need && need > 1 || need == 8 && bits == 16 && wider
}
