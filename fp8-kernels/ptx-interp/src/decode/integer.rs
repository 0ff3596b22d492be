//! Integer arithmetic, logic, shifts and bit fields.

use super::operands::{Mods, Result};
use crate::builder::{Builder, Operand, Statement};
use crate::ir::{Cond, Logic, Op, Ty};
use crate::lanes::{Map, Reg, map};

/// `map!` for a 16-, 32- or 64-bit type: the 16-bit result is cut to its bits.
macro_rules! unsigned {
    ($ty:expr; |$($x:ident),+| $body:expr) => {
        match $ty.bits() {
            16 => unsigned!(@w |$($x),+| u32::from({ $(let $x = $x as u16;)+ $body })),
            32 => unsigned!(@w |$($x),+| $body),
            _ => unsigned!(@d |$($x),+| $body),
        }
    };
    (@w |$x:ident| $body:expr) => { map!(w = w; every |$x| $body) };
    (@w |$x:ident, $y:ident| $body:expr) => { map!(w = w, w; every |$x, $y| $body) };
    (@w |$x:ident, $y:ident, $z:ident| $body:expr) => { map!(w = w, w, w; every |$x, $y, $z| $body) };
    (@d |$x:ident| $body:expr) => { map!(d = d; every |$x| $body) };
    (@d |$x:ident, $y:ident| $body:expr) => { map!(d = d, d; every |$x, $y| $body) };
    (@d |$x:ident, $y:ident, $z:ident| $body:expr) => { map!(d = d, d, d; every |$x, $y, $z| $body) };
}

/// The same on signed values, lane by lane where `$how` is `chosen`.
macro_rules! signed {
    ($ty:expr; $how:ident |$($x:ident),+| $body:expr) => {
        match $ty.bits() {
            16 => signed!(@w $how |$($x),+| u32::from({ $(let $x = $x as i16;)+ $body } as u16)),
            32 => signed!(@w $how |$($x),+| { $(let $x = $x as i32;)+ $body } as u32),
            _ => signed!(@d $how |$($x),+| { $(let $x = $x as i64;)+ $body } as u64),
        }
    };
    (@w $how:ident |$x:ident| $body:expr) => { map!(w = w; $how |$x| $body) };
    (@w $how:ident |$x:ident, $y:ident| $body:expr) => { map!(w = w, w; $how |$x, $y| $body) };
    (@d $how:ident |$x:ident| $body:expr) => { map!(d = d; $how |$x| $body) };
    (@d $how:ident |$x:ident, $y:ident| $body:expr) => { map!(d = d, d; $how |$x, $y| $body) };
}

/// `map!` of a value and a count, fast where all lanes have the same count, as nearly always.
macro_rules! shift {
    ($file:ident; |$x:ident, $n:ident| $body:expr) => {{
        fn run(r: &mut $crate::lanes::Registers, d: usize, s: [usize; 3], mask: u32) {
            let (values, counts) = (r.$file[s[0]], r.w[s[1]]);
            let good = $crate::lanes::marks!(r, $file)[s[0]] & r.w_set[s[1]];
            let count = counts[0];
            if counts.iter().fold(0, |other, n| other | n ^ count) == 0 {
                $crate::lanes::every(&mut r.$file[d], mask, |l| {
                    let ($x, $n) = (values[l], count);
                    $body
                });
            } else {
                $crate::lanes::every(&mut r.$file[d], mask, |l| {
                    let ($x, $n) = (values[l], counts[l]);
                    $body
                });
            }
            $crate::lanes::note(&mut $crate::lanes::marks!(r, $file)[d], mask, good);
        }
        run as Map
    }};
}

fn sized(m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Ty> {
    match m.ty() {
        Some(ty) if ty.integer() && ty.bits() >= 16 => Ok(ty),
        _ => s.unknown(),
    }
}

/// `add sub mul mad min max neg abs div` of integers.
pub(super) fn arithmetic(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if matches!(base, "add" | "sub") && m.take("cc") {
        return carry(b, m, s, base == "sub", false, true);
    }
    if matches!(base, "mul" | "mad") {
        return multiply(b, base == "mad", m, s);
    }
    let saturate = matches!(base, "add" | "sub") && m.take("sat");
    let ty = sized(m, s)?;
    if saturate {
        let run: Map = match (base, ty) {
            ("add", Ty::S32) => map!(w = w, w; every |x, y| (x as i32).saturating_add(y as i32) as u32),
            ("sub", Ty::S32) => map!(w = w, w; every |x, y| (x as i32).saturating_sub(y as i32) as u32),
            _ => return s.unknown(),
        };
        return s.map(b, run, ty, &[ty, ty]);
    }
    let run: Map = match (base, ty.signed()) {
        ("add", _) => unsigned!(ty; |x, y| x.wrapping_add(y)),
        ("sub", _) => unsigned!(ty; |x, y| x.wrapping_sub(y)),
        ("min", false) => unsigned!(ty; |x, y| x.min(y)),
        ("max", false) => unsigned!(ty; |x, y| x.max(y)),
        ("min", true) => signed!(ty; every |x, y| x.min(y)),
        ("max", true) => signed!(ty; every |x, y| x.max(y)),
        // What a division by zero gives is not specified; all ones is what devices do.
        ("div", false) => unsigned!(ty; |x, y| x.checked_div(y).unwrap_or(!0)),
        ("div", true) => signed!(ty; chosen |x, y| if y == 0 { -1 } else { x.wrapping_div(y) }),
        ("neg", true) => return s.map(b, signed!(ty; every |x| x.wrapping_neg()), ty, &[ty]),
        ("abs", true) => return s.map(b, signed!(ty; every |x| x.wrapping_abs()), ty, &[ty]),
        _ => return s.unknown(),
    };
    s.map(b, run, ty, &[ty, ty])
}

fn multiply(b: &mut Builder, add: bool, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    #[derive(Clone, Copy, PartialEq)]
    enum Part {
        Lo,
        Hi,
        Wide,
    }
    let Some(part) = m.one_of(&[("lo", Part::Lo), ("hi", Part::Hi), ("wide", Part::Wide)]) else {
        return s.unknown();
    };
    if add && part != Part::Wide && m.take("cc") {
        return mad_carry(b, m, s, part == Part::Hi, false);
    }
    let ty = sized(m, s)?;
    if part == Part::Wide {
        let wide = match ty {
            Ty::U16 => Ty::U32,
            Ty::S16 => Ty::S32,
            Ty::U32 => Ty::U64,
            Ty::S32 => Ty::S64,
            _ => return s.unknown(),
        };
        let run: Map = match (ty, add) {
            // Lanes that are off hold anything, also in the upper half.
            (Ty::U16, false) => map!(w = w, w; every |x, y| x.wrapping_mul(y)),
            (Ty::S16, false) => {
                map!(w = w, w; every |x, y| (i32::from(x as i16) * i32::from(y as i16)) as u32)
            }
            (Ty::U32, false) => map!(d = w, w; every |x, y| u64::from(x) * u64::from(y)),
            (Ty::S32, false) => {
                map!(d = w, w; every |x, y| (i64::from(x as i32) * i64::from(y as i32)) as u64)
            }
            (Ty::U16, true) => map!(w = w, w, w; every |x, y, z| x.wrapping_mul(y).wrapping_add(z)),
            (Ty::S16, true) => {
                map!(w = w, w, w; every |x, y, z| ((i32::from(x as i16) * i32::from(y as i16)) as u32).wrapping_add(z))
            }
            (Ty::U32, true) => {
                map!(d = w, w, d; every |x, y, z| (u64::from(x) * u64::from(y)).wrapping_add(z))
            }
            _ => {
                map!(d = w, w, d; every |x, y, z| ((i64::from(x as i32) * i64::from(y as i32)) as u64).wrapping_add(z))
            }
        };
        return if add { s.map(b, run, wide, &[ty, ty, wide]) } else { s.map(b, run, wide, &[ty, ty]) };
    }
    let run: Map = match (part == Part::Hi, add) {
        (false, false) => unsigned!(ty; |x, y| x.wrapping_mul(y)),
        (false, true) => unsigned!(ty; |x, y, z| x.wrapping_mul(y).wrapping_add(z)),
        (true, false) => high(ty),
        (true, true) => match ty {
            Ty::U32 => {
                map!(w = w, w, w; every |x, y, z| ((u64::from(x) * u64::from(y)) >> 32).wrapping_add(u64::from(z)) as u32)
            }
            Ty::S32 => {
                map!(w = w, w, w; every |x, y, z| (((i64::from(x as i32) * i64::from(y as i32)) >> 32) as u32).wrapping_add(z))
            }
            Ty::U64 => {
                map!(d = d, d, d; every |x, y, z| ((u128::from(x) * u128::from(y)) >> 64).wrapping_add(u128::from(z)) as u64)
            }
            _ => return s.unknown(),
        },
    };
    if add { s.map(b, run, ty, &[ty, ty, ty]) } else { s.map(b, run, ty, &[ty, ty]) }
}

fn high(ty: Ty) -> Map {
    match ty {
        Ty::U16 => map!(w = w, w; every |x, y| x.wrapping_mul(y) >> 16),
        Ty::S16 => {
            map!(w = w, w; every |x, y| ((i32::from(x as i16) * i32::from(y as i16)) >> 16) as u32 & 0xffff)
        }
        Ty::U32 => map!(w = w, w; every |x, y| ((u64::from(x) * u64::from(y)) >> 32) as u32),
        Ty::S32 => map!(w = w, w; every |x, y| ((i64::from(x as i32) * i64::from(y as i32)) >> 32) as u32),
        Ty::U64 => map!(d = d, d; every |x, y| ((u128::from(x) * u128::from(y)) >> 64) as u64),
        _ => map!(d = d, d; every |x, y| ((i128::from(x as i64) * i128::from(y as i64)) >> 64) as u64),
    }
}

/// `add.cc addc sub.cc subc`: sums with a carry in the flag register.
fn carry(
    b: &mut Builder,
    m: &mut Mods<'_>,
    s: &Statement<'_>,
    subtract: bool,
    carry_in: bool,
    carry_out: bool,
) -> Result<Op> {
    let Some(ty) = m.ty().filter(|ty| ty.integer() && ty.bits() >= 32) else { return s.unknown() };
    s.count(3)?;
    b.flag();
    let (d, x, y) = (s.target(0, ty)?, s.source(b, 1, ty)?, s.source(b, 2, ty)?);
    Ok(Op::Carry { d, a: x, b: y, subtract, carry_in, carry_out, flag: b.flag() })
}

/// `mad.{lo,hi}.cc` and `madc`.
fn mad_carry(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>, hi: bool, carry_in: bool) -> Result<Op> {
    let carry_out = !carry_in || m.take("cc");
    let Some(ty) = m.ty().filter(|ty| ty.integer() && ty.bits() >= 32) else { return s.unknown() };
    s.count(4)?;
    let run: Map = if hi { high(ty) } else { unsigned!(ty; |x, y| x.wrapping_mul(y)) };
    let (d, x, y) = (s.target(0, ty)?, s.source(b, 1, ty)?, s.source(b, 2, ty)?);
    let z = s.source(b, 3, ty)?;
    let product = b.temporary(ty);
    b.push(s, Op::Map { run, d: product, s: [x, y, x], n: 2 });
    Ok(Op::Carry { d, a: product, b: z, subtract: false, carry_in, carry_out, flag: b.flag() })
}

/// Logic, shifts, bit counting and bit fields.
pub(super) fn other(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    match base {
        "addc" | "subc" => {
            let carry_out = m.take("cc");
            return carry(b, m, s, base == "subc", true, carry_out);
        }
        "madc" => {
            let Some(hi) = m.one_of(&[("lo", false), ("hi", true)]) else { return s.unknown() };
            return mad_carry(b, m, s, hi, true);
        }
        "and" | "or" | "xor" | "not" => return logic(b, base, m, s),
        "shf" => return funnel(b, m, s),
        _ => {}
    }
    if base == "bfind" {
        let amount = m.take("shiftamt");
        let run: Map = match (sized(m, s)?, amount) {
            (Ty::U32, false) => map!(w = w; every |x| if x == 0 { !0 } else { 31 - x.leading_zeros() }),
            (Ty::U32, true) => map!(w = w; every |x| if x == 0 { !0 } else { x.leading_zeros() }),
            (Ty::S32, false) => {
                map!(w = w; every |x| { let x = if (x as i32) < 0 { !x } else { x }; if x == 0 { !0 } else { 31 - x.leading_zeros() } })
            }
            (Ty::U64, false) => {
                let run: Map = map!(w = d; every |x| if x == 0 { !0 } else { 63 - x.leading_zeros() });
                return s.map(b, run, Ty::U32, &[Ty::U64]);
            }
            _ => return s.unknown(),
        };
        return s.map(b, run, Ty::U32, &[Ty::U32]);
    }
    if base == "lop3" {
        if m.ty() != Some(Ty::B32) {
            return s.unknown();
        }
        return lop3(b, s);
    }
    let Some(ty) = m.ty() else { return s.unknown() };
    let run: Map = match (base, ty) {
        ("rem", _) if ty.signed() && ty.bits() >= 16 => {
            let run = signed!(ty; chosen |x, y| if y == 0 { x } else { x.wrapping_rem(y) });
            return s.map(b, run, ty, &[ty, ty]);
        }
        ("rem", _) if ty.unsigned() && ty.bits() >= 16 => {
            return s.map(b, unsigned!(ty; |x, y| x.checked_rem(y).unwrap_or(x)), ty, &[ty, ty]);
        }
        ("shl", Ty::B16) => shift!(w; |x, n| if n < 16 { x << n & 0xffff } else { 0 }),
        ("shl", Ty::B32) => shift!(w; |x, n| if n < 32 { x << (n & 31) } else { 0 }),
        ("shl", Ty::B64) => shift!(d; |x, n| if n < 64 { x << (n & 63) } else { 0 }),
        ("shr", Ty::B16 | Ty::U16) => shift!(w; |x, n| if n < 16 { x >> n } else { 0 }),
        ("shr", Ty::B32 | Ty::U32) => shift!(w; |x, n| if n < 32 { x >> (n & 31) } else { 0 }),
        ("shr", Ty::B64 | Ty::U64) => shift!(d; |x, n| if n < 64 { x >> (n & 63) } else { 0 }),
        ("shr", Ty::S16) => shift!(w; |x, n| (i32::from(x as i16) >> n.min(15)) as u32 & 0xffff),
        ("shr", Ty::S32) => shift!(w; |x, n| (x as i32 >> n.min(31)) as u32),
        ("shr", Ty::S64) => shift!(d; |x, n| (x as i64 >> n.min(63)) as u64),
        ("cnot", Ty::B32) => return s.map(b, map!(w = w; every |x| u32::from(x == 0)), ty, &[ty]),
        ("popc", Ty::B32) => return s.map(b, map!(w = w; every |x| x.count_ones()), Ty::U32, &[ty]),
        ("popc", Ty::B64) => return s.map(b, map!(w = d; every |x| x.count_ones()), Ty::U32, &[ty]),
        ("clz", Ty::B32) => return s.map(b, map!(w = w; every |x| x.leading_zeros()), Ty::U32, &[ty]),
        ("clz", Ty::B64) => return s.map(b, map!(w = d; every |x| x.leading_zeros()), Ty::U32, &[ty]),
        ("brev", Ty::B32) => return s.map(b, map!(w = w; every |x| x.reverse_bits()), ty, &[ty]),
        ("brev", Ty::B64) => return s.map(b, map!(d = d; every |x| x.reverse_bits()), ty, &[ty]),
        ("bfe", _) => return bfe(b, s, ty),
        ("bfi", Ty::B32 | Ty::B64) => return bfi(b, s, ty),
        ("prmt", Ty::B32) => {
            let run = map!(w = w, w, w; every |x, y, z| prmt(x, y, z));
            return s.map(b, run, ty, &[ty, ty, ty]);
        }
        _ => return s.unknown(),
    };
    s.map(b, run, ty, &[ty, Ty::U32])
}

fn logic(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let Some(ty) = m.ty() else { return s.unknown() };
    if ty == Ty::Pred {
        let Some(d) = s.pred(s.operand(0)?)? else { return s.unknown() };
        if base == "not" {
            s.count(2)?;
            let a = s.cond(1)?;
            let not = Cond { pred: a.pred, negated: !a.negated };
            return Ok(Op::Logic { kind: Logic::And, d, a: not, b: not });
        }
        s.count(3)?;
        let kind = match base {
            "and" => Logic::And,
            "or" => Logic::Or,
            _ => Logic::Xor,
        };
        return Ok(Op::Logic { kind, d, a: s.cond(1)?, b: s.cond(2)? });
    }
    if !ty.untyped() || ty.bits() < 16 {
        return s.unknown();
    }
    let wide = ty.bits() == 64;
    let run: Map = match (base, wide) {
        ("and", false) => map!(w = w, w; every |x, y| x & y),
        ("and", true) => map!(d = d, d; every |x, y| x & y),
        ("or", false) => map!(w = w, w; every |x, y| x | y),
        ("or", true) => map!(d = d, d; every |x, y| x | y),
        ("xor", false) => map!(w = w, w; every |x, y| x ^ y),
        ("xor", true) => map!(d = d, d; every |x, y| x ^ y),
        _ => return s.map(b, unsigned!(ty; |x| !x), ty, &[ty]),
    };
    s.map(b, run, ty, &[ty, ty])
}

/// `shf.{l,r}.{wrap,clamp}.b32 d, low, high, n`.
fn funnel(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let (left, wrap) =
        (m.one_of(&[("l", true), ("r", false)]), m.one_of(&[("wrap", true), ("clamp", false)]));
    if m.ty() != Some(Ty::B32) {
        return s.unknown();
    }
    fn both(low: u32, high: u32) -> u64 {
        u64::from(high) << 32 | u64::from(low)
    }
    let run: Map = match (left, wrap) {
        (Some(true), Some(true)) => map!(w = w, w, w; every |x, y, n| (both(x, y) << (n & 31) >> 32) as u32),
        (Some(true), Some(false)) => {
            map!(w = w, w, w; every |x, y, n| (both(x, y) << n.min(32) >> 32) as u32)
        }
        (Some(false), Some(true)) => map!(w = w, w, w; every |x, y, n| (both(x, y) >> (n & 31)) as u32),
        (Some(false), Some(false)) => map!(w = w, w, w; every |x, y, n| (both(x, y) >> n.min(32)) as u32),
        _ => return s.unknown(),
    };
    s.map(b, run, Ty::B32, &[Ty::B32, Ty::B32, Ty::U32])
}

/// Bytes chosen from eight by the selector's nibbles; a nibble's top bit replicates the byte's sign.
fn prmt(x: u32, y: u32, selector: u32) -> u32 {
    let bytes = u64::from(y) << 32 | u64::from(x);
    (0..4).fold(0, |out, i| {
        let nibble = selector >> (4 * i) & 0xf;
        let byte = (bytes >> (8 * (nibble & 7))) as u32 & 0xff;
        let byte = if nibble & 8 == 0 { byte } else { (byte >> 7) * 0xff };
        out | byte << (8 * i)
    })
}

/// `lop3.b32 d, a, b, c, table`: as a composition, since maps take three sources.
fn lop3(b: &mut Builder, s: &Statement<'_>) -> Result<Op> {
    s.count(5)?;
    let Operand::Integer(table) = s.operand(4)? else { return s.error("the table should be an integer") };
    if *table > 255 {
        return s.error("the table should be 0 to 255");
    }
    let ty = Ty::B32;
    let d = s.target(0, ty)?;
    let (x, y, z) = (s.source(b, 1, ty)?, s.source(b, 2, ty)?, s.source(b, 3, ty)?);
    Ok(Op::Lop3 { d, s: [x, y, z], table: *table as u8 })
}

/// `bfe`: bits `from … from + length`, sign-extended for signed types.
fn bfe(b: &mut Builder, s: &Statement<'_>, ty: Ty) -> Result<Op> {
    fn extract(x: u64, from: u32, length: u32, bits: u32, signed: bool) -> u64 {
        let (from, length) = (from & 0xff, length & 0xff);
        if length == 0 {
            return 0;
        }
        let all = u64::MAX >> (64 - bits);
        let negative = signed && x >> (from.saturating_add(length - 1)).min(bits - 1) & 1 == 1;
        let field = if from < bits { (x & all) >> from } else { 0 };
        // Bits beyond the value's end repeat its sign.
        let have = length.min(bits.saturating_sub(from));
        let kept = if have == 0 { 0 } else { field & (u64::MAX >> (64 - have)) };
        let fill = if have >= 64 { 0 } else { u64::MAX << have };
        (if negative { kept | fill } else { kept }) & all
    }
    let run: Map = match ty {
        Ty::U32 => map!(w = w, w, w; every |x, f, n| extract(u64::from(x), f, n, 32, false) as u32),
        Ty::S32 => map!(w = w, w, w; every |x, f, n| extract(u64::from(x), f, n, 32, true) as u32),
        Ty::U64 => map!(d = d, w, w; every |x, f, n| extract(x, f, n, 64, false)),
        Ty::S64 => map!(d = d, w, w; every |x, f, n| extract(x, f, n, 64, true)),
        _ => return s.unknown(),
    };
    s.map(b, run, ty, &[ty, Ty::U32, Ty::U32])
}

/// `bfi d, a, b, from, length`: the low bits of `a` put into `b`.
fn bfi(b: &mut Builder, s: &Statement<'_>, ty: Ty) -> Result<Op> {
    s.count(5)?;
    let d = s.target(0, ty)?;
    let (x, y) = (s.source(b, 1, ty)?, s.source(b, 2, ty)?);
    let (from, length) = (s.source(b, 3, Ty::U32)?, s.source(b, 4, Ty::U32)?);
    // The field's mask first, then the merge.
    let mask = b.temporary(ty);
    let shifted = b.temporary(ty);
    fn field(from: u32, length: u32, bits: u32) -> u64 {
        let (from, length) = (from & 0xff, length & 0xff);
        let ones = if length == 0 { 0 } else { u64::MAX >> (64 - length.min(64)) };
        let all = u64::MAX >> (64 - bits);
        if from < bits { ones << from & all } else { 0 }
    }
    let (make, shift, merge): (Map, Map, Map) = if ty == Ty::B32 {
        (
            map!(w = w, w; every |f, n| field(f, n, 32) as u32),
            map!(w = w, w; every |x, f| x.checked_shl(f & 0xff).unwrap_or(0)),
            map!(w = w, w, w; every |x, y, k| x & k | y & !k),
        )
    } else {
        (
            map!(d = w, w; every |f, n| field(f, n, 64)),
            map!(d = d, w; every |x, f| x.checked_shl(f & 0xff).unwrap_or(0)),
            map!(d = d, d, d; every |x, y, k| x & k | y & !k),
        )
    };
    let unused: Reg = from;
    b.push(s, Op::Map { run: make, d: mask, s: [from, length, unused], n: 2 });
    b.push(s, Op::Map { run: shift, d: shifted, s: [x, from, unused], n: 2 });
    Ok(Op::Map { run: merge, d, s: [shifted, y, mask], n: 3 })
}
