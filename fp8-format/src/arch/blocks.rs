//! The scales of blocks from their amaxes, in portable loops that each path compiles for its vectors.

use crate::E8M0;

/// Elements that are read for their amaxes and then for their codes, where that takes two loops.
const GROUP: usize = 2048;

/// Rows and columns of a tile with a scale of its own.
pub(crate) const SIDE: usize = 128;

/// Tiles in a row of them that are computed together: 4 MiB of f32.
pub(crate) const TILES: usize = 64;

/// The rule by which an amax becomes a scale.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    F32(F32Rule),
    Mx(MxRule),
}

impl Rule {
    /// Returns the factor by which the elements of a block are multiplied. `amax` is not NaN.
    #[inline(always)]
    pub(super) fn factor(&self, amax: f32) -> f32 {
        match self {
            Self::F32(rule) => rule.scale(amax),
            Self::Mx(rule) => rule.factor(amax),
        }
    }
}

/// The rule by which an amax becomes an f32 scale, by IEEE division:
///
/// ```text
/// a = max(amax, epsilon)
/// scale = 1 where a is 0 or infinite, else max / a, and `scale_max` where that overflows
/// scale_inv = 1 / scale
/// ```
///
/// `mask` clears the significand where scales are powers of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct F32Rule {
    /// The largest finite value of the codes.
    pub(crate) max: f32,
    pub(crate) epsilon: f32,
    pub(crate) scale_max: f32,
    /// Bits of the quotient that stay.
    pub(crate) mask: u32,
}

impl F32Rule {
    /// The scale of a block. `amax` is not NaN.
    #[inline(always)]
    pub(crate) fn scale(&self, amax: f32) -> f32 {
        let a = if amax < self.epsilon { self.epsilon } else { amax };
        let quotient = self.max / a;
        let quotient = if quotient == f32::INFINITY { self.scale_max } else { quotient };
        let quotient = if a == 0.0 || a == f32::INFINITY { 1.0 } else { quotient };
        f32::from_bits(quotient.to_bits() & self.mask)
    }
}

/// The rule by which an amax becomes an E8M0 scale.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MxRule {
    /// The product of `amax` and this factor, 1 / max as an f32, rounded up to a power of two.
    Ceil { factor: f32 },
    /// The power of two not greater than `amax`, with an exponent that is less by this one: that of the largest code.
    Floor { emax: u32 },
}

impl MxRule {
    /// The byte of a block's scale. `amax` is not NaN.
    #[inline(always)]
    fn exponent(self, amax: f32) -> u32 {
        const MOST: u32 = E8M0::MAX.to_bits() as u32;
        let (exponent, amax_bits) = match self {
            Self::Ceil { factor } => {
                let bits = (amax * factor).to_bits();
                // 2⁻¹²⁷ is subnormal.
                let power = if bits < 0x0080_0000 { 0x0040_0000 } else { 0 };
                ((bits >> 23) + u32::from(bits & 0x007F_FFFF > power), bits)
            }
            Self::Floor { emax } => ((amax.to_bits() >> 23).saturating_sub(emax), amax.to_bits()),
        };
        if amax_bits >= 0x7F80_0000 { MOST } else { exponent }
    }

    /// Returns the factor by which the elements of a block are multiplied. `amax` is not NaN.
    #[inline(always)]
    pub(super) fn factor(self, amax: f32) -> f32 {
        Self::inverse(self.exponent(amax))
    }

    /// 2^(127 − exponent). The inverse of the largest scale, 2⁻¹²⁷, is subnormal.
    #[inline(always)]
    fn inverse(exponent: u32) -> f32 {
        f32::from_bits(if exponent == 254 { 0x0040_0000 } else { (254 - exponent) << 23 })
    }

    /// The scale of a block. `amax` is not NaN.
    #[inline(always)]
    pub(crate) fn scale(self, amax: f32) -> E8M0 {
        let [byte, ..] = self.exponent(amax).to_le_bytes();
        E8M0::from_bits(byte)
    }
}

/// The scales of blocks and their inverses. Slices are equally long.
#[inline(always)]
pub(super) fn scales(rule: &F32Rule, amaxes: &[f32], scales: &mut [f32], scale_inv: &mut [f32]) {
    for ((scale, inverse), amax) in scales.iter_mut().zip(scale_inv).zip(amaxes) {
        *scale = rule.scale(*amax);
        *inverse = 1.0 / *scale;
    }
}

/// The E8M0 scales of blocks, and the factors by which elements are multiplied. Slices are equally long.
#[inline(always)]
pub(super) fn mx_scales(rule: MxRule, amaxes: &[f32], factors: &mut [f32], scales: &mut [E8M0]) {
    for ((factor, scale), amax) in factors.iter_mut().zip(scales).zip(amaxes) {
        let exponent = rule.exponent(*amax);
        let [byte, ..] = exponent.to_le_bytes();
        *scale = E8M0::from_bits(byte);
        *factor = MxRule::inverse(exponent);
    }
}

/// Finds the amaxes of blocks and encodes the blocks with the factors that `rule` makes of them, one group of blocks after the
/// other, so that a group stays in the nearest cache from the first read to the second.
#[inline(always)]
pub(super) fn in_groups<S>(
    src: &[S],
    block: usize,
    rule: &Rule,
    amaxes: &mut [f32],
    dst: &mut [u8],
    find: impl Fn(&[S], &mut [f32]),
    encode: impl Fn(&[S], &[f32], &mut [u8]),
) {
    let size = GROUP.next_multiple_of(block);
    let groups = src.chunks(size).zip(dst.chunks_mut(size)).zip(amaxes.chunks_mut(size / block));
    for ((src, dst), amaxes) in groups {
        let mut factors = [1.0; GROUP / 32];
        find(src, amaxes);
        factors.iter_mut().zip(&*amaxes).for_each(|(factor, amax)| *factor = rule.factor(*amax));
        encode(src, &factors, dst);
    }
}

/// Finds the amaxes of a row of tiles, and encodes the tiles with the factors that `rule` makes of them.
///
/// `src` and `dst` hold `rows` rows of `width` elements each, `TILES` tiles at most. They begin `stride` elements apart.
#[inline(always)]
pub(super) fn in_tiles<S>(
    src: &[S],
    [rows, width, stride]: [usize; 3],
    rule: &Rule,
    amaxes: &mut [f32],
    dst: &mut [u8],
    find: impl Fn(&[S], &mut [f32]),
    encode: impl Fn(&[S], &[f32], &mut [u8]),
) {
    let count = amaxes.len().min(TILES);
    let [mut of_row, mut factors] = [[0.0_f32; TILES]; 2];
    amaxes.fill(0.0);
    for row in src.chunks(stride).take(rows) {
        find(&row[..width], &mut of_row[..count]);
        amaxes.iter_mut().zip(of_row).for_each(|(amax, here)| *amax = here.max(*amax));
    }
    factors.iter_mut().zip(&*amaxes).for_each(|(factor, amax)| *factor = rule.factor(*amax));
    for (row, dst) in src.chunks(stride).zip(dst.chunks_mut(stride)).take(rows) {
        encode(&row[..width], &factors[..count], &mut dst[..width]);
    }
}
