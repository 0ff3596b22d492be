//! Arithmetic of f16 and bf16, alone and in pairs. Each half is computed exactly and rounded once.

use super::operands::{Mods, Result};
use crate::builder::{Builder, Statement};
use crate::ir::{Op, Ty};
use crate::lanes::{Map, map};
use crate::numeric::{BF16, F16, Format, Round, fma_narrow, narrow, widen};

fn fused(a: u32, b: u32, c: u32, format: Format) -> u32 {
    fma_narrow(a & 0xffff, b & 0xffff, c & 0xffff, format)
}

fn one(format: Format) -> u32 {
    narrow(1.0, format, Round::Nearest)
}

fn add(a: u32, b: u32, format: Format) -> u32 {
    fused(a, one(format), b, format)
}

fn sub(a: u32, b: u32, format: Format) -> u32 {
    fused(a, one(format), b ^ 0x8000, format)
}

fn mul(a: u32, b: u32, format: Format) -> u32 {
    // Two halves' product is exact in f64.
    narrow(widen(a & 0xffff, format) * widen(b & 0xffff, format), format, Round::Nearest)
}

fn pick(a: u32, b: u32, format: Format, larger: bool, keep_nan: bool) -> u32 {
    let (x, y) = (widen(a & 0xffff, format), widen(b & 0xffff, format));
    if x.is_nan() && (keep_nan || y.is_nan()) || keep_nan && y.is_nan() {
        return 0x7fff;
    }
    let first = if x.is_nan() {
        false
    } else if y.is_nan() {
        true
    } else if x == y {
        x.is_sign_negative() != larger
    } else {
        (x > y) == larger
    };
    (if first { a } else { b }) & 0xffff
}

/// Applies a function to both halves of a pair.
macro_rules! both {
    ($pair:expr, |$($x:ident),+| $body:expr) => {
        if $pair {
            both!(@m |$($x),+| { let low = { $body } & 0xffff; $(let $x = $x >> 16;)+ low | ({ $body } & 0xffff) << 16 })
        } else {
            both!(@m |$($x),+| $body)
        }
    };
    (@m |$x:ident| $body:expr) => { map!(w = w; chosen |$x| $body) };
    (@m |$x:ident, $y:ident| $body:expr) => { map!(w = w, w; chosen |$x, $y| $body) };
    (@m |$x:ident, $y:ident, $z:ident| $body:expr) => { map!(w = w, w, w; chosen |$x, $y, $z| $body) };
}

/// `add sub mul fma min max neg abs`.
pub(super) fn arithmetic(b: &mut Builder, base: &str, m: &mut Mods<'_>, s: &Statement<'_>) -> Result<Op> {
    let rounded = m.take("rn");
    let nan = matches!(base, "min" | "max") && m.take("NaN");
    let Some(ty) = m.ty() else { return s.unknown() };
    let (pair, half) = match ty {
        Ty::F16 => (false, true),
        Ty::F16x2 => (true, true),
        Ty::BF16 => (false, false),
        Ty::BF16x2 => (true, false),
        _ => return s.unknown(),
    };
    if rounded && !matches!(base, "add" | "sub" | "mul" | "fma") || !rounded && base == "fma" {
        return s.unknown();
    }
    let run: Map = match (base, half) {
        ("add", true) => both!(pair, |x, y| add(x, y, F16)),
        ("add", false) => both!(pair, |x, y| add(x, y, BF16)),
        ("sub", true) => both!(pair, |x, y| sub(x, y, F16)),
        ("sub", false) => both!(pair, |x, y| sub(x, y, BF16)),
        ("mul", true) => both!(pair, |x, y| mul(x, y, F16)),
        ("mul", false) => both!(pair, |x, y| mul(x, y, BF16)),
        ("max", true) if nan => both!(pair, |x, y| pick(x, y, F16, true, true)),
        ("max", true) => both!(pair, |x, y| pick(x, y, F16, true, false)),
        ("max", false) if nan => both!(pair, |x, y| pick(x, y, BF16, true, true)),
        ("max", false) => both!(pair, |x, y| pick(x, y, BF16, true, false)),
        ("min", true) if nan => both!(pair, |x, y| pick(x, y, F16, false, true)),
        ("min", true) => both!(pair, |x, y| pick(x, y, F16, false, false)),
        ("min", false) if nan => both!(pair, |x, y| pick(x, y, BF16, false, true)),
        ("min", false) => both!(pair, |x, y| pick(x, y, BF16, false, false)),
        ("fma", true) => return s.map(b, both!(pair, |x, y, z| fused(x, y, z, F16)), ty, &[ty; 3]),
        ("fma", false) => return s.map(b, both!(pair, |x, y, z| fused(x, y, z, BF16)), ty, &[ty; 3]),
        ("neg", _) => return s.map(b, both!(pair, |x| (x ^ 0x8000) & 0xffff), ty, &[ty]),
        ("abs", _) => return s.map(b, both!(pair, |x| x & 0x7fff), ty, &[ty]),
        _ => return s.unknown(),
    };
    s.map(b, run, ty, &[ty; 2])
}
