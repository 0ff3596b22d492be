//! The one codec behind all element types: branch-free, `const`, in `f32` or `f64` arithmetic.
//!
//! Encoding lets a float addition round. With `a = |x|` clamped to the largest value that may come out, and `E` the
//! exponent of a's binade (of the smallest normal for everything below it), the sum `a + 2^(E + drop)` has an ulp
//! equal to the *target's* ulp, so the hardware rounds to nearest, ties to even, at exactly the right bit:
//!
//! ```text
//! code = ((E - Emin) << man) + (bits(a + magic) - bits(magic)),   magic = 2^(E + drop),   drop = 23 - man
//! ```
//!
//! In f32 the code is the last byte of `(t >> drop) + t`, where `t` are the bits of the sum and the magic number has an
//! even offset in its last bits: the first term brings the exponent, the second the rounded mantissa.
//!
//! The carry into the next binade and the step from subnormal to normal need no case of their own. Saturating and
//! non-saturating conversion differ in the clamp only. It relies on the default rounding mode, as Rust does;
//! flushing denormals to zero does no harm, because what it flushes is far below half the smallest subnormal.

/// Parameters of one encoding; always a constant, so that every function below folds to a few instructions.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    /// Stored mantissa bits.
    pub(crate) man: u32,
    /// Exponent bias.
    pub(crate) bias: u32,
    /// Code of the largest finite value: where saturating conversion clamps.
    pub(crate) max: u8,
    /// Code that an overflow becomes: where non-saturating conversion clamps.
    pub(crate) overflow: u8,
    /// Smallest positive code that is NaN.
    pub(crate) first_nan: u8,
}

pub(crate) const E4M3: Format = Format { man: 3, bias: 7, max: 0x7E, overflow: 0x7F, first_nan: 0x7F };
pub(crate) const E5M2: Format = Format { man: 2, bias: 15, max: 0x7B, overflow: 0x7C, first_nan: 0x7D };
/// Its codes have four bits; here their sign is bit 7, and nothing is NaN.
pub(crate) const E2M1: Format = Format { man: 1, bias: 1, max: 0x07, overflow: 0x07, first_nan: 0x80 };

/// The code every NaN input becomes, in all formats: the low bits of E2M1's largest value are among its own.
pub(crate) const NAN: u8 = 0x7F;

pub(crate) const F32_ABS: u32 = 0x7FFF_FFFF;
pub(crate) const F32_EXP: u32 = 0x7F80_0000;
const F64_ABS: u64 = 0x7FFF_FFFF_FFFF_FFFF;
const F64_EXP: u64 = 0x7FF0_0000_0000_0000;

#[expect(clippy::cast_possible_truncation, reason = "callers pass values below 256")]
#[inline(always)]
const fn byte(x: u32) -> u8 {
    x as u8
}

#[expect(clippy::cast_possible_truncation, reason = "callers want exactly the low half")]
#[inline(always)]
pub(crate) const fn low_half(x: u32) -> u16 {
    x as u16
}

#[expect(clippy::cast_possible_truncation, reason = "callers want exactly the low half")]
#[inline(always)]
const fn low_word(x: u64) -> u32 {
    x as u32
}

/// Rounds a 32.32 fixed-point number of ulps up iff its fraction and `r` together reach one.
#[inline(always)]
const fn round_fixed(fixed: u64, r: u32) -> u32 {
    low_word((fixed + r as u64) >> 32)
}

impl Format {
    /// f32 bits of a magnitude code read as if every exponent were an ordinary one; right for normal codes.
    #[inline(always)]
    pub(crate) const fn widen_f32(self, magnitude: u32) -> u32 {
        (magnitude << (23 - self.man)) + ((127 - self.bias) << 23)
    }

    #[inline(always)]
    const fn widen_f64(self, magnitude: u32) -> u64 {
        ((magnitude as u64) << (52 - self.man)) + (((1023 - self.bias) as u64) << 52)
    }

    /// f32 bits of the smallest normal value.
    #[inline(always)]
    pub(crate) const fn min_normal_f32(self) -> u32 {
        (128 - self.bias) << 23
    }

    #[inline(always)]
    const fn min_normal_f64(self) -> u64 {
        ((1024 - self.bias) as u64) << 52
    }

    /// Returns the last byte of the magic number. It cancels the excess that the exponent's term brings into the sum, so
    /// that the sum's last byte is the code. It is even, so that it leaves ties alone.
    #[inline(always)]
    pub(crate) const fn offset(self) -> u32 {
        ((128 - self.bias + 23 - self.man) << self.man).wrapping_neg() & 0xFF
    }

    /// Rounds once to the nearest code, ties to even; magnitudes beyond code `top` become `top`, NaN becomes 0x7F.
    #[inline(always)]
    pub(crate) const fn encode_f32(self, x: f32, top: u8) -> u8 {
        let drop = 23 - self.man;
        let min_normal = self.min_normal_f32();
        let limit = f32::from_bits(self.widen_f32(top as u32));
        let floor = f32::from_bits(min_normal);

        let a = f32::from_bits(x.to_bits() & F32_ABS);
        // One instruction each, as floats; NaN becomes the limit here, and is replaced at the end.
        let c = a.min(limit);
        let e = c.max(floor).to_bits() & F32_EXP;
        let magic = e.wrapping_add((drop << 23) + self.offset());
        let t = (c + f32::from_bits(magic)).to_bits();
        let magnitude = (t >> drop).wrapping_add(t) & 0x7F;
        let sign = (x.to_bits() >> 24) & 0x80;
        if a.is_nan() { NAN } else { byte(magnitude | sign) }
    }

    /// [`Format::encode_f32`] in f64 arithmetic: a double is rounded once, never by way of f32.
    #[inline(always)]
    pub(crate) const fn encode_f64(self, x: f64, top: u8) -> u8 {
        let drop = 52 - self.man;
        let min_normal = self.min_normal_f64();
        let limit = f64::from_bits(self.widen_f64(top as u32));
        let floor = f64::from_bits(min_normal);

        let a = f64::from_bits(x.to_bits() & F64_ABS);
        let c = if a < limit { a } else { limit };
        let e = (if c > floor { c } else { floor }).to_bits() & F64_EXP;
        let magic = e.wrapping_add((drop as u64) << 52);
        let t = (c + f64::from_bits(magic)).to_bits();
        let magnitude = (e.wrapping_sub(min_normal) >> drop).wrapping_add(t.wrapping_sub(magic));
        let sign = (x.to_bits() >> 56) & 0x80;
        if a.is_nan() { NAN } else { byte(low_word(magnitude | sign) & 0xFF) }
    }

    /// Stochastic rounding of an f32, saturating: up in magnitude iff `F + r >= 2^32`.
    #[inline(always)]
    pub(crate) const fn encode_f32_stochastic(self, x: f32, r: u32) -> u8 {
        let bits = x.to_bits() & F32_ABS;
        let limit = self.widen_f32(self.max as u32);
        let c = if bits < limit { bits } else { limit };
        let e = c >> 23;
        let m = (c & 0x007F_FFFF) | (((e != 0) as u32) << 23);
        let e = if e == 0 { 1 } else { e };
        let binade = if e > 128 - self.bias { e } else { 128 - self.bias };
        let shift = 23 - self.man + (binade - e);
        // m < 2^24, so beyond 56 nothing is left of integer part and fraction.
        let fixed = ((m as u64) << 32) >> (if shift < 63 { shift } else { 63 });
        let k = ((binade - (128 - self.bias)) << self.man) + round_fixed(fixed, r);
        let sign = (x.to_bits() >> 24) & 0x80;
        if bits > F32_EXP { NAN } else { byte((k | sign) & 0xFF) }
    }

    /// Stochastic rounding of an f64, saturating; not by way of f32, which would lose bits of the fraction.
    #[inline(always)]
    pub(crate) const fn encode_f64_stochastic(self, x: f64, r: u32) -> u8 {
        let bits = x.to_bits() & F64_ABS;
        let limit = self.widen_f64(self.max as u32);
        let c = if bits < limit { bits } else { limit };
        let e = low_word(c >> 52);
        let m = (c & 0x000F_FFFF_FFFF_FFFF) | (((e != 0) as u64) << 52);
        let e = if e == 0 { 1 } else { e };
        let binade = if e > 1024 - self.bias { e } else { 1024 - self.bias };
        let shift = 52 - self.man + (binade - e);
        // m < 2^53, so beyond 85 nothing is left; with shift at least 49, what is left is below 2^36.
        let fixed = ((m as u128) << 32) >> (if shift < 96 { shift } else { 96 });
        #[expect(clippy::cast_possible_truncation, reason = "below 2^36")]
        let fixed = fixed as u64;
        let k = ((binade - (1024 - self.bias)) << self.man) + round_fixed(fixed, r);
        let sign = low_word(x.to_bits() >> 56) & 0x80;
        if bits > F64_EXP { NAN } else { byte((k | sign) & 0xFF) }
    }

    /// Exact; every NaN code gives 0x7FFF_FFFF.
    #[inline(always)]
    pub(crate) const fn decode_f32(self, code: u8) -> f32 {
        let magnitude = (code & 0x7F) as u32;
        let sign = ((code & 0x80) as u32) << 24;
        let min_normal = self.min_normal_f32();
        // Subnormals: put the mantissa under the smallest normal's implicit one, then take that one away.
        let with_one = f32::from_bits((magnitude << (23 - self.man)).wrapping_add(min_normal));
        let subnormal = (with_one - f32::from_bits(min_normal)).to_bits();
        let normal = self.widen_f32(magnitude);
        let finite = if magnitude < (1 << self.man) { subnormal } else { normal };
        let wide = if magnitude > self.max as u32 { F32_EXP } else { finite }; // E5M2's infinity
        let signed = wide | sign;
        f32::from_bits(if magnitude >= self.first_nan as u32 { F32_ABS } else { signed })
    }

    /// Exact; every NaN code gives 0x7FFF_FFFF_FFFF_FFFF.
    #[inline(always)]
    pub(crate) const fn decode_f64(self, code: u8) -> f64 {
        if self.is_nan(code) { f64::from_bits(F64_ABS) } else { self.decode_f32(code) as f64 }
    }

    /// Exact, as the upper half of the f32; NaN gives 0x7FFF.
    #[inline(always)]
    pub(crate) const fn decode_bf16(self, code: u8) -> u16 {
        low_half(self.decode_f32(code).to_bits() >> 16)
    }

    /// Exact; NaN gives 0x7FFF.
    #[inline(always)]
    pub(crate) const fn decode_f16(self, code: u8) -> u16 {
        let magnitude = (code & 0x7F) as u32;
        let sign = ((code & 0x80) as u32) << 8;
        // E5M2 is the upper byte of an f16. Every nonzero E4M3 value is a normal f16: rebias the f32.
        let high_byte = magnitude << 8;
        let rebased = (self.decode_f32(code & 0x7F).to_bits() >> 13).wrapping_sub((127 - 15) << 10);
        let rebased = if magnitude == 0 { 0 } else { rebased };
        let wide = if self.bias == 15 { high_byte } else { rebased };
        low_half(if self.is_nan(code) { 0x7FFF } else { wide | sign })
    }

    #[inline(always)]
    pub(crate) const fn is_nan(self, code: u8) -> bool {
        (code & 0x7F) >= self.first_nan
    }
}

/// Widens an f16 exactly, without a branch. `half`'s own conversion asks for CPU features at each call.
#[inline(always)]
pub(crate) const fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = (bits & 0x7FFF) as u32;
    let sign = ((bits & 0x8000) as u32) << 16;
    let wide = (magnitude << 13).wrapping_add((127 - 15) << 23);
    let min_normal = 113 << 23; // 2^-14
    let with_one = f32::from_bits((magnitude << 13).wrapping_add(min_normal));
    let subnormal = (with_one - f32::from_bits(min_normal)).to_bits();
    let finite = if magnitude < 0x0400 { subnormal } else { wide };
    let any = if magnitude >= 0x7C00 { wide | F32_EXP } else { finite };
    f32::from_bits(any | sign)
}

/// Widens a bf16 exactly.
#[inline(always)]
pub(crate) const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Returns the code of 4 bits that a byte of [`E2M1`] stands for, whose sign is bit 7 and whose NaN has the low bits of 6.
#[inline(always)]
pub(crate) const fn packed(byte: u8) -> u8 {
    byte & 0x7 | (byte & 0x80) >> 4
}

/// Returns the byte of [`E2M1`] that a code of 4 bits stands for.
#[inline(always)]
pub(crate) const fn unpacked(code: u8) -> u8 {
    code & 0x7 | (code & 0x8) << 4
}
