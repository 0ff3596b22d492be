//! Constants of rounding in lanes of 16 bits.

use crate::codec::Format;

/// The constants that round magnitudes of a 16-bit encoding to codes, in lanes of 16 bits.
pub(crate) struct Rounding {
    /// Significand bits too many.
    pub(crate) shift: u32,
    /// The magnitude of the largest code that comes out.
    pub(crate) clamp: u16,
    /// Half the smallest subnormal number: this and all below gives 0.
    pub(crate) floor: u16,
    /// The smallest normal number of the target.
    pub(crate) min_normal: u16,
    /// For a normal result, what is added less one, but for the last bit kept.
    pub(crate) addend: u16,
    /// For a subnormal result, the negated addend, by the last five bits of what is left without the bits too many.
    pub(crate) subnormal: [u16; 32],
    /// Beyond this is NaN.
    pub(crate) infinity: u16,
    /// Source and target have the same exponents: rounding is the same for normal and subnormal results.
    pub(crate) is_even: bool,
}

impl Rounding {
    /// From an encoding with so many significand bits and this bias.
    #[expect(clippy::cast_possible_truncation, reason = "words and their differences, modulo 2^16")]
    pub(crate) const fn new(source_man: u32, source_bias: u32, format: Format, top: u8) -> Self {
        let Format { man, bias, .. } = format;
        let shift = source_man - man;
        // Code 0 of the target's exponents, in the source's.
        let offset = (source_bias - bias) << source_man;
        let is_even = source_bias == bias;
        let min_normal = offset + (1 << source_man);
        let half = 1 << (shift - 1);
        let mut subnormal = [0; 32];
        let floor = if is_even { 0 } else { offset - (man << source_man) };
        let mut h = floor >> shift;
        while h < min_normal >> shift {
            let below = (min_normal - 1 - (h << shift)) / (1 << source_man) + 1; // binades below the smallest normal
            let w = (1 << man) + (h & ((1 << man) - 1));
            let (k, rest, tie) = (w >> below, w & ((1 << below) - 1), 1 << (below - 1));
            let one = 1 << shift;
            // At a tie any of the bits too many carries.
            let up = if rest > tie || (rest == tie && k & 1 == 1) {
                one
            } else if rest == tie {
                one - 1
            } else {
                0
            };
            let addend: u32 = (k << shift) + up;
            subnormal[(h & 31) as usize] = (h << shift).wrapping_sub(addend) as u16;
            h += 1;
        }
        Self {
            shift,
            clamp: (((top as u32) << shift) + offset) as u16,
            floor: floor as u16,
            min_normal: min_normal as u16,
            addend: (half - 2_u32).wrapping_sub(offset) as u16,
            subnormal,
            infinity: ((2 * source_bias + 1) << source_man) as u16,
            is_even,
        }
    }
}
