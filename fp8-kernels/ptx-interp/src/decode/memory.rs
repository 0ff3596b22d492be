//! Moves, address conversions, loads, stores and atomics.

use super::operands::{Mods, Result};
use crate::builder::{Builder, Operand, Statement};
use crate::ir::{AtomOp, LOCAL_WINDOW, Mem, Op, PARAM_WINDOW, SHARED_WINDOW, Space, Ty};
use crate::lanes::{Map, Reg, map};
use crate::race::Access;

const SPACES: [(&str, Space); 9] = [
    ("global", Space::Global),
    ("shared", Space::Shared),
    ("shared::cta", Space::Shared),
    ("local", Space::Local),
    ("param", Space::Param),
    ("param::entry", Space::Param),
    ("const", Space::Global),
    ("param::func", Space::Param),
    ("generic", Space::Generic),
];

/// `mov` between registers, of constants and symbols, and between a value and its parts.
pub(super) fn mov(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let Some(ty) = m.ty() else { return s.unknown() };
    s.count(2)?;
    if ty == Ty::Pred {
        let Some(d) = s.pred(s.operand(0)?)? else { return s.unknown() };
        if let Operand::Integer(value) = s.operand(1)? {
            let zero = b.constant(false, 0);
            let test: crate::lanes::Compare = if *value != 0 {
                crate::lanes::compare!(w; |_x, _y| true)
            } else {
                crate::lanes::compare!(w; |_x, _y| false)
            };
            return Ok(Op::Set { test, a: zero, b: zero, p: Some(d), q: None, with: None });
        }
        let a = s.cond(1)?;
        return Ok(Op::Logic { kind: crate::ir::Logic::And, d, a, b: a });
    }
    let part = |count: usize| match (ty.bits(), count) {
        (32, 2) => Ok(Ty::B16),
        (64, 2) => Ok(Ty::B32),
        (32, 4) => Ok(Ty::B8),
        (64, 4) | (16, 2) => Ok(if ty.bits() == 64 { Ty::B16 } else { Ty::B8 }),
        _ => s.unknown(),
    };
    match (s.operand(0)?, s.operand(1)?) {
        (Operand::Vector(parts), source) if ty.untyped() => {
            let element = part(parts.len())?;
            let parts = parts.iter().map(|p| match p {
                Operand::Sink => Ok(None),
                p => s.dest(p, element, element == Ty::B8).map(Some),
            });
            let parts = parts.collect::<Result<_>>()?;
            Ok(Op::Unpack { parts, a: s.value(b, source, ty, false)?, bits: element.bits() })
        }
        (d, Operand::Vector(parts)) if ty.untyped() => {
            let element = part(parts.len())?;
            let parts = parts.iter().map(|p| s.value(b, p, element, element == Ty::B8));
            let parts = parts.collect::<Result<_>>()?;
            Ok(Op::Pack { d: s.dest(d, ty, false)?, parts, bits: element.bits() })
        }
        _ => {
            let run: Map = if ty.bits() == 64 { map!(d = d; every |x| x) } else { map!(w = w; every |x| x) };
            s.map(b, run, ty, &[ty])
        }
    }
}

/// `cvta[.to].space.u64`: global addresses are generic ones; other spaces have windows.
pub(super) fn cvta(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let to = m.take("to");
    let Some(space) = m.one_of(&SPACES) else { return s.unknown() };
    if m.ty() != Some(Ty::U64) {
        return s.unknown();
    }
    let run: Map = match (space, to) {
        (Space::Global, _) => map!(d = d; every |x| x),
        (Space::Shared, false) => map!(d = d; every |x| x.wrapping_add(SHARED_WINDOW)),
        (Space::Shared, true) => map!(d = d; every |x| x.wrapping_sub(SHARED_WINDOW)),
        (Space::Local, false) => map!(d = d; every |x| x.wrapping_add(LOCAL_WINDOW)),
        (Space::Local, true) => map!(d = d; every |x| x.wrapping_sub(LOCAL_WINDOW)),
        (Space::Param, false) => map!(d = d; every |x| x.wrapping_add(PARAM_WINDOW)),
        (Space::Param, true) => map!(d = d; every |x| x.wrapping_sub(PARAM_WINDOW)),
        _ => return s.unknown(),
    };
    s.map(b, run, Ty::U64, &[Ty::U64])
}

/// The ordering and caching words of a load or store, and what race checking makes of them.
struct Words {
    space: Space,
    strong: bool,
    non_coherent: bool,
}

fn words(m: &mut Mods<'_>, s: &Statement<'_>, store: bool) -> Result<Words> {
    let weak = m.take("weak");
    let volatile = m.take("volatile");
    let ordered = m.take("relaxed") || m.take(if store { "release" } else { "acquire" });
    if ordered && m.one_of(&[("cta", ()), ("cluster", ()), ("gpu", ()), ("sys", ())]).is_none() {
        return s.error("a scope belongs after this ordering");
    }
    if u32::from(weak) + u32::from(volatile) + u32::from(ordered) > 1 {
        return s.unknown();
    }
    let space = m.one_of(&SPACES).unwrap_or(Space::Generic);
    let caches: &[(&str, ())] = if store {
        &[("wb", ()), ("cg", ()), ("cs", ()), ("wt", ())]
    } else {
        &[("ca", ()), ("cg", ()), ("cs", ()), ("lu", ()), ("cv", ())]
    };
    m.one_of(caches);
    let non_coherent = !store && m.take("nc");
    if non_coherent && space != Space::Global {
        return s.unknown();
    }
    m.one_of(&[
        ("L1::no_allocate", ()),
        ("L1::evict_normal", ()),
        ("L1::evict_unchanged", ()),
        ("L1::evict_first", ()),
        ("L1::evict_last", ()),
    ]);
    m.one_of(&[("L2::64B", ()), ("L2::128B", ()), ("L2::256B", ())]);
    Ok(Words { space, strong: volatile || ordered, non_coherent })
}

fn vector(m: &mut Mods<'_>, s: &Statement<'_>) -> Result<(usize, Ty)> {
    let count = m.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1);
    match m.ty() {
        Some(ty) if !matches!(ty, Ty::Pred | Ty::F16x2 | Ty::BF16x2 | Ty::F16 | Ty::BF16) => {
            let bytes = count * ty.bytes();
            if bytes > 32 || count == 8 && ty.bytes() < 4 { s.unknown() } else { Ok((count, ty)) }
        }
        _ => s.unknown(),
    }
}

pub(super) fn memory(
    b: &mut Builder,
    s: &Statement<'_>,
    index: usize,
    space: Space,
    (count, ty): (usize, Ty),
    access: Access,
) -> Result<Mem> {
    let Operand::Address(base, mut offset) = s.operand(index)?.clone() else {
        return s.error("an address in brackets belongs here");
    };
    let base = match &*base {
        Operand::Register(reg @ Reg::D(_), _) => *reg,
        Operand::Register(reg @ Reg::W(_), 32)
            if matches!(space, Space::Shared | Space::Local | Space::Param) =>
        {
            *reg
        }
        Operand::Symbol(name, extra) => match b.symbol(name, *extra, true) {
            Some(reg) => reg,
            None => return s.error(format!("symbol {name:?} is not known")),
        },
        Operand::Integer(value) => {
            let address = value.wrapping_add(offset as u64);
            offset = 0;
            b.constant(true, address)
        }
        _ => return s.error("this is no address"),
    };
    Ok(Mem { space, base, offset, bytes: ty.bytes(), count, array: None, access })
}

/// `ld`.
pub(super) fn load(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>, uniform: bool) -> Result<Op> {
    let Words { space, strong, non_coherent } = words(m, s, false)?;
    let (count, ty) = vector(m, s)?;
    if uniform && space != Space::Global {
        return s.unknown();
    }
    let access = match (non_coherent || uniform, strong) {
        (true, false) => Access::NonCoherent,
        (true, true) => return s.unknown(),
        (false, true) => Access::StrongRead,
        (false, false) => Access::Read,
    };
    s.count(2)?;
    let dest = |operand: &Operand| match operand {
        Operand::Sink => Ok(None),
        operand => s.dest(operand, ty, true).map(Some),
    };
    let d = match s.operand(0)? {
        Operand::Vector(parts) if parts.len() == count => parts.iter().map(dest).collect::<Result<_>>()?,
        operand if count == 1 => vec![dest(operand)?],
        _ => return s.error(format!("{count} destinations belong here")),
    };
    let mem = memory(b, s, 1, space, (count, ty), access)?;
    let register = match s.operand(0)? {
        Operand::Vector(parts) => parts.first(),
        operand => Some(operand),
    };
    let extend = match register {
        Some(Operand::Register(_, bits)) if ty.signed() && *bits > ty.bits() => *bits,
        _ => 0,
    };
    Ok(Op::Load { mem, d, extend })
}

/// `st`.
pub(super) fn store(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let Words { space, strong, .. } = words(m, s, true)?;
    if space == Space::Param {
        return s.unknown();
    }
    let (count, ty) = vector(m, s)?;
    s.count(2)?;
    let values = match s.operand(1)? {
        Operand::Vector(parts) if parts.len() == count => parts.as_slice(),
        operand if count == 1 => std::slice::from_ref(operand),
        _ => return s.error(format!("{count} sources belong here")),
    };
    let values = values.iter().map(|v| s.value(b, v, ty, true)).collect::<Result<_>>()?;
    let access = if strong { Access::Atomic } else { Access::Write };
    Ok(Op::Store { mem: memory(b, s, 0, space, (count, ty), access)?, s: values })
}

/// `atom` and `red`.
pub(super) fn atomic(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>, reduce: bool) -> Result<Op> {
    m.one_of(&[("relaxed", ()), ("acquire", ()), ("release", ()), ("acq_rel", ())]);
    let scopes = [("cta", ()), ("cluster", ()), ("gpu", ()), ("sys", ())];
    m.one_of(&scopes);
    let space = m.one_of(&SPACES).unwrap_or(Space::Generic);
    if !matches!(space, Space::Generic | Space::Global | Space::Shared) {
        return s.unknown();
    }
    m.one_of(&scopes);
    let kind = m.one_of(&[
        ("add", AtomOp::Add),
        ("min", AtomOp::Min),
        ("max", AtomOp::Max),
        ("and", AtomOp::And),
        ("or", AtomOp::Or),
        ("xor", AtomOp::Xor),
        ("exch", AtomOp::Exch),
        ("cas", AtomOp::Cas),
        ("inc", AtomOp::Inc),
        ("dec", AtomOp::Dec),
    ]);
    let (Some(kind), Some(ty)) = (kind, m.ty()) else { return s.unknown() };
    let known = match kind {
        AtomOp::Add => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::F32 | Ty::F64),
        AtomOp::Min | AtomOp::Max => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64),
        AtomOp::And | AtomOp::Or | AtomOp::Xor => matches!(ty, Ty::B32 | Ty::B64),
        AtomOp::Exch => matches!(ty, Ty::B32 | Ty::B64) && !reduce,
        AtomOp::Cas => matches!(ty, Ty::B16 | Ty::B32 | Ty::B64) && !reduce,
        AtomOp::Inc | AtomOp::Dec => ty == Ty::U32,
    };
    if !known {
        return s.unknown();
    }
    let first = usize::from(!reduce);
    s.count(first + 2 + usize::from(kind == AtomOp::Cas))?;
    let d = match s.operand(0)? {
        _ if reduce => None,
        Operand::Sink => None,
        operand => Some(s.dest(operand, ty, false)?),
    };
    let mem = memory(b, s, first, space, (1, ty), Access::Atomic)?;
    let value = s.source(b, first + 1, ty)?;
    let c = if kind == AtomOp::Cas { Some(s.source(b, first + 2, ty)?) } else { None };
    Ok(Op::Atomic { mem, kind, ty, d, b: value, c })
}
