//! f32 and f64 arithmetic and functions.
//!
//! Exact operations round once, as IEEE 754 says. Approximate ones are computed in f64 and rounded to f32: near what a
//! device gives, not equal to it. The approximate reciprocal is moved by up to an ulp, the error that PTX documents, so that
//! no kernel's result can depend on it unnoticed. `.ftz` flushes subnormal inputs and results to zero of their sign.

use super::operands::{Mods, Result};
use crate::builder::{Builder, Statement};
use crate::ir::{Op, Ty};
use crate::lanes::{Map, map};
use crate::numeric::{Round, canonical, flush, fma, fma_rounded, mul_rounded, to_f32};

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// An f64 result, NaN made canonical.
fn wide(x: f64) -> u64 {
    if x.is_nan() { 0x7fff_ffff_ffff_ffff } else { x.to_bits() }
}

/// The four maps of an f32 operation: plain, `.ftz`, `.sat`, `.ftz.sat`.
macro_rules! variants {
    ($ftz:expr, $sat:expr; $how:ident |$($x:ident),+| $body:expr) => {
        match ($ftz, $sat) {
            (false, false) => variants!(@m $how |$($x),+| { $(let $x = f($x);)+ $body }),
            (true, false) => variants!(@m $how |$($x),+| flush({ $(let $x = f(flush($x));)+ $body })),
            (false, true) => variants!(@m $how |$($x),+| saturate({ $(let $x = f($x);)+ $body })),
            (true, true) => variants!(@m $how |$($x),+| saturate(flush({ $(let $x = f(flush($x));)+ $body }))),
        }
    };
    (@m $how:ident |$x:ident| $body:expr) => { map!(w = w; $how |$x| $body) };
    (@m $how:ident |$x:ident, $y:ident| $body:expr) => { map!(w = w, w; $how |$x, $y| $body) };
    (@m $how:ident |$x:ident, $y:ident, $z:ident| $body:expr) => { map!(w = w, w, w; $how |$x, $y, $z| $body) };
}

/// Into [0, 1]; NaN becomes +0.
pub(super) fn saturate(bits: u32) -> u32 {
    let x = f(bits);
    if x > 0.0 { x.min(1.0).to_bits() } else { 0 }
}

/// `max` that drops NaN and takes +0 for the larger zero.
fn max(x: f32, y: f32) -> u32 {
    if x.is_nan() {
        canonical(y)
    } else if y.is_nan() || x > y || (x == y && !x.is_sign_negative()) {
        x.to_bits()
    } else {
        y.to_bits()
    }
}

fn min(x: f32, y: f32) -> u32 {
    if x.is_nan() {
        canonical(y)
    } else if y.is_nan() || x < y || (x == y && x.is_sign_negative()) {
        x.to_bits()
    } else {
        y.to_bits()
    }
}

/// `add sub mul fma mad div min max neg abs` of f32 and f64.
pub(super) fn arithmetic(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let approx = base == "div" && (m.take("approx") || m.take("full"));
    let round = if approx { None } else { m.round() };
    let ftz = m.take("ftz");
    let nan = matches!(base, "min" | "max") && m.take("NaN");
    let sat = matches!(base, "add" | "sub" | "mul" | "fma" | "mad") && m.take("sat");
    let ty = m.ty();
    if ty == Some(Ty::F64) {
        return double(b, base, s, round, ftz || sat || approx || nan);
    }
    if ty != Some(Ty::F32) {
        return s.unknown();
    }
    let nearest = matches!(round, None | Some(Round::Nearest));
    let run: Map = match (base, round) {
        ("add", _) if nearest => variants!(ftz, sat; every |x, y| canonical(x + y)),
        ("sub", _) if nearest => variants!(ftz, sat; every |x, y| canonical(x - y)),
        ("mul", _) if nearest => variants!(ftz, sat; every |x, y| canonical(x * y)),
        ("add", Some(Round::Zero)) => variants!(ftz, sat; chosen |x, y| fma_rounded(x, 1.0, y, Round::Zero)),
        ("add", Some(Round::Down)) => variants!(ftz, sat; chosen |x, y| fma_rounded(x, 1.0, y, Round::Down)),
        ("add", Some(Round::Up)) => variants!(ftz, sat; chosen |x, y| fma_rounded(x, 1.0, y, Round::Up)),
        ("sub", Some(Round::Zero)) => variants!(ftz, sat; chosen |x, y| fma_rounded(x, 1.0, -y, Round::Zero)),
        ("sub", Some(Round::Down)) => variants!(ftz, sat; chosen |x, y| fma_rounded(x, 1.0, -y, Round::Down)),
        ("sub", Some(Round::Up)) => variants!(ftz, sat; chosen |x, y| fma_rounded(x, 1.0, -y, Round::Up)),
        ("mul", Some(Round::Zero)) => variants!(ftz, sat; chosen |x, y| mul_rounded(x, y, Round::Zero)),
        ("mul", Some(Round::Down)) => variants!(ftz, sat; chosen |x, y| mul_rounded(x, y, Round::Down)),
        ("mul", Some(Round::Up)) => variants!(ftz, sat; chosen |x, y| mul_rounded(x, y, Round::Up)),
        ("fma" | "mad", Some(round)) => {
            let run: Map = match round {
                Round::Nearest => variants!(ftz, sat; every |x, y, z| canonical(fma(x, y, z))),
                Round::Zero => variants!(ftz, sat; chosen |x, y, z| fma_rounded(x, y, z, Round::Zero)),
                Round::Down => variants!(ftz, sat; chosen |x, y, z| fma_rounded(x, y, z, Round::Down)),
                Round::Up => variants!(ftz, sat; chosen |x, y, z| fma_rounded(x, y, z, Round::Up)),
            };
            return s.map(b, run, Ty::F32, &[Ty::F32; 3]);
        }
        ("div", None) if approx => {
            variants!(ftz, false; chosen |x, y| to_f32(f64::from(x) / f64::from(y), Round::Nearest))
        }
        ("div", Some(Round::Nearest)) => variants!(ftz, false; every |x, y| canonical(x / y)),
        ("max", None) if !nan => variants!(ftz, false; every |x, y| max(x, y)),
        ("min", None) if !nan => variants!(ftz, false; every |x, y| min(x, y)),
        ("max", None) => {
            variants!(ftz, false; every |x, y| if x.is_nan() { canonical(x) } else if y.is_nan() { canonical(y) } else { max(x, y) })
        }
        ("min", None) => {
            variants!(ftz, false; every |x, y| if x.is_nan() { canonical(x) } else if y.is_nan() { canonical(y) } else { min(x, y) })
        }
        ("neg", None) => {
            return s.map(b, variants!(ftz, false; every |x| x.to_bits() ^ 0x8000_0000), Ty::F32, &[Ty::F32]);
        }
        ("abs", None) => {
            return s.map(b, variants!(ftz, false; every |x| x.to_bits() & 0x7fff_ffff), Ty::F32, &[Ty::F32]);
        }
        _ => return s.unknown(),
    };
    s.map(b, run, Ty::F32, &[Ty::F32; 2])
}

/// f64, rounding to nearest only: host-sized mistakes run instead of being refused.
fn double(b: &mut Builder, base: &str, s: &Statement<'_>, round: Option<Round>, other: bool) -> Result<Op> {
    if other || !matches!(round, None | Some(Round::Nearest)) {
        return s.unknown();
    }
    let run: Map = match (base, round) {
        ("add", _) => map!(d = d, d; every |x, y| wide(d(x) + d(y))),
        ("sub", _) => map!(d = d, d; every |x, y| wide(d(x) - d(y))),
        ("mul", _) => map!(d = d, d; every |x, y| wide(d(x) * d(y))),
        ("div", Some(_)) => map!(d = d, d; every |x, y| wide(d(x) / d(y))),
        ("max", None) => map!(d = d, d; every |x, y| wide(d(x).max(d(y)))),
        ("min", None) => map!(d = d, d; every |x, y| wide(d(x).min(d(y)))),
        ("fma" | "mad", Some(_)) => {
            let run = map!(d = d, d, d; chosen |x, y, z| wide(d(x).mul_add(d(y), d(z))));
            return s.map(b, run, Ty::F64, &[Ty::F64; 3]);
        }
        ("neg", None) => return s.map(b, map!(d = d; every |x| x ^ 1 << 63), Ty::F64, &[Ty::F64]),
        ("abs", None) => return s.map(b, map!(d = d; every |x| x & !(1 << 63)), Ty::F64, &[Ty::F64]),
        _ => return s.unknown(),
    };
    s.map(b, run, Ty::F64, &[Ty::F64; 2])
}

/// `rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign testp`.
pub(super) fn function(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    if base == "copysign" {
        return match m.ty() {
            Some(Ty::F32) => {
                let run = map!(w = w, w; every |x, y| x & 0x8000_0000 | y & 0x7fff_ffff);
                s.map(b, run, Ty::F32, &[Ty::F32; 2])
            }
            Some(Ty::F64) => {
                let run = map!(d = d, d; every |x, y| x & 1 << 63 | y & !(1 << 63));
                s.map(b, run, Ty::F64, &[Ty::F64; 2])
            }
            _ => s.unknown(),
        };
    }
    if base == "testp" {
        return testp(b, m, s);
    }
    let approx = m.take("approx");
    let round = if approx { None } else { m.round() };
    let ftz = m.take("ftz");
    let ty = m.ty();
    if ty == Some(Ty::F64) && !ftz && round == Some(Round::Nearest) {
        let run: Map = match base {
            "sqrt" => map!(d = d; every |x| wide(d(x).sqrt())),
            "rcp" => map!(d = d; every |x| wide(1.0 / d(x))),
            _ => return s.unknown(),
        };
        return s.map(b, run, Ty::F64, &[Ty::F64]);
    }
    if ty != Some(Ty::F32) || !approx && round != Some(Round::Nearest) {
        return s.unknown();
    }
    fn near(x: f64) -> u32 {
        to_f32(x, Round::Nearest)
    }
    let run: Map = match (base, approx) {
        ("rcp", false) => variants!(ftz, false; every |x| canonical(1.0 / x)),
        ("sqrt", false) => variants!(ftz, false; every |x| canonical(x.sqrt())),
        ("rcp", true) => variants!(ftz, false; every |x| near_reciprocal(x)),
        ("sqrt", true) => variants!(ftz, false; every |x| canonical(x.sqrt())),
        ("rsqrt", true) => variants!(ftz, false; chosen |x| near(1.0 / f64::from(x).sqrt())),
        ("ex2", true) => variants!(ftz, false; chosen |x| near_power(x)),
        ("lg2", true) => variants!(ftz, false; chosen |x| near(f64::from(x).log2())),
        ("sin", true) => variants!(ftz, false; chosen |x| near(f64::from(x).sin())),
        ("cos", true) => variants!(ftz, false; chosen |x| near(f64::from(x).cos())),
        ("tanh", true) if !ftz => variants!(false, false; chosen |x| near(f64::from(x).tanh())),
        _ => return s.unknown(),
    };
    s.map(b, run, Ty::F32, &[Ty::F32])
}

/// 1 / x, or one of its neighbours. Zeros, infinities and NaN are exact.
#[inline(always)]
fn near_reciprocal(x: f32) -> u32 {
    moved(canonical(1.0 / x), x, 1)
}

/// 2ˣ, or one of the two neighbours on either side. 2⁰, zeros, infinities and NaN are exact.
fn near_power(x: f32) -> u32 {
    let exact = to_f32(f64::from(x).exp2(), Round::Nearest);
    if x == 0.0 { exact } else { moved(exact, x, 2) }
}

/// A result at most so many places from the exact one: how many depends on the bits of x alone. Subnormal numbers, zeros, infinities
/// and NaN stay, and so does the exact result if there is nothing else beside it.
#[inline(always)]
fn moved(exact: u32, x: f32, most: u32) -> u32 {
    let is_normal = |bits: u32| !matches!(bits & 0x7f80_0000, 0 | 0x7f80_0000);
    let mixed = x.to_bits().wrapping_mul(0x9e37_79b9);
    let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b) >> 16;
    let moved = exact.wrapping_add(mixed % (2 * most + 1)).wrapping_sub(most);
    if is_normal(exact) && is_normal(moved) { moved } else { exact }
}

/// `testp`: a class of values, as a predicate by way of a comparison with one.
fn testp(b: &mut Builder, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let class: Option<crate::lanes::Compare> = m
        .one_of(&[
            ("finite", 0),
            ("infinite", 1),
            ("number", 2),
            ("notanumber", 3),
            ("normal", 4),
            ("subnormal", 5),
        ])
        .map(|class| -> crate::lanes::Compare {
            use crate::lanes::compare;
            match class {
                0 => compare!(w; |x, _y| f(x).is_finite()),
                1 => compare!(w; |x, _y| f(x).is_infinite()),
                2 => compare!(w; |x, _y| !f(x).is_nan()),
                3 => compare!(w; |x, _y| f(x).is_nan()),
                4 => compare!(w; |x, _y| f(x).is_normal()),
                _ => compare!(w; |x, _y| f(x).is_subnormal()),
            }
        });
    let (Some(test), Some(Ty::F32)) = (class, m.ty()) else { return s.unknown() };
    s.count(2)?;
    let (p, a) = (s.pred(s.operand(0)?)?, s.source(b, 1, Ty::F32)?);
    Ok(Op::Set { test, a, b: a, p, q: None, with: None })
}
