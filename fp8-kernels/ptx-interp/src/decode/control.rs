//! Comparisons, branches, barriers and what lanes of a warp do together.

use super::operands::{Mods, Result};
use crate::builder::{Builder, Operand, Statement};
use crate::ir::{Logic, Op, Reduce, Shuffle, Together, Ty, Vote};
use crate::lanes::{Compare, Reg, compare};
use crate::numeric::flush;

#[derive(Clone, Copy, PartialEq)]
enum Order {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// `(test, whether NaN makes it true)`.
const TESTS: [(&str, (Order, bool)); 16] = [
    ("eq", (Order::Eq, false)),
    ("ne", (Order::Ne, false)),
    ("lt", (Order::Lt, false)),
    ("le", (Order::Le, false)),
    ("gt", (Order::Gt, false)),
    ("ge", (Order::Ge, false)),
    ("equ", (Order::Eq, true)),
    ("neu", (Order::Ne, true)),
    ("ltu", (Order::Lt, true)),
    ("leu", (Order::Le, true)),
    ("gtu", (Order::Gt, true)),
    ("geu", (Order::Ge, true)),
    ("lo", (Order::Lt, false)),
    ("ls", (Order::Le, false)),
    ("hi", (Order::Gt, false)),
    ("hs", (Order::Ge, false)),
];

/// `test!(w; |x| value of x; |x, y| …)`: a [`Compare`] of the values that two registers of a file hold.
macro_rules! test {
    ($file:ident; |$x:ident| $value:expr; |$a:ident, $b:ident| $truth:expr) => {
        compare!($file; |first, second| {
            let $a = {
                let $x = first;
                $value
            };
            let $b = {
                let $x = second;
                $value
            };
            $truth
        })
    };
}

macro_rules! ordered {
    ($file:ident, $order:expr, |$x:ident| $value:expr) => {
        match $order {
            Order::Eq => test!($file; |$x| $value; |a, b| a == b),
            Order::Ne => test!($file; |$x| $value; |a, b| a != b),
            Order::Lt => test!($file; |$x| $value; |a, b| a < b),
            Order::Le => test!($file; |$x| $value; |a, b| a <= b),
            Order::Gt => test!($file; |$x| $value; |a, b| a > b),
            Order::Ge => test!($file; |$x| $value; |a, b| a >= b),
        }
    };
}

/// Float tests. Rust's are the ordered ones, false on NaN, but for `!=`.
macro_rules! float {
    ($file:ident, $order:expr, $nan:expr, |$x:ident| $value:expr) => {
        match ($order, $nan) {
            (Order::Ne, false) => test!($file; |$x| $value; |a, b| !a.is_nan() & !b.is_nan() & (a != b)),
            (order, false) => ordered!($file, order, |$x| $value),
            (Order::Eq, true) => test!($file; |$x| $value; |a, b| a.is_nan() | b.is_nan() | (a == b)),
            (Order::Ne, true) => test!($file; |$x| $value; |a, b| a != b),
            (Order::Lt, true) => test!($file; |$x| $value; |a, b| a.is_nan() | b.is_nan() | (a < b)),
            (Order::Le, true) => test!($file; |$x| $value; |a, b| a.is_nan() | b.is_nan() | (a <= b)),
            (Order::Gt, true) => test!($file; |$x| $value; |a, b| a.is_nan() | b.is_nan() | (a > b)),
            (Order::Ge, true) => test!($file; |$x| $value; |a, b| a.is_nan() | b.is_nan() | (a >= b)),
        }
    };
}

/// `setp set selp`.
pub(super) fn compare(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if base == "selp" {
        let Some(ty) = m.ty().filter(|ty| ty.bits() >= 16) else { return s.unknown() };
        s.count(4)?;
        let (d, x, y) = (s.target(0, ty)?, s.source(b, 1, ty)?, s.source(b, 2, ty)?);
        let cond = s.cond(3)?;
        let (x, y) = if cond.negated { (y, x) } else { (x, y) };
        return Ok(Op::Select { d, a: x, b: y, p: cond.pred });
    }
    let number = m.one_of(&[("num", true), ("nan", false)]);
    let order = if number.is_some() { None } else { m.one_of(&TESTS) };
    let unsigned_name = matches!(m.last_taken(), Some("lo" | "ls" | "hi" | "hs"));
    let combine = m.one_of(&[("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)]);
    let ftz = m.take("ftz");
    let result = if base == "set" { m.ty() } else { None };
    let Some(ty) = m.ty() else { return s.unknown() };
    if ftz && ty != Ty::F32 || unsigned_name && !ty.unsigned() {
        return s.unknown();
    }
    let test: Compare = match (number, order) {
        (Some(number), None) => match (ty, number) {
            (Ty::F32, true) => {
                compare!(w; |x, y| !f32::from_bits(x).is_nan() && !f32::from_bits(y).is_nan())
            }
            (Ty::F32, false) => compare!(w; |x, y| f32::from_bits(x).is_nan() || f32::from_bits(y).is_nan()),
            (Ty::F64, true) => {
                compare!(d; |x, y| !f64::from_bits(x).is_nan() && !f64::from_bits(y).is_nan())
            }
            (Ty::F64, false) => compare!(d; |x, y| f64::from_bits(x).is_nan() || f64::from_bits(y).is_nan()),
            _ => return s.unknown(),
        },
        (None, Some((order, nan))) => match ty {
            Ty::F32 if ftz => float!(w, order, nan, |x| f32::from_bits(flush(x))),
            Ty::F32 => float!(w, order, nan, |x| f32::from_bits(x)),
            Ty::F64 => float!(d, order, nan, |x| f64::from_bits(x)),
            Ty::F16 => float!(w, order, nan, |x| half::f16::from_bits(x as u16)),
            Ty::BF16 => float!(w, order, nan, |x| half::bf16::from_bits(x as u16)),
            _ if nan => return s.unknown(),
            Ty::S16 => ordered!(w, order, |x| x as i16),
            Ty::S32 => ordered!(w, order, |x| x as i32),
            Ty::S64 => ordered!(d, order, |x| x as i64),
            Ty::U16 | Ty::U32 => ordered!(w, order, |x| x),
            Ty::U64 => ordered!(d, order, |x| x),
            Ty::B16 | Ty::B32 if matches!(order, Order::Eq | Order::Ne) => ordered!(w, order, |x| x),
            Ty::B64 if matches!(order, Order::Eq | Order::Ne) => ordered!(d, order, |x| x),
            _ => return s.unknown(),
        },
        _ => return s.unknown(),
    };
    s.count(if combine.is_some() { 4 } else { 3 })?;
    let (x, y) = (s.source(b, 1, ty)?, s.source(b, 2, ty)?);
    let with = match combine {
        Some(kind) => Some((kind, s.cond(3)?)),
        None => None,
    };
    if base == "set" {
        let Some(result @ (Ty::U32 | Ty::S32 | Ty::F32)) = result else { return s.unknown() };
        let Reg::P(p) = b.temporary(Ty::Pred) else { return s.unknown() };
        b.push(s, Op::Set { test, a: x, b: y, p: Some(p), q: None, with });
        let one = b.constant(false, if result == Ty::F32 { 0x3f80_0000 } else { 0xffff_ffff });
        let zero = b.constant(false, 0);
        return Ok(Op::Select { d: s.target(0, result)?, a: one, b: zero, p });
    }
    let (p, q) = match s.operand(0)? {
        Operand::Pair(p, q) => (s.pred(p)?, s.pred(q)?),
        operand => (s.pred(operand)?, None),
    };
    Ok(Op::Set { test, a: x, b: y, p, q, with })
}

/// Branches, barriers, fences, warp-wide operations.
pub(super) fn flow(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    match base {
        "bra" => {
            m.take("uni");
            s.count(1)?;
            Ok(Op::Branch { target: 0 })
        }
        "brx" => {
            if !m.take("idx") {
                return s.unknown();
            }
            m.take("uni");
            s.count(2)?;
            Ok(Op::Jump { index: s.source(b, 0, Ty::U32)?, targets: Vec::new() })
        }
        "ret" | "exit" => {
            m.take("uni");
            s.count(0)?;
            Ok(Op::Exit)
        }
        "trap" => {
            s.count(0)?;
            Ok(Op::Trap)
        }
        "membar" => {
            s.count(0)?;
            match m.one_of(&[("cta", ()), ("gl", ()), ("sys", ())]) {
                Some(()) => Ok(Op::Nothing),
                None => s.unknown(),
            }
        }
        "fence" => {
            s.count(0)?;
            let kind = m.one_of(&[("sc", ()), ("acq_rel", ()), ("acquire", ()), ("release", ())]);
            let scope = m.one_of(&[("cta", ()), ("cluster", ()), ("gpu", ()), ("sys", ())]);
            if kind.and(scope).is_some() { Ok(Op::Nothing) } else { s.unknown() }
        }
        "nanosleep" => {
            if m.ty() != Some(Ty::U32) {
                return s.unknown();
            }
            s.count(1)?;
            Ok(Op::Nothing)
        }
        "bar" | "barrier" => barrier(b, base, m, s),
        "shfl" => shuffle(b, m, s),
        "vote" => vote(b, m, s),
        "redux" => reduce(b, m, s),
        "match" => matching(b, m, s),
        "activemask" => {
            if m.ty() != Some(Ty::B32) {
                return s.unknown();
            }
            s.count(1)?;
            Ok(Op::ActiveMask { d: s.target(0, Ty::B32)? })
        }
        "elect" => s.error("opcode elect is not known"),
        _ => s.error(format!("opcode {base:?} is not known")),
    }
}

fn barrier(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if base == "bar" && m.take("warp") {
        if !m.take("sync") {
            return s.unknown();
        }
        s.count(1)?;
        return Ok(Op::Together { what: Together::Barrier, mask: s.source(b, 0, Ty::U32)? });
    }
    m.take("cta");
    if m.take("sync") {
        m.take("aligned");
        let id = s.source(b, 0, Ty::U32)?;
        let count = match s.operands.len() {
            1 => None,
            2 => Some(s.source(b, 1, Ty::U32)?),
            _ => return s.error("a barrier and perhaps a count belong here"),
        };
        return Ok(Op::Barrier { id, count, reduce: None });
    }
    if !m.take("red") {
        return s.unknown();
    }
    let Some(kind) = m.one_of(&[("popc", Vote::Count), ("and", Vote::All), ("or", Vote::Any)]) else {
        return s.unknown();
    };
    m.take("aligned");
    let wanted = if kind == Vote::Count { Ty::U32 } else { Ty::Pred };
    if m.ty() != Some(wanted) {
        return s.unknown();
    }
    let d = s.target(0, wanted)?;
    let id = s.source(b, 1, Ty::U32)?;
    let (count, cond) = match s.operands.len() {
        3 => (None, s.cond(2)?),
        4 => (Some(s.source(b, 2, Ty::U32)?), s.cond(3)?),
        _ => return s.error("3 or 4 operands belong here"),
    };
    Ok(Op::Barrier { id, count, reduce: Some((kind, d, cond)) })
}

fn shuffle(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if !m.take("sync") {
        return s.unknown();
    }
    let kind = m.one_of(&[
        ("up", Shuffle::Up),
        ("down", Shuffle::Down),
        ("bfly", Shuffle::Butterfly),
        ("idx", Shuffle::Index),
    ]);
    let (Some(kind), Some(ty @ (Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32))) = (kind, m.ty()) else {
        return s.unknown();
    };
    s.count(5)?;
    let (d, p) = match s.operand(0)? {
        Operand::Pair(d, p) => (&**d, s.pred(p)?),
        operand => (operand, None),
    };
    let d = if let Operand::Sink = d { None } else { Some(s.dest(d, ty, false)?) };
    let (a, lane, clamp) = (s.source(b, 1, ty)?, s.source(b, 2, Ty::U32)?, s.source(b, 3, Ty::U32)?);
    let what = Together::Shuffle { kind, d, p, a, b: lane, c: clamp };
    Ok(Op::Together { what, mask: s.source(b, 4, Ty::U32)? })
}

fn vote(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if !m.take("sync") {
        return s.unknown();
    }
    let kind =
        m.one_of(&[("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform), ("ballot", Vote::Ballot)]);
    let Some(kind) = kind else { return s.unknown() };
    let wanted = if kind == Vote::Ballot { Ty::B32 } else { Ty::Pred };
    if m.ty() != Some(wanted) {
        return s.unknown();
    }
    s.count(3)?;
    let what = Together::Vote { kind, d: s.target(0, wanted)?, a: s.cond(1)? };
    Ok(Op::Together { what, mask: s.source(b, 2, Ty::U32)? })
}

fn reduce(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if !m.take("sync") {
        return s.unknown();
    }
    let name = m.take_any().unwrap_or_default();
    let kind = match (name, m.ty()) {
        ("add", Some(Ty::U32 | Ty::S32)) => Reduce::Add,
        ("min", Some(Ty::U32)) => Reduce::MinU,
        ("max", Some(Ty::U32)) => Reduce::MaxU,
        ("min", Some(Ty::S32)) => Reduce::MinS,
        ("max", Some(Ty::S32)) => Reduce::MaxS,
        ("and", Some(Ty::B32)) => Reduce::And,
        ("or", Some(Ty::B32)) => Reduce::Or,
        ("xor", Some(Ty::B32)) => Reduce::Xor,
        _ => return s.unknown(),
    };
    s.count(3)?;
    let what = Together::Reduce { kind, d: s.target(0, Ty::B32)?, a: s.source(b, 1, Ty::B32)? };
    Ok(Op::Together { what, mask: s.source(b, 2, Ty::U32)? })
}

fn matching(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let all = m.one_of(&[("any", false), ("all", true)]);
    let (Some(all), true, Some(ty @ (Ty::B32 | Ty::B64))) = (all, m.take("sync"), m.ty()) else {
        return s.unknown();
    };
    s.count(3)?;
    let a = s.source(b, 1, ty)?;
    let what = match (all, s.operand(0)?) {
        (false, d) => Together::MatchAny { d: s.dest(d, Ty::B32, false)?, a },
        (true, Operand::Pair(d, p)) => Together::MatchAll { d: s.dest(d, Ty::B32, false)?, p: s.pred(p)?, a },
        (true, d) => Together::MatchAll { d: s.dest(d, Ty::B32, false)?, p: None, a },
    };
    Ok(Op::Together { what, mask: s.source(b, 2, Ty::U32)? })
}
