//! Blocks of E2M1: a block is two vectors of f32.

use super::decode::{canonical, decode as decode_codes, narrow};
use super::{abs, floats, shift_right, splat};
use crate::arch::bytes;
use crate::arch::scalar::{self, FP4_BLOCK, FP4_VALUES, Peak};
use crate::arch::target::Saturating;
use crate::codec::{self, F32_EXP};
use crate::philox::BlockRandom;
use crate::traits::{Kind, Source};
use crate::{E4M3, TensorScale};
use core::arch::x86_64::*;

/// Blocks whose scales are computed together.
const LANES: usize = 8;

/// Blocks whose scales are decoded together.
const SCALES: usize = 32;

/// Lanes that are NaN, of magnitudes.
#[inline]
#[target_feature(enable = "avx2")]
fn nan(a: __m256i) -> __m256i {
    _mm256_cmpgt_epi32(a, splat(F32_EXP))
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn fp4_peaks<S: Source>(src: &[S], peaks: &mut [Peak]) {
    let (blocks, rest) = src.as_chunks::<FP4_BLOCK>();
    let (whole, last) = peaks.split_at_mut(blocks.len().min(peaks.len()));
    for (peak, block) in whole.iter_mut().zip(blocks) {
        let [a, b] = floats(block).map(|x| abs(x));
        let [nan_a, nan_b] = [nan(a), nan(b)];
        let most = _mm256_max_epi32(_mm256_andnot_si256(nan_a, a), _mm256_andnot_si256(nan_b, b));
        let most = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
        let most = _mm_max_epi32(most, _mm_shuffle_epi32::<0b01_00_11_10>(most));
        let most = _mm_max_epi32(most, _mm_shuffle_epi32::<0b10_11_00_01>(most));
        let has_nan = _mm256_movemask_epi8(_mm256_or_si256(nan_a, nan_b)) != 0;
        *peak = peak.and(Peak::new(_mm_cvtsi128_si32(most).cast_unsigned(), has_nan));
    }
    scalar::fp4_peaks(rest, last);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn fp4_scales(tensor: TensorScale, peaks: &[Peak], factors: &mut [f32], scales: &mut [E4M3]) {
    let (groups, rest) = peaks.as_chunks::<LANES>();
    let (some_factors, last_factors) = factors.as_chunks_mut::<LANES>();
    let (some_scales, last_scales) = scales.as_chunks_mut::<LANES>();
    const TO: codec::Format = codec::E4M3;
    const DROP: u32 = 23 - TO.man;
    let sixth = _mm256_set1_ps(tensor.encode() * (1.0 / 6.0));
    let (decode, most) = (_mm256_set1_ps(tensor.decode()), _mm256_set1_ps(f32::MAX));
    for ((peaks, factors), scales) in groups.iter().zip(some_factors).zip(some_scales) {
        // SAFETY: a group is the 8 words that are read; a peak is a word.
        let peaks = unsafe { _mm256_loadu_si256(peaks.as_ptr().cast()) };
        let amax = _mm256_castsi256_ps(abs(_mm256_castsi256_ps(peaks)));
        let limit = _mm256_castsi256_ps(splat(TO.widen_f32(TO.max.into())));
        let c = _mm256_min_ps(_mm256_mul_ps(amax, sixth), limit);
        let e = _mm256_max_epi32(_mm256_castps_si256(c), splat(TO.min_normal_f32()));
        let e = _mm256_and_si256(e, splat(F32_EXP));
        // The addition rounds; subtracted again, it leaves the rounded number.
        let magic = _mm256_castsi256_ps(_mm256_add_epi32(e, splat(DROP << 23)));
        let scale = _mm256_sub_ps(_mm256_add_ps(c, magic), magic);
        let magic = _mm256_castsi256_ps(_mm256_add_epi32(e, splat((DROP << 23) + TO.offset())));
        let t = _mm256_castps_si256(_mm256_add_ps(c, magic));
        let code = _mm256_and_si256(_mm256_add_epi32(shift_right(t, DROP), t), splat(0x7F));
        let factor = _mm256_div_ps(_mm256_set1_ps(1.0), _mm256_mul_ps(scale, decode));
        let factor = _mm256_min_ps(factor, most);
        // SAFETY: a group is the 8 floats that are written.
        unsafe { _mm256_storeu_ps(factors.as_mut_ptr(), factor) };
        // A peak with a NaN is negative.
        let has_nan = _mm256_srai_epi32::<31>(peaks);
        let code = _mm256_blendv_epi8(code, splat(codec::NAN.into()), has_nan);
        let [low, high] = [_mm256_castsi256_si128(code), _mm256_extracti128_si256::<1>(code)];
        let words = _mm_packus_epi32(low, high);
        let bytes = _mm_packus_epi16(words, words);
        // SAFETY: a group is the 8 bytes that are written; a scale is a byte.
        unsafe { _mm_storel_epi64(scales.as_mut_ptr().cast(), bytes) };
    }
    scalar::fp4_scales(tensor, rest, last_factors, last_scales);
}

#[target_feature(enable = "avx2")]
pub(crate) fn fp4_words(random: BlockRandom, step: u64, words: &mut [[u32; 4]]) {
    scalar::fp4_words(random, step, words);
}

const TO: codec::Format = codec::E2M1;

/// Magnitudes, at most 6, which those of NaN become, too.
#[inline]
#[target_feature(enable = "avx2")]
fn limited(a: __m256i) -> __m256i {
    _mm256_min_epi32(a, splat(TO.widen_f32(TO.max as u32)))
}

/// The nearest code of each magnitude.
#[inline]
#[target_feature(enable = "avx2")]
fn nearest(a: __m256i) -> __m256i {
    const DROP: u32 = 23 - TO.man;
    let c = limited(a);
    let e = _mm256_and_si256(_mm256_max_epi32(c, splat(TO.min_normal_f32())), splat(F32_EXP));
    let magic = _mm256_add_epi32(e, splat((DROP << 23) + TO.offset()));
    let t = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(c), _mm256_castsi256_ps(magic)));
    _mm256_and_si256(_mm256_add_epi32(shift_right(t, DROP), t), splat(7))
}

/// The code of each magnitude, rounded by its byte: see the scalar path.
#[inline]
#[target_feature(enable = "avx2")]
fn stochastic(a: __m256i, [low, high]: [u32; 2]) -> __m256i {
    let c = limited(a);
    let binade = shift_right(_mm256_max_epi32(c, splat(127 << 23)), 23);
    let binade = _mm256_sub_epi32(binade, splat(127));
    let factor = _mm256_slli_epi32::<23>(_mm256_sub_epi32(splat(127 + 9), binade));
    let fixed = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(c), _mm256_castsi256_ps(factor)));
    let bytes = _mm_cvtsi64_si128((u64::from(low) | u64::from(high) << 32).cast_signed());
    let sum = _mm256_add_epi32(fixed, _mm256_cvtepu8_epi32(bytes));
    _mm256_add_epi32(shift_right(sum, 8), _mm256_add_epi32(binade, binade))
}

/// The products of a block by their bits, and their magnitudes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn products<S: Source>(block: &[S; FP4_BLOCK], factor: f32) -> ([__m256i; 2], [__m256i; 2]) {
    let products = floats(block).map(|x| _mm256_mul_ps(x, _mm256_set1_ps(factor)));
    (products.map(|x| _mm256_castps_si256(x)), products.map(|x| abs(x)))
}

/// The bytes of a block, of its products and the codes of their magnitudes.
#[inline]
#[target_feature(enable = "avx2")]
fn packed(bits: [__m256i; 2], a: [__m256i; 2], codes: [__m256i; 2]) -> [u8; FP4_BLOCK / 2] {
    let pairs = |bits, a, codes| {
        let sign = _mm256_andnot_si256(nan(a), _mm256_and_si256(shift_right(bits, 28), splat(8)));
        let codes = _mm256_or_si256(codes, sign);
        // Two codes to the low byte of their 64 bits.
        _mm256_or_si256(codes, _mm256_srli_epi64::<28>(codes))
    };
    let none = -1;
    let first = _mm256_setr_epi8(
        0, 8, none, none, none, none, none, none, none, none, none, none, none, none, none, none, 0, 8, none,
        none, none, none, none, none, none, none, none, none, none, none, none, none,
    );
    let second = _mm256_setr_epi8(
        none, none, 0, 8, none, none, none, none, none, none, none, none, none, none, none, none, none, none,
        0, 8, none, none, none, none, none, none, none, none, none, none, none, none,
    );
    let bytes = _mm256_or_si256(
        _mm256_shuffle_epi8(pairs(bits[0], a[0], codes[0]), first),
        _mm256_shuffle_epi8(pairs(bits[1], a[1], codes[1]), second),
    );
    let [low, high] = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
    _mm_cvtsi128_si64(_mm_unpacklo_epi16(low, high)).to_le_bytes()
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn fp4_codes<S: Source>(src: &[S], factors: &[f32], words: Option<&[[u32; 4]]>, dst: &mut [u8]) {
    let (blocks, rest) = src.as_chunks::<FP4_BLOCK>();
    let count = blocks.len();
    let (lines, last) = dst.split_at_mut(count * FP4_BLOCK / 2);
    let blocks = blocks.iter().zip(lines.as_chunks_mut().0).zip(factors);
    match words {
        None => blocks.for_each(|((block, line), factor)| {
            let (bits, a) = products(block, *factor);
            *line = packed(bits, a, a.map(|a| nearest(a)));
        }),
        Some(words) => blocks.zip(words).for_each(|(((block, line), factor), [w0, w1, w2, w3])| {
            let (bits, a) = products(block, *factor);
            *line = packed(bits, a, [stochastic(a[0], [*w0, *w1]), stochastic(a[1], [*w2, *w3])]);
        }),
    }
    if !rest.is_empty() {
        scalar::fp4_codes(rest, &factors[count..], words.map(|words| &words[count..]), last);
    }
}

/// The values of the eight codes of four bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn values(bytes: i32) -> __m256 {
    // SAFETY: the table is longer than the 8 floats that are read, which are the magnitudes.
    let table = unsafe { _mm256_loadu_ps(FP4_VALUES.as_ptr()) };
    // A byte in 64 bits, its upper code in the upper word. Above a code are others, which the table does not see.
    let pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    let codes = _mm256_or_si256(pairs, _mm256_slli_epi64::<28>(pairs));
    let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), splat(1 << 31));
    _mm256_or_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign))
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn fp4_values<D: Source>(src: &[u8], scales: &[E4M3], decode: f32, dst: &mut [D]) {
    let decode_lanes = _mm256_set1_ps(decode);
    let (blocks, rest) = dst.as_chunks_mut::<FP4_BLOCK>();
    let count = blocks.len();
    let lines = src.as_chunks::<4>().0.as_chunks::<2>().0;
    let mut factors = [0.0; SCALES];
    for ((scales, lines), blocks) in
        scales[..count].chunks(SCALES).zip(lines.chunks(SCALES)).zip(blocks.chunks_mut(SCALES))
    {
        decode_codes::<Saturating<E4M3>, f32>(bytes(scales), &mut factors[..scales.len()], false);
        for ((block, line), factor) in blocks.iter_mut().zip(lines).zip(factors) {
            let [a, b] = line.map(|bytes| {
                let x = _mm256_mul_ps(values(i32::from_le_bytes(bytes)), _mm256_set1_ps(factor));
                canonical(_mm256_mul_ps(x, decode_lanes))
            });
            let first = block.as_mut_ptr().cast::<__m256i>();
            match D::KIND {
                Kind::F32 => {
                    // SAFETY: the first 8 f32 of a block.
                    unsafe { _mm256_storeu_si256(first, a) };
                    // SAFETY: the others.
                    unsafe { _mm256_storeu_si256(first.wrapping_add(1), b) };
                }
                Kind::F16 | Kind::BF16 => {
                    const { assert!(size_of::<D>() >= 2) };
                    let halves = narrow::<D>(a, b);
                    // SAFETY: a block is 32 bytes at least, which are written.
                    unsafe { _mm256_storeu_si256(first, halves) };
                }
            }
        }
    }
    scalar::fp4_values(&src[count * FP4_BLOCK / 2..], &scales[count..], decode, rest);
}
