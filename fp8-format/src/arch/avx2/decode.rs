//! Codes to wider types, 32 at a time: the two bytes of 16-bit floats each in a vector of its own, where code and float
//! differ by a shift and an exponent's bias; those of f32 are a bf16's with two more below.

use super::{BLOCK, fence, fetch_ahead, head, splat};
use crate::arch::target::Target;
use crate::codec;
use crate::traits::{Kind, Source};
use core::arch::x86_64::*;

/// Calls `values` for each block and stores what it gives: two vectors of 16-bit elements, or four of f32.
///
/// `streams` says that the values go past the caches; then the blocks begin where `dst` has a line.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn fill<D: Source>(
    src: &[u8],
    dst: &mut [D],
    streams: bool,
    mut values: impl FnMut(&[u8; BLOCK]) -> [__m256i; 4],
) {
    let vectors = const { size_of::<[D; BLOCK]>() / 32 };
    let (head, streams) = head(dst, streams);
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    let (blocks, src_tail) = src.as_chunks::<BLOCK>();
    let (lines, dst_tail) = dst.as_chunks_mut::<BLOCK>();
    for (block, lines) in blocks.iter().zip(lines) {
        if streams {
            fetch_ahead(block);
        }
        let values = values(block);
        let first = lines.as_mut_ptr().cast::<__m256i>();
        for (at, value) in values.into_iter().enumerate().take(vectors) {
            if streams {
                // SAFETY: within the block of `dst`, and aligned, as blocks are whole lines and `head` leads to one.
                unsafe { _mm256_stream_si256(first.wrapping_add(at), value) };
            } else {
                // SAFETY: within the block of `dst`.
                unsafe { _mm256_storeu_si256(first.wrapping_add(at), value) };
            }
        }
    }
    if streams {
        fence();
    }
    for (src, dst) in [(src_head, dst_head), (src_tail, dst_tail)] {
        if !src.is_empty() {
            let (mut block, mut line) = ([0; BLOCK], [D::default(); BLOCK]);
            block[..src.len()].copy_from_slice(src);
            let first = line.as_mut_ptr().cast::<__m256i>();
            for (at, value) in values(&block).into_iter().enumerate().take(vectors) {
                // SAFETY: within the block.
                unsafe { _mm256_storeu_si256(first.wrapping_add(at), value) };
            }
            dst.copy_from_slice(&line[..dst.len()]);
        }
    }
}

/// The constants for decoding a code to the upper half of an f32, to a bf16 or to an f16.
struct Rule<T, D>(core::marker::PhantomData<(T, D)>);

impl<T: Target, D: Source> Rule<T, D> {
    /// Stored bits of the float's significand, and its exponent's bias.
    const MAN_BIAS: [u32; 2] = if let Kind::F16 = D::KIND { [10, 15] } else { [7, 127] };
    /// Bits by which the code is shifted up.
    const SHIFT: u32 = Self::MAN_BIAS[0] - T::FORMAT.man;
    /// The difference of the exponent biases of float and code, in place in the float's upper byte.
    const ADDEND: u8 =
        codec::low_half((Self::MAN_BIAS[1] - T::FORMAT.bias) << Self::MAN_BIAS[0]).to_le_bytes()[1];
    /// The upper byte of infinity.
    const INFINITY: u8 = if let Kind::F16 = D::KIND { 0x7C } else { 0x7F };

    /// Masks for the lower and the upper bytes of the first 16 magnitudes, which include the subnormal ones. They mark
    /// the bits in which the result of shift and addend differs from the right float.
    const WRONG: [[u8; 16]; 2] = {
        let mut wrong = [[0; 16]; 2];
        let mut code = 0_usize;
        while code < 16 {
            let magnitude = code.to_le_bytes()[0];
            let right = match D::KIND {
                Kind::F16 => T::FORMAT.decode_f16(magnitude),
                Kind::F32 | Kind::BF16 => T::FORMAT.decode_bf16(magnitude),
            };
            let [low, high] = right.to_le_bytes();
            let shifted = (magnitude as u16) << Self::SHIFT;
            let [low_shifted, high_shifted] = shifted.to_le_bytes();
            wrong[0][code] = low ^ low_shifted;
            wrong[1][code] = high ^ (high_shifted + Self::ADDEND);
            code += 1;
        }
        wrong
    };
}

#[inline]
#[target_feature(enable = "avx2")]
fn bytes(x: u8) -> __m256i {
    _mm256_set1_epi8(x.cast_signed())
}

/// Returns the entries of `table` for magnitudes below 16, and 0 for others.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(table: &[u8; 16], magnitudes: __m256i) -> __m256i {
    // SAFETY: the table is the 16 bytes that are read.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    // An index of 0x80 and more, a byte's sign, gives 0; of others the last four bits count.
    _mm256_shuffle_epi8(table, _mm256_adds_epu8(magnitudes, bytes(0x70)))
}

/// Codes as 16-bit floats.
struct Words {
    /// Lower and upper bytes.
    bytes: [__m256i; 2],
    /// All ones where NaN is.
    is_nan: __m256i,
}

impl Words {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new<T: Target, D: Source>(codes: __m256i) -> Self {
        let (shift, addend) = (Rule::<T, D>::SHIFT, Rule::<T, D>::ADDEND);
        let [wrong_low, wrong_high] = &Rule::<T, D>::WRONG;
        let count = |count: u32| _mm_cvtsi32_si128(count.cast_signed());
        let magnitudes = _mm256_and_si256(codes, bytes(0x7F));
        // Of two bytes that are shifted as one word each keeps what was its own.
        let low = _mm256_sll_epi16(magnitudes, count(shift));
        let low = _mm256_and_si256(low, bytes(codec::low_half(0xFF << shift).to_le_bytes()[0]));
        let high = _mm256_srl_epi16(magnitudes, count(8 - shift));
        let high = _mm256_and_si256(high, bytes(0xFF >> (8 - shift)));
        let (mut low, mut high) = (low, _mm256_add_epi8(high, bytes(addend)));
        // With the same bias subnormal numbers are the same.
        if addend != 0 {
            low = _mm256_xor_si256(low, look_up(wrong_low, magnitudes));
            high = _mm256_xor_si256(high, look_up(wrong_high, magnitudes));
        }
        if T::FORMAT.max + 1 < T::FORMAT.first_nan {
            let is_infinite = _mm256_cmpeq_epi8(magnitudes, bytes(T::FORMAT.max + 1));
            high = _mm256_or_si256(high, _mm256_and_si256(is_infinite, bytes(Rule::<T, D>::INFINITY)));
        }
        // NaN has all bits set but its sign.
        let is_nan = _mm256_cmpgt_epi8(magnitudes, bytes(T::FORMAT.first_nan - 1));
        let high = _mm256_or_si256(high, _mm256_and_si256(is_nan, bytes(0x7F)));
        let sign = _mm256_and_si256(_mm256_andnot_si256(is_nan, codes), bytes(0x80));
        Self { bytes: [_mm256_or_si256(low, is_nan), _mm256_or_si256(high, sign)], is_nan }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(block: &[u8; BLOCK]) -> __m256i {
    // SAFETY: a block is the 32 bytes that are read.
    unsafe { _mm256_loadu_si256(block.as_ptr().cast()) }
}

/// The values of a block.
#[inline]
#[target_feature(enable = "avx2")]
fn words<T: Target, D: Source>(block: &[u8; BLOCK]) -> [__m256i; 2] {
    // Interleaving works on each half of a vector: it gets the quarters that follow each other from the two of them.
    let codes = _mm256_permute4x64_epi64::<0b11_01_10_00>(load(block));
    let [low, high] = Words::new::<T, D>(codes).bytes;
    [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
}

/// The values of a block.
#[inline]
#[target_feature(enable = "avx2")]
fn floats<T: Target>(block: &[u8; BLOCK]) -> [__m256i; 4] {
    // As above, twice.
    let codes = _mm256_permutevar8x32_epi32(load(block), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    let Words { bytes: [low, high], is_nan } = Words::new::<T, f32>(codes);
    let [a, b] = [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)];
    // What bf16 cuts off is 0, and all ones of NaN.
    let [a_cut, b_cut] = [_mm256_unpacklo_epi8(is_nan, is_nan), _mm256_unpackhi_epi8(is_nan, is_nan)];
    [
        _mm256_unpacklo_epi16(a_cut, a),
        _mm256_unpackhi_epi16(a_cut, a),
        _mm256_unpacklo_epi16(b_cut, b),
        _mm256_unpackhi_epi16(b_cut, b),
    ]
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn decode<T: Target, D: Source>(src: &[u8], dst: &mut [D], streams: bool) {
    fill(src, dst, streams, |block| match D::KIND {
        Kind::F32 => floats::<T>(block),
        Kind::F16 | Kind::BF16 => {
            let [low, high] = words::<T, D>(block);
            [low, high, _mm256_setzero_si256(), _mm256_setzero_si256()]
        }
    });
}

/// Values by their bits, with one NaN.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn canonical(x: __m256) -> __m256i {
    let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
    let nan = _mm256_castsi256_ps(splat(codec::F32_ABS));
    _mm256_castps_si256(_mm256_blendv_ps(x, nan, is_nan))
}

/// f32, with canonical NaN, as 16-bit elements: rounded to nearest, ties to even.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow<D: Source>(low: __m256i, high: __m256i) -> __m256i {
    match D::KIND {
        Kind::F16 => {
            let narrow = |x| _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(_mm256_castsi256_ps(x));
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(narrow(low)), narrow(high))
        }
        Kind::BF16 | Kind::F32 => {
            let narrow = |bits| {
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), splat(1));
                let up = _mm256_add_epi32(_mm256_add_epi32(bits, splat(0x7FFF)), odd);
                // The carry would turn NaN into a number.
                let is_nan = _mm256_cmpeq_epi32(bits, splat(codec::F32_ABS));
                _mm256_srli_epi32::<16>(_mm256_blendv_epi8(up, bits, is_nan))
            };
            _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(narrow(low), narrow(high)))
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn dequantize<T: Target, D: Source>(src: &[u8], scale_inv: f32, dst: &mut [D], streams: bool) {
    let scale_inv = _mm256_set1_ps(scale_inv);
    fill(src, dst, streams, |block| scaled::<T, D>(block, scale_inv));
}

/// The values of a block, multiplied by a factor.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn scaled<T: Target, D: Source>(block: &[u8; BLOCK], scale_inv: __m256) -> [__m256i; 4] {
    let mul = |x| canonical(_mm256_mul_ps(_mm256_castsi256_ps(x), scale_inv));
    let [a, b, c, d] = floats::<T>(block);
    let [a, b, c, d] = [mul(a), mul(b), mul(c), mul(d)];
    match D::KIND {
        Kind::F32 => [a, b, c, d],
        Kind::F16 | Kind::BF16 => {
            [narrow::<D>(a, b), narrow::<D>(c, d), _mm256_setzero_si256(), _mm256_setzero_si256()]
        }
    }
}
