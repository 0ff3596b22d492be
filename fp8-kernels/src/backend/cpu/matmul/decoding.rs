//! The constants with which codes are decoded in registers.

use crate::Encoding;

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

/// The values of the codes of E2M1, as bits of f32. Their lower halves are 0.
pub(super) const FP4_VALUES: [u32; 16] = {
    let mut values = [0; 16];
    let mut code = 0;
    while code < 16 {
        values[code as usize] = Encoding::E2M1.to_f32(code).to_bits();
        code += 1;
    }
    values
};
