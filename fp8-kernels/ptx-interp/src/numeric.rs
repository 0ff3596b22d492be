//! Float arithmetic with every rounding mode, and conversions between formats, from exact integer and f64 operations.
//!
//! A sum or fused product of f32 is computed in f64 *rounded to odd*: inexact results get an odd last bit. Rounding that to
//! 24 bits or fewer gives what one rounding of the exact value gives, in every mode, because 53 ≥ 24 + 2.
//! NaN results are the device's canonical ones: 0x7FFFFFFF in f32, 0x7FFF in f16 and bf16. PTX says of FP8 codes only that NaN
//! stays NaN, so there it is another code than the 0x7F that kernels have to write.

/// The device's NaN.
pub(crate) const NAN32: u32 = 0x7fff_ffff;

/// A rounding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// To nearest, ties to even.
    Nearest,
    /// Toward zero.
    Zero,
    /// Toward minus infinity.
    Down,
    /// Toward plus infinity.
    Up,
}

/// An f32's bits, NaN made canonical.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> u32 {
    if x.is_nan() { NAN32 } else { x.to_bits() }
}

/// Subnormals become zero of their sign.
#[inline(always)]
pub(crate) fn flush(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits }
}

/// `p + c` rounded to odd.
#[inline(always)]
fn add_odd(p: f64, c: f64) -> f64 {
    let s = p + c;
    let back = s - p;
    let error = (p - (s - back)) + (c - back);
    let bits = s.to_bits();
    // Inexact and even: the neighbour on the error's side is odd.
    let outward = (error > 0.0) == (s > 0.0);
    let step = if outward { 1 } else { u64::MAX };
    let inexact = error != 0.0 && !error.is_nan() && bits & 1 == 0;
    f64::from_bits(if inexact { bits.wrapping_add(step) } else { bits })
}

/// `a · b + c`, one rounding to nearest.
#[inline(always)]
pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
    add_odd(f64::from(a) * f64::from(b), f64::from(c)) as f32
}

/// `a · b + c`, one rounding.
pub(crate) fn fma_rounded(a: f32, b: f32, c: f32, round: Round) -> u32 {
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let s = add_odd(p, c);
    if s == 0.0 && round == Round::Down && p.is_sign_negative() != c.is_sign_negative() {
        return 0x8000_0000; // an exact cancellation
    }
    to_f32(s, round)
}

/// `a · b`, one rounding. The product of two f32 is exact in f64.
pub(crate) fn mul_rounded(a: f32, b: f32, round: Round) -> u32 {
    to_f32(f64::from(a) * f64::from(b), round)
}

/// A binary format of at most 32 bits with infinities and NaN like IEEE 754.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    exponent: u32,
    mantissa: u32,
}

/// binary32.
pub(crate) const F32: Format = Format { exponent: 8, mantissa: 23 };
/// binary16.
pub(crate) const F16: Format = Format { exponent: 5, mantissa: 10 };
/// bfloat16.
pub(crate) const BF16: Format = Format { exponent: 8, mantissa: 7 };

/// `x` in f32.
pub(crate) fn to_f32(x: f64, round: Round) -> u32 {
    if round == Round::Nearest { canonical(x as f32) } else { narrow(x, F32, round) }
}

/// `x` in a narrower format, one rounding; overflow follows the mode; NaN is canonical.
pub(crate) fn narrow(x: f64, format: Format, round: Round) -> u32 {
    let Format { exponent, mantissa } = format;
    let negative = x.is_sign_negative();
    let sign = u32::from(negative) << (exponent + mantissa);
    let infinity = ((1u32 << exponent) - 1) << mantissa;
    if x.is_nan() {
        return (1 << (exponent + mantissa)) - 1;
    }
    if x.is_infinite() {
        return sign | infinity;
    }
    if x == 0.0 {
        return sign;
    }
    let bias = (1 << (exponent - 1)) - 1;
    let bits = x.abs().to_bits();
    // f64 subnormals are far below every format here; a value with the smallest exponent stands for them.
    let e = ((bits >> 52) as i32 - 1023).max(1 - bias - 60);
    let m = bits & ((1 << 52) - 1) | 1 << 52;
    let e_stored = e.max(1 - bias);
    // Bits of m below the target's last place.
    let drop = (52 - mantissa as i32 + (e_stored - e)).min(63) as u32;
    let kept = m >> drop;
    let rest = m & ((1u64 << drop) - 1);
    let half = 1u64 << (drop - 1);
    let up = match round {
        Round::Nearest => rest > half || rest == half && kept & 1 == 1,
        Round::Zero => false,
        Round::Down => negative && rest != 0,
        Round::Up => !negative && rest != 0,
    };
    let kept = kept as u32 + u32::from(up);
    // A kept value with its leading one carries into the exponent field by addition.
    let magnitude = u64::from(kept) + (((e_stored + bias - 1) as u64) << mantissa);
    if magnitude < u64::from(infinity) {
        return sign | magnitude as u32;
    }
    let saturates = match round {
        Round::Nearest => false,
        Round::Zero => true,
        Round::Down => !negative,
        Round::Up => negative,
    };
    sign | if saturates { infinity - 1 } else { infinity }
}

/// A format's value.
pub(crate) fn widen(bits: u32, format: Format) -> f64 {
    let Format { exponent, mantissa } = format;
    let sign = if bits >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    let e = bits >> mantissa & ((1 << exponent) - 1);
    let m = f64::from(bits & ((1 << mantissa) - 1));
    let bias = (1 << (exponent - 1)) - 1;
    let ulp = |e: i32| f64::from_bits(((e - mantissa as i32 + 1023) as u64) << 52);
    if e == (1 << exponent) - 1 {
        return if m == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if e == 0 {
        return sign * m * ulp(1 - bias);
    }
    sign * (m + f64::from(1u32 << mantissa)) * ulp(e as i32 - bias)
}

/// `a · b + c` in f16 or bf16.
pub(crate) fn fma_narrow(a: u32, b: u32, c: u32, format: Format) -> u32 {
    let p = widen(a, format) * widen(b, format);
    narrow(add_odd(p, widen(c, format)), format, Round::Nearest)
}

/// E4M3 (`mantissa` 3) or E5M2 (2), saturating, ties to even; NaN is 0xFF or 0xFE.
#[inline(always)]
pub(crate) fn to_fp8(x: f32, mantissa: u32) -> u32 {
    let e4m3 = mantissa == 3;
    // The exponent's bias, the code of the largest value, and a number whose last place is the smallest subnormal.
    let (bias, max, magic) = if e4m3 { (7, 0x7e, 16384.0f32) } else { (15, 0x7b, 128.0) };
    let bits = x.to_bits() & 0x7fff_ffff;
    let drop = 23 - mantissa;
    // A carry out of the mantissa raises the exponent, as it should.
    let rounded = (bits + ((1 << (drop - 1)) - 1) + (bits >> drop & 1)) >> drop;
    let normal = rounded.wrapping_sub((127 - bias) << mantissa).min(max);
    let subnormal = (f32::from_bits(bits) + magic).to_bits().wrapping_sub(magic.to_bits());
    let code = if bits < (128 - bias) << 23 { subnormal } else { normal };
    let nan = if e4m3 { 0xff } else { 0xfe };
    if x.is_nan() { nan } else { x.to_bits() >> 24 & 0x80 | code }
}

/// E2M1, saturating, ties to even; NaN is 7, whatever its sign.
#[inline(always)]
pub(crate) fn to_e2m1(x: f32) -> u32 {
    let v = x.abs();
    // A code for each midpoint between two values that is passed; a tie passes it where the upper code is even.
    let passed = [v > 0.25, v >= 0.75, v > 1.25, v >= 1.75, v > 2.5, v >= 3.5, v > 5.0];
    let magnitude = passed.iter().map(|&is_passed| u32::from(is_passed)).sum::<u32>();
    if x.is_nan() { 7 } else { x.to_bits() >> 28 & 8 | magnitude }
}

/// bf16, ties to even; NaN is canonical.
#[inline(always)]
pub(crate) fn to_bf16(x: u32) -> u32 {
    if f32::from_bits(x).is_nan() { 0x7fff } else { (x + 0x7fff + (x >> 16 & 1)) >> 16 }
}

/// The value of an E4M3 or E5M2 code.
pub(crate) fn from_fp8(code: u32, mantissa: u32) -> f64 {
    let format = Format { exponent: 7 - mantissa, mantissa };
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let magnitude = code & 0x7f;
    if mantissa == 3 && magnitude >= 0x78 {
        // The binade IEEE keeps for infinities; only its last code is NaN.
        return if magnitude == 0x7f { f64::NAN } else { sign * 2.0 * widen(magnitude - 8, format) };
    }
    widen(code, format)
}
