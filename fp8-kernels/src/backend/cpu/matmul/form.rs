//! Values in the form in which an operand is stored, and how a vector of them becomes words.
//!
//! A row of FP8 codes or bf16 values is read as 32-bit words of four or two values of neighboring k. So a square of words is transposed
//! before it is decoded, which moves a quarter or half of the words that the decoded values have, and nothing decoded is stored.

use super::lanes::Lanes;
use crate::Encoding;

/// The form in which values are stored in 32-bit words.
pub(super) trait Form<L: Lanes> {
    /// Steps of the micro-kernel in a stored word.
    const STEPS: usize;

    /// Returns the words of the `step`-th step of a vector of stored words.
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector;
}

/// Words of one step.
pub(super) struct Words;

impl<L: Lanes> Form<L> for Words {
    const STEPS: usize = 1;

    #[inline(always)]
    fn words(_: L, stored: L::Vector, _: usize) -> L::Vector {
        stored
    }
}

/// Two bf16 values, for lanes without pairs.
pub(super) struct Bf16;

impl<L: Lanes> Form<L> for Bf16 {
    const STEPS: usize = 2;

    #[inline(always)]
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector {
        lanes.widen(stored, step)
    }
}

/// Four codes.
pub(super) struct Codes<const IS_E5M2: bool>;

impl<L: Lanes, const IS_E5M2: bool> Form<L> for Codes<IS_E5M2> {
    const STEPS: usize = if L::PAIRS { 2 } else { 4 };

    #[inline(always)]
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector {
        lanes.decode::<IS_E5M2>(stored, step)
    }
}

/// The constants with which vectors decode codes, as bits of f32. Their upper halves are the constants for bf16.
///
/// A magnitude, shifted to where f32 has the lowest bits of its exponent, needs another bias. Those below `NORMAL` (zero and subnormal
/// numbers) and from `SPECIAL` on (infinity and NaN) are looked up in a table instead.
pub(super) struct Decoding<const IS_E5M2: bool>;

#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "NEON multiplies by a power of two instead")
)]
impl<const IS_E5M2: bool> Decoding<IS_E5M2> {
    const ENCODING: Encoding = if IS_E5M2 { Encoding::E5M2 } else { Encoding::E4M3 };
    /// The number of bits by which codes are shifted to the left.
    pub(super) const SHIFT: u32 = if IS_E5M2 { 21 } else { 20 };
    /// The bits of a shifted magnitude.
    pub(super) const MAGNITUDE: u32 = 0x7F << Self::SHIFT;
    /// The difference of the biases.
    pub(super) const BIAS: u32 = (if IS_E5M2 { 127 - 15 } else { 127 - 7 }) << 23;
    /// The smallest normal magnitude, shifted: an exponent of 1.
    pub(super) const NORMAL: u32 = 1 << 23;
    /// The smallest magnitude that is infinite or NaN, shifted.
    pub(super) const SPECIAL: u32 = (if IS_E5M2 { 0x7C } else { 0x7F }) << Self::SHIFT;

    /// Returns the magnitudes of the codes that are not normal by the lowest bits of the code, of which `N` tells apart all those of the
    /// format.
    pub(super) const fn table<const N: usize>() -> [u32; N] {
        let subnormal = if IS_E5M2 { 4 } else { 8 };
        let mut table = [0; N];
        let mut i = 0;
        while i < N {
            let code = if i < subnormal { i } else { 0x80 - N + i };
            table[i] = Self::ENCODING.to_f32(code as u8).to_bits();
            i += 1;
        }
        table
    }

    /// Returns [`table`](Self::table) in bf16.
    pub(super) const fn bf16_table<const N: usize>() -> [u16; N] {
        let wide = Self::table::<N>();
        let mut table = [0; N];
        let mut i = 0;
        while i < N {
            table[i] = (wide[i] >> 16) as u16;
            i += 1;
        }
        table
    }

    /// Returns the value of one code.
    pub(super) const fn value(code: u8) -> f32 {
        Self::ENCODING.to_f32(code)
    }
}
