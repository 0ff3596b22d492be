//! Matrices of a warp, and the asynchronous copies that bring them: `mma`, `ldmatrix`, `cp.async`.

use super::memory::memory;
use super::operands::{Mods, Result};
use crate::builder::{Builder, Operand, Statement};
use crate::ir::{Element, Op, Space, Together, Ty};
use crate::lanes::Reg;
use crate::race::Access;

/// All lanes of a warp take part.
const EVERYBODY: u64 = 0xffff_ffff;

fn take_all(m: &mut Mods<'_>, words: &[&str]) -> bool {
    words.iter().all(|word| m.take(word))
}

/// The parts of a vector operand.
fn parts<'a, const N: usize>(s: &'a Statement<'_>, index: usize) -> Result<&'a [Operand; N]> {
    match s.operand(index)? {
        Operand::Vector(parts) => match parts.as_slice().try_into() {
            Ok(parts) => Ok(parts),
            Err(_) => s.error(format!("{} registers in operand {}: {N} belong here", parts.len(), index + 1)),
        },
        _ => s.error(format!("operand {}: {N} registers in braces belong here", index + 1)),
    }
}

fn sources<const N: usize>(b: &mut Builder, s: &Statement<'_>, index: usize, ty: Ty) -> Result<[Reg; N]> {
    let parts: &[Operand; N] = parts(s, index)?;
    let mut registers = [Reg::W(0); N];
    for (register, part) in registers.iter_mut().zip(parts) {
        *register = s.value(b, part, ty, false)?;
    }
    Ok(registers)
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32` for T bf16 and f16, and `m16n8k32` for each pair of e4m3 and e5m2.
pub(super) fn multiply(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if !take_all(m, &["sync", "aligned"]) {
        return s.unknown();
    }
    let Some(bytes) = m.one_of(&[("m16n8k16", false), ("m16n8k32", true)]) else { return s.unknown() };
    if !take_all(m, &["row", "col", "f32"]) {
        return s.unknown();
    }
    let elements = if bytes {
        let mut element = || m.one_of(&[("e4m3", Element::E4M3), ("e5m2", Element::E5M2)]);
        match (element(), element()) {
            (Some(left), Some(right)) => [left, right],
            _ => return s.unknown(),
        }
    } else {
        match (m.ty(), m.ty()) {
            (Some(Ty::BF16), Some(Ty::BF16)) => [Element::BF16; 2],
            (Some(Ty::F16), Some(Ty::F16)) => [Element::F16; 2],
            _ => return s.unknown(),
        }
    };
    if m.ty() != Some(Ty::F32) {
        return s.unknown();
    }
    s.count(4)?;
    let mut d = [Reg::W(0); 4];
    for (d, part) in d.iter_mut().zip(parts::<4>(s, 0)?) {
        *d = s.dest(part, Ty::F32, false)?;
    }
    let (a, b2, c) = (sources(b, s, 1, Ty::B32)?, sources(b, s, 2, Ty::B32)?, sources(b, s, 3, Ty::F32)?);
    let what = Together::Multiply { elements, d, a, b: b2, c };
    Ok(Op::Together { what, mask: b.constant(false, EVERYBODY) })
}

/// `ldmatrix.sync.aligned.m8n8.x1|x2|x4[.trans].shared.b16`
pub(super) fn load(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let count = if take_all(m, &["sync", "aligned", "m8n8"]) {
        m.one_of(&[("x1", 1), ("x2", 2), ("x4", 4)])
    } else {
        None
    };
    let Some(count) = count else { return s.unknown() };
    let transposed = m.take("trans");
    if !(m.take("shared") || m.take("shared::cta")) || m.ty() != Some(Ty::B16) {
        return s.unknown();
    }
    s.count(2)?;
    let mut d = [None; 4];
    let given = match s.operand(0)? {
        Operand::Vector(given) if given.len() == count => given,
        _ => return s.error(format!("{count} destinations in braces belong here")),
    };
    for (d, given) in d.iter_mut().zip(given) {
        *d = Some(s.dest(given, Ty::B32, false)?);
    }
    // A row of a matrix: eight elements of two bytes.
    let mem = memory(b, s, 1, Space::Shared, (2, Ty::B64), Access::Read)?;
    let what = Together::LoadMatrix { mem, d, transposed };
    Ok(Op::Together { what, mask: b.constant(false, EVERYBODY) })
}

/// `cp.async.ca|cg.shared.global [to], [from], bytes[, size]`, `.commit_group`, `.wait_group n`, `.wait_all`.
pub(super) fn copy(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if !m.take("async") {
        return s.unknown();
    }
    if m.take("commit_group") {
        s.count(0)?;
        return Ok(Op::Commit);
    }
    if m.take("wait_all") {
        s.count(0)?;
        return Ok(Op::Wait { most: None });
    }
    if m.take("wait_group") {
        s.count(1)?;
        return match s.operand(0)? {
            Operand::Integer(most) if *most < 1 << 16 => Ok(Op::Wait { most: Some(*most as u32) }),
            _ => s.error("a number of groups belongs here"),
        };
    }
    let whole_lines = m.one_of(&[("ca", false), ("cg", true)]);
    let Some(whole_lines) = whole_lines else { return s.unknown() };
    if !(m.take("shared") || m.take("shared::cta")) || !m.take("global") {
        return s.unknown();
    }
    m.one_of(&[("L2::64B", ()), ("L2::128B", ()), ("L2::256B", ())]);
    let size = match s.operands.len() {
        3 => None,
        4 => Some(s.source(b, 3, Ty::U32)?),
        _ => return s.error("two addresses, a number of bytes and perhaps a size belong here"),
    };
    let shape = match s.operand(2)? {
        Operand::Integer(4) if !whole_lines => (1, Ty::B32),
        Operand::Integer(8) if !whole_lines => (1, Ty::B64),
        Operand::Integer(16) => (2, Ty::B64),
        _ => return s.error("16 bytes, or 4 or 8 with .ca, belong here"),
    };
    let to = memory(b, s, 0, Space::Shared, shape, Access::Copy)?;
    let from = memory(b, s, 1, Space::Global, shape, Access::Read)?;
    Ok(Op::Copy { to, from, size })
}
