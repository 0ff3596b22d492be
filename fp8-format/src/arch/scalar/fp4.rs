//! Blocks of 16 elements of E2M1, two codes in a byte. Other paths compile these loops for their vectors.

use crate::codec::{self, F32_ABS, F32_EXP};
use crate::philox::BlockRandom;
use crate::traits::Source;
use crate::{E2M1, E4M3, TensorScale};

/// Elements of a block, and the bytes of their codes.
pub(crate) const FP4_BLOCK: usize = 16;
const BYTES: usize = FP4_BLOCK / 2;

/// The values of all codes; of the first eight, the magnitudes.
pub(crate) const FP4_VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        values[code as usize] = E2M1::from_bits(code).to_f32();
        code += 1;
    }
    values
};

/// The bit of a peak that says that there was a NaN.
const NAN: u32 = 1 << 31;

/// The largest magnitude of some elements, as its bits, and whether one of them was NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub(crate) struct Peak(u32);

impl Peak {
    pub(crate) const fn amax(self) -> f32 {
        f32::from_bits(self.0 & F32_ABS)
    }

    /// The peak of these bits of a magnitude.
    #[inline(always)]
    pub(crate) const fn new(most: u32, has_nan: bool) -> Self {
        Self(most | (has_nan as u32) << 31)
    }

    const fn has_nan(self) -> bool {
        self.0 & NAN != 0
    }

    /// That of both.
    #[inline(always)]
    pub(crate) fn and(self, other: Self) -> Self {
        Self((self.0 & F32_ABS).max(other.0 & F32_ABS) | (self.0 | other.0) & NAN)
    }

    #[inline(always)]
    fn of(block: &[f32; FP4_BLOCK]) -> Self {
        let mut most = 0;
        let mut has_nan = false;
        for x in block {
            let bits = x.to_bits() & F32_ABS;
            let is_nan = bits > F32_EXP;
            most = most.max(if is_nan { 0 } else { bits });
            has_nan |= is_nan;
        }
        Self::new(most, has_nan)
    }
}

/// The values of a block, and zeros behind the last of a row.
#[inline(always)]
fn padded<S: Source>(src: &[S]) -> [f32; FP4_BLOCK] {
    let mut block = [0.0; FP4_BLOCK];
    block.iter_mut().zip(src).for_each(|(x, src)| *x = src.to_f32());
    block
}

/// The peaks of the blocks of a row, joined with those that stand there.
#[inline(always)]
pub(crate) fn fp4_peaks<S: Source>(src: &[S], peaks: &mut [Peak]) {
    let (blocks, rest) = src.as_chunks::<FP4_BLOCK>();
    for (peak, block) in peaks.iter_mut().zip(blocks) {
        *peak = peak.and(Peak::of(&block.map(S::to_f32)));
    }
    if let (false, Some(peak)) = (rest.is_empty(), peaks.get_mut(blocks.len())) {
        *peak = peak.and(Peak::of(&padded(rest)));
    }
}

/// The scales of blocks from their peaks, and the factors of their elements. A NaN in a block is left to its scale, as E2M1 has
/// none; its factor is that of the others. Slices are equally long.
#[inline(always)]
pub(crate) fn fp4_scales(tensor: TensorScale, peaks: &[Peak], factors: &mut [f32], scales: &mut [E4M3]) {
    for ((scale, factor), peak) in scales.iter_mut().zip(factors).zip(peaks) {
        let number = tensor.block_scale(peak.amax());
        *factor = tensor.block_factor(number);
        *scale = if peak.has_nan() { E4M3::NAN } else { number };
    }
}

/// The nearest code of each value, which have four bits.
#[inline(always)]
fn nearest(values: [f32; FP4_BLOCK]) -> [u32; FP4_BLOCK] {
    const FORMAT: codec::Format = codec::E2M1;
    const DROP: u32 = 23 - FORMAT.man;
    values.map(|x| {
        let bits = x.to_bits();
        let c = limited(bits);
        let e = c.max(FORMAT.min_normal_f32()) & F32_EXP;
        let magic = f32::from_bits(e + (DROP << 23) + FORMAT.offset());
        let t = (f32::from_bits(c) + magic).to_bits();
        ((t >> DROP).wrapping_add(t) & 7) | sign(bits)
    })
}

/// The magnitude of a value, at most 6, which NaN becomes, too; as bits.
#[inline(always)]
fn limited(bits: u32) -> u32 {
    (bits & F32_ABS).min(codec::E2M1.widen_f32(codec::E2M1.max as u32))
}

/// The sign's bit of a code. That of NaN is 0.
#[inline(always)]
fn sign(bits: u32) -> u32 {
    let sign = bits >> 28 & 8;
    if bits & F32_ABS > F32_EXP { 0 } else { sign }
}

/// The code of each value, rounded by a byte: up in magnitude iff ⌊256 · F⌋ and the byte reach 256.
#[inline(always)]
fn stochastic(values: [f32; FP4_BLOCK], words: &[u32; 4]) -> [u32; FP4_BLOCK] {
    core::array::from_fn(|j| {
        let bits = values[j].to_bits();
        let c = limited(bits);
        // Below 2 a step is 1/2, below 4 it is 1, and from there 2: 2^binade / 2. A code is so many steps, and 2 a binade.
        let binade = (c >> 23).max(127) - 127;
        let fixed = f32::from_bits(c) * f32::from_bits((127 + 9 - binade) << 23);
        #[expect(clippy::cast_possible_truncation, reason = "0 to 768: the fraction is cut off")]
        let fixed = (fixed as i32).cast_unsigned();
        let r = words[j / 4] >> (j % 4 * 8) & 0xFF;
        (((fixed + r) >> 8) + 2 * binade) | sign(bits)
    })
}

/// Two codes to a byte, the first in its low half.
#[inline(always)]
fn packed(codes: [u32; FP4_BLOCK]) -> [u8; BYTES] {
    core::array::from_fn(|j| (codes[2 * j] | codes[2 * j + 1] << 4).to_le_bytes()[0])
}

/// The random bytes of blocks that are `step` apart.
#[inline(always)]
pub(crate) fn fp4_words(random: BlockRandom, step: u64, words: &mut [[u32; 4]]) {
    random.words(step, words);
}

/// Codes of blocks, a factor each: of a row, of which the last may be smaller. With random bytes, they are rounded
/// stochastically.
#[inline(always)]
pub(crate) fn fp4_codes<S: Source>(src: &[S], factors: &[f32], words: Option<&[[u32; 4]]>, dst: &mut [u8]) {
    match words {
        None => blocks(src, factors, dst, |values, _| packed(nearest(values))),
        Some(words) => blocks(src, factors, dst, |values, n| packed(stochastic(values, &words[n]))),
    }
}

/// Calls `codes` with the products of each block and its number.
#[inline(always)]
fn blocks<S: Source>(
    src: &[S],
    factors: &[f32],
    dst: &mut [u8],
    codes: impl Fn([f32; FP4_BLOCK], usize) -> [u8; BYTES],
) {
    let (src, rest) = src.as_chunks::<FP4_BLOCK>();
    let (dst, last) = dst.as_chunks_mut::<BYTES>();
    for (n, ((block, dst), factor)) in src.iter().zip(&mut *dst).zip(factors).enumerate() {
        *dst = codes(block.map(|x| x.to_f32() * factor), n);
    }
    if let (false, Some(factor)) = (rest.is_empty(), factors.get(src.len())) {
        let bytes = codes(padded(rest).map(|x| x * factor), src.len());
        // 15 elements take as many bytes as 16.
        let last = dst.get_mut(src.len()).map_or(last, |dst| &mut dst[..]);
        last.iter_mut().zip(bytes).for_each(|(dst, byte)| *dst = byte);
    }
}

/// The values of the blocks of a row: `(code · scale) · decode`.
#[inline(always)]
pub(crate) fn fp4_values<D: Source>(src: &[u8], scales: &[E4M3], decode: f32, dst: &mut [D]) {
    for ((codes, scale), dst) in src.chunks(BYTES).zip(scales).zip(dst.chunks_mut(FP4_BLOCK)) {
        let scale = scale.to_f32();
        for (pair, byte) in dst.chunks_mut(2).zip(codes) {
            for (x, code) in pair.iter_mut().zip([byte & 0xF, byte >> 4]) {
                let v = FP4_VALUES[usize::from(code)] * scale * decode;
                *x = D::from_f32(if v.is_nan() { f32::from_bits(F32_ABS) } else { v });
            }
        }
    }
}
