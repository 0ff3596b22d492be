//! The codec written two other ways, as the judge of the fast one.
//!
//! [`encode`] is pure integers: a significand and an exponent, a shift, the remainder against one half, a tie by the
//! low bit. [`encode_by_search`] looks the value up among the decoded codes and compares with the middle between two
//! neighbours. [`decode`] multiplies a mantissa by a power of two. None of it shares a line with `src`.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod blocks;
pub(crate) mod matrices;

/// Parameters of a format, and what an overflow becomes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) mantissa: i32,
    pub(crate) bias: i32,
    pub(crate) max: u64,
    pub(crate) overflow: u64,
}

pub(crate) const E4M3: Spec = Spec { name: "E4M3", mantissa: 3, bias: 7, max: 0x7E, overflow: 0x7F };
pub(crate) const E5M2: Spec = Spec { name: "E5M2", mantissa: 2, bias: 15, max: 0x7B, overflow: 0x7C };

/// A source value taken apart: NaN, or `(-1)^negative · significand · 2^exponent`; infinity has a huge exponent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    nan: bool,
    negative: bool,
    significand: u64,
    exponent: i32,
}

/// Takes apart any IEEE-like format of `exponent_bits` and `mantissa_bits`.
#[inline(always)]
fn parts(bits: u64, exponent_bits: u32, mantissa_bits: u32) -> Parts {
    let negative = bits >> (exponent_bits + mantissa_bits) & 1 == 1;
    let field = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let fraction = bits & ((1 << mantissa_bits) - 1);
    let bias = (1_i32 << (exponent_bits - 1)) - 1;
    if field == (1 << exponent_bits) - 1 {
        return Parts { nan: fraction != 0, negative, significand: 1, exponent: 100_000 };
    }
    let (significand, field) =
        if field == 0 { (fraction, 1) } else { (fraction | 1 << mantissa_bits, field as i32) };
    Parts { nan: false, negative, significand, exponent: field - bias - mantissa_bits as i32 }
}

#[inline(always)]
pub(crate) fn parts_f32(bits: u32) -> Parts {
    parts(bits.into(), 8, 23)
}

pub(crate) fn parts_f64(bits: u64) -> Parts {
    parts(bits, 11, 52)
}

pub(crate) fn parts_f16(bits: u16) -> Parts {
    parts(bits.into(), 5, 10)
}

pub(crate) fn parts_bf16(bits: u16) -> Parts {
    parts(bits.into(), 8, 7)
}

/// The code of a value, in integers.
#[inline(always)]
pub(crate) fn encode(spec: Spec, x: Parts, saturating: bool) -> u8 {
    if x.nan {
        return 0x7F;
    }
    let sign = if x.negative { 0x80 } else { 0 };
    let beyond = if saturating { spec.max } else { spec.overflow };
    if x.significand == 0 {
        return sign;
    }
    let log2 = 63 - x.significand.leading_zeros() as i32 + x.exponent;
    let lowest_ulp = 1 - spec.bias - spec.mantissa;
    let ulp = (log2 - spec.mantissa).max(lowest_ulp);
    if ulp - lowest_ulp > 40 {
        return sign | beyond as u8;
    }
    let cut = ulp - x.exponent;
    let steps = if cut <= 0 {
        x.significand << -cut
    } else if cut > 60 {
        0 // far below half an ulp, for significands below 2^53
    } else {
        let (whole, rest, half) = (x.significand >> cut, x.significand & ((1 << cut) - 1), 1 << (cut - 1));
        whole + u64::from(rest > half || rest == half && whole % 2 == 1)
    };
    let code = (((ulp - lowest_ulp) as u64) << spec.mantissa) + steps;
    sign | if code > spec.max { beyond as u8 } else { code as u8 }
}

/// The value of a code; a NaN code gives `f64::NAN`.
pub(crate) fn decode(spec: Spec, code: u8) -> f64 {
    let magnitude = i32::from(code & 0x7F);
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (field, fraction) = (magnitude >> spec.mantissa, magnitude & ((1 << spec.mantissa) - 1));
    if magnitude as u64 > spec.max {
        let infinite = spec.name == "E5M2" && magnitude == 0x7C;
        return if infinite { sign * f64::INFINITY } else { f64::NAN };
    }
    let significand = if field == 0 { fraction } else { fraction + (1 << spec.mantissa) };
    sign * f64::from(significand) * 2_f64.powi(field.max(1) - spec.bias - spec.mantissa)
}

/// The code of a value, by search: the only arithmetic is the exact middle between two neighbours.
pub(crate) fn encode_by_search(spec: Spec, x: f64, saturating: bool) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let a = x.abs();
    let value = |code: u64| if code <= spec.max { decode(spec, code as u8) } else { next_beyond(spec) };
    let below = (0..=spec.max).rev().find(|code| value(*code) <= a).unwrap_or(0);
    let middle = (value(below) + value(below + 1)) / 2.0;
    let up = a > middle || a == middle && below % 2 == 1;
    let code = below + u64::from(up);
    let beyond = if saturating { spec.max } else { spec.overflow };
    sign | if code > spec.max { beyond as u8 } else { code as u8 }
}

/// The value that would follow the largest one if the exponent had no end.
fn next_beyond(spec: Spec) -> f64 {
    2.0 * decode(spec, spec.max as u8) - decode(spec, spec.max as u8 - 1)
}

/// Stochastic rounding, in f64: `|x|` in ulps is exact there, for f32 input.
pub(crate) fn encode_stochastic(spec: Spec, x: f32, r: u32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let a = f64::from(x).abs().min(decode(spec, spec.max as u8));
    let below = (0..=spec.max).rev().find(|code| decode(spec, *code as u8) <= a).unwrap_or(0);
    if below == spec.max {
        return sign | below as u8;
    }
    let (low, high) = (decode(spec, below as u8), decode(spec, below as u8 + 1));
    let fraction = ((a - low) / (high - low) * 4_294_967_296.0).floor() as u64;
    sign | (below + u64::from(fraction + u64::from(r) >= 1 << 32)) as u8
}
