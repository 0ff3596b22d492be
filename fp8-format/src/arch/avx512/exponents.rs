//! bf16 times a power of two: a sum of exponents, in 64 lanes of bytes.
//!
//! The code of a normal result is `(exponent << man) + rounded`, where a table of 128 bytes gives the rounded significand. It may
//! be one binade too large, which carries into the exponent. The few binades below that have subnormal codes each have a table of
//! their own, which is looked up if a vector contains such an element. Everything farther below gives 0.
//!
//! A vector without subnormal codes takes half the instructions of [`super::encode_words`]. E4M3 has them for elements below
//! 2⁻¹⁴ of the largest, so they are rare in blocks that are scaled by their amax.

use super::*;

/// The tables of a format.
struct Tables<T>(core::marker::PhantomData<T>);

impl<T: Target> Tables<T> {
    /// Binades that have subnormal codes: the lowest has half the smallest one.
    const BELOW: u8 = T::FORMAT.man.to_le_bytes()[0] + 1;
    /// The table for normal codes: rounded significands without their leading bit, less what [`Self::BELOW`] binades add.
    const NORMAL: [u8; 128] =
        rounded(7 - T::FORMAT.man, (1 << T::FORMAT.man) + ((Self::BELOW as u32) << T::FORMAT.man));
    /// Codes of the binade of half the smallest code, of the next, and so on.
    const SUBNORMAL: [[u8; 128]; 4] = [rounded(8, 0), rounded(7, 0), rounded(6, 0), rounded(5, 0)];
}

/// Significands of bf16 without so many bits, rounded to nearest, ties to even, less a number.
#[expect(clippy::cast_possible_truncation, reason = "modulo 256")]
const fn rounded(shift: u32, less: u32) -> [u8; 128] {
    let mut table = [0; 128];
    let mut i = 0;
    while i < 128 {
        let significand = 128 + i as u32;
        let (whole, rest, half) = (significand >> shift, significand & ((1 << shift) - 1), 1 << (shift - 1));
        let up = rest > half || rest == half && whole & 1 == 1;
        table[i] = (whole + up as u32).wrapping_sub(less) as u8;
        i += 1;
    }
    table
}

/// The exponents that are below all that do not become 0, from the bits of powers of two.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn bases<T: Target>(powers: __m128i) -> __m128i {
    let most = const { 2 * 127 - T::FORMAT.bias - Tables::<T>::BELOW as u32 };
    _mm_sub_epi32(_mm_set1_epi32(most.cast_signed()), _mm_srli_epi32::<23>(powers))
}

/// Returns what [`round_to_odd`] does, with the signs of the numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn odd_words(even: __m512, odd: __m512) -> __m512i {
    let (x, sticky) = halved(even, odd);
    _mm512_or_si512(x, sticky)
}

/// Codes of words times powers of two, which are given by their bases. If `is_interleaved`, the words are in the order of
/// [`round_to_odd`].
///
/// No element is NaN, and only with `CLAMPS` a product is beyond the largest code.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn encode_exponents<T: Target, const CLAMPS: bool>(
    x: [__m512i; 2],
    base: __m512i,
    is_interleaved: bool,
) -> Codes {
    let bytes = |x: u8| _mm512_set1_epi8(x.cast_signed());
    let (upper, lower) = if is_interleaved { (&INTERLEAVED, &INTERLEAVED_LOW) } else { (&IN_ORDER, &LOW) };
    // The exponent's last bit and the significand; the sign and the rest of the exponent.
    let (low, high) = (pack(x, lower), pack(x, upper));
    let twice = _mm512_add_epi8(high, high);
    let exponent = _mm512_mask_sub_epi8(twice, _mm512_movepi8_mask(low), twice, bytes(0xFF));
    let exponent = _mm512_subs_epu8(exponent, base);

    let lookup = |both: &[u8; 128]| {
        let [first, last] = both.as_chunks::<BLOCK>().0 else { return low };
        _mm512_permutex2var_epi8(table(first), low, table(last))
    };
    let below = bytes(Tables::<T>::BELOW);
    let is_normal = _mm512_cmpgt_epu8_mask(exponent, below);
    let is_some = _mm512_test_epi8_mask(exponent, exponent);
    let rounded = lookup(const { &Tables::<T>::NORMAL });
    let mut code = _mm512_maskz_add_epi8(is_normal, shift_left(exponent, T::FORMAT.man), rounded);
    if is_some != is_normal {
        for (binade, codes) in (1..=Tables::<T>::BELOW).zip(const { &Tables::<T>::SUBNORMAL }) {
            let is_here = _mm512_cmpeq_epi8_mask(exponent, bytes(binade));
            code = _mm512_mask_mov_epi8(code, is_here, lookup(codes));
        }
    }
    if CLAMPS {
        code = _mm512_min_epu8(code, bytes(T::TOP));
    }
    // code | (high & sign)
    _mm512_ternarylogic_epi32::<0xF8>(code, high, bytes(0x80))
}

/// Returns the order of the lower bytes of words, from that of their upper bytes.
const fn lower(mut order: [u8; BLOCK]) -> [u8; BLOCK] {
    let mut i = 0;
    while i < BLOCK {
        order[i] -= 1;
        i += 1;
    }
    order
}

const LOW: [u8; BLOCK] = lower(IN_ORDER);
const INTERLEAVED_LOW: [u8; BLOCK] = lower(INTERLEAVED);
