//! Instructions from their text: one function per family, exact about modifiers, types and operand widths.

mod control;
mod convert;
mod float;
mod integer;
mod matrix;
mod memory;
mod operands;
mod packed;

use crate::builder::{Builder, Statement};
use crate::ir::{Op, Ty};
use operands::{Mods, Result};

/// Decodes an instruction and adds it to its kernel.
pub(crate) fn instruction(b: &mut Builder, statement: Statement<'_>) -> Result<()> {
    let (base, modifiers) = statement.opcode.split_once('.').unwrap_or((statement.opcode, ""));
    let mut mods = Mods::new(modifiers);
    let op = decode(b, base, &mut mods, &statement)?;
    if let Some(left) = mods.left() {
        return statement.error(format!("modifier .{left} is not known here"));
    }
    b.add(base, op, &statement)
}

/// Decodes `base` with its modifiers; the caller checks that none is left.
fn decode(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    match base {
        "add" | "sub" | "mul" | "mad" | "fma" | "min" | "max" | "neg" | "abs" | "div" => {
            let ty = m.last_ty();
            match ty {
                Some(Ty::F32 | Ty::F64) => float::arithmetic(b, base, m, s),
                Some(Ty::F16 | Ty::F16x2 | Ty::BF16 | Ty::BF16x2) => packed::arithmetic(b, base, m, s),
                _ => integer::arithmetic(b, base, m, s),
            }
        }
        "rem" | "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "popc" | "clz" | "brev"
        | "bfind" | "bfe" | "bfi" | "prmt" | "lop3" | "addc" | "subc" | "madc" | "mad24" | "mul24" => {
            integer::other(b, base, m, s)
        }
        "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "testp" => {
            float::function(b, base, m, s)
        }
        "setp" | "set" | "selp" => control::compare(b, base, m, s),
        "mov" => memory::mov(b, m, s),
        "cvt" => convert::cvt(b, m, s),
        "cvta" => memory::cvta(b, m, s),
        "ld" | "ldu" => memory::load(b, m, s, base == "ldu"),
        "st" => memory::store(b, m, s),
        "atom" | "red" => memory::atomic(b, m, s, base == "red"),
        "cp" => matrix::copy(b, m, s),
        "mma" => matrix::multiply(b, m, s),
        "ldmatrix" => matrix::load(b, m, s),
        "prefetch" | "prefetchu" | "isspacep" => s.error("this opcode is not known"),
        _ => control::flow(b, base, m, s),
    }
}
