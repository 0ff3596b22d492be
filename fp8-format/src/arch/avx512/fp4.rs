//! Blocks of E2M1: a block is a vector of f32.

use super::decode::{canonical, decode_sixteen, narrow};
use crate::arch::bytes;
use crate::arch::scalar::{self, FP4_BLOCK, FP4_VALUES, Peak};
use crate::arch::target::Saturating;
use crate::codec::{self, F32_ABS, F32_EXP};
use crate::philox::BlockRandom;
use crate::traits::{Kind, Source};
use crate::{E4M3, TensorScale};
use core::arch::x86_64::*;

/// Blocks whose scales are computed, or decoded, together.
const LANES: usize = 16;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn splat(x: u32) -> __m512i {
    _mm512_set1_epi32(x.cast_signed())
}

/// The values of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn floats<S: Source>(block: &[S; FP4_BLOCK]) -> __m512 {
    match S::KIND {
        // SAFETY: a block is the 16 f32 that are read.
        Kind::F32 => unsafe { _mm512_loadu_ps(block.as_ptr().cast()) },
        Kind::F16 | Kind::BF16 => {
            const { assert!(size_of::<S>() >= 2) };
            // SAFETY: a block is 32 bytes at least, which are read.
            let halves = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
            match S::KIND {
                Kind::F16 => _mm512_cvtph_ps(halves),
                _ => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))),
            }
        }
    }
}

/// The largest lanes of four vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn largest([a, b, c, d]: [__m512i; 4]) -> [u32; 4] {
    let halves =
        |a, b| _mm512_max_epu32(_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xEE>(a, b));
    let [ab, cd] = [halves(a, b), halves(c, d)];
    // A quarter of each vector, beside the others.
    let most = _mm512_max_epu32(_mm512_shuffle_i32x4::<0x88>(ab, cd), _mm512_shuffle_i32x4::<0xDD>(ab, cd));
    let most = _mm512_max_epu32(most, _mm512_shuffle_epi32::<0x4E>(most));
    let most = _mm512_max_epu32(most, _mm512_shuffle_epi32::<0xB1>(most));
    let first = _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, most));
    let mut words = [0; 4];
    // SAFETY: four words are the 16 bytes that are written.
    unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), first) };
    words
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn fp4_peaks<S: Source>(src: &[S], peaks: &mut [Peak]) {
    let (blocks, _) = src.as_chunks::<FP4_BLOCK>();
    let (fours, _) = blocks.as_chunks::<4>();
    let (lines, rest) = peaks.split_at_mut(4 * fours.len().min(peaks.len() / 4));
    let (lines, _) = lines.as_chunks_mut::<4>();
    let done = 4 * FP4_BLOCK * lines.len();
    for (peaks, [a, b, c, d]) in lines.iter_mut().zip(fours) {
        let magnitudes = |block| _mm512_and_si512(_mm512_castps_si512(floats::<S>(block)), splat(F32_ABS));
        let most = largest([magnitudes(a), magnitudes(b), magnitudes(c), magnitudes(d)]);
        // NaN is larger than all numbers, and needs another look.
        if most.iter().any(|most| *most > F32_EXP) {
            for (peak, block) in peaks.iter_mut().zip([a, b, c, d]) {
                scalar::fp4_peaks(block, core::slice::from_mut(peak));
            }
        } else {
            for (peak, most) in peaks.iter_mut().zip(most) {
                *peak = peak.and(Peak::new(most, false));
            }
        }
    }
    scalar::fp4_peaks(&src[done..], rest);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn fp4_scales(tensor: TensorScale, peaks: &[Peak], factors: &mut [f32], scales: &mut [E4M3]) {
    let (groups, rest) = peaks.as_chunks::<LANES>();
    let (some_factors, last_factors) = factors.as_chunks_mut::<LANES>();
    let (some_scales, last_scales) = scales.as_chunks_mut::<LANES>();
    const TO: codec::Format = codec::E4M3;
    const DROP: u32 = 23 - TO.man;
    let sixth = _mm512_set1_ps(tensor.encode() * (1.0 / 6.0));
    let (decode, most) = (_mm512_set1_ps(tensor.decode()), _mm512_set1_ps(f32::MAX));
    for ((peaks, factors), scales) in groups.iter().zip(some_factors).zip(some_scales) {
        // SAFETY: a group is the 16 words that are read; a peak is a word.
        let peaks = unsafe { _mm512_loadu_si512(peaks.as_ptr().cast()) };
        let amax = _mm512_castsi512_ps(_mm512_and_si512(peaks, splat(F32_ABS)));
        let limit = _mm512_castsi512_ps(splat(TO.widen_f32(TO.max.into())));
        let c = _mm512_min_ps(_mm512_mul_ps(amax, sixth), limit);
        let floor = splat(TO.min_normal_f32());
        let e = _mm512_and_si512(_mm512_max_epi32(_mm512_castps_si512(c), floor), splat(F32_EXP));
        // The addition rounds; subtracted again, it leaves the rounded number.
        let magic = _mm512_castsi512_ps(_mm512_add_epi32(e, splat(DROP << 23)));
        let scale = _mm512_sub_ps(_mm512_add_ps(c, magic), magic);
        let magic = _mm512_castsi512_ps(_mm512_add_epi32(e, splat((DROP << 23) + TO.offset())));
        let t = _mm512_castps_si512(_mm512_add_ps(c, magic));
        let code = _mm512_and_si512(_mm512_add_epi32(_mm512_srli_epi32::<DROP>(t), t), splat(0x7F));
        let factor = _mm512_div_ps(_mm512_set1_ps(1.0), _mm512_mul_ps(scale, decode));
        let factor = _mm512_min_ps(factor, most);
        // SAFETY: a group is the 16 floats that are written.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), factor) };
        let has_nan = _mm512_movepi32_mask(peaks);
        let code = _mm512_mask_mov_epi32(code, has_nan, splat(codec::NAN.into()));
        let bytes = _mm512_cvtepi32_epi8(code);
        // SAFETY: a group is the 16 bytes that are written; a scale is a byte.
        unsafe { _mm_storeu_si128(scales.as_mut_ptr().cast(), bytes) };
    }
    scalar::fp4_scales(tensor, rest, last_factors, last_scales);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn fp4_words(random: BlockRandom, step: u64, words: &mut [[u32; 4]]) {
    scalar::fp4_words(random, step, words);
}

/// The nearest code of each value.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn nearest(a: __m512i) -> __m512i {
    const TO: codec::Format = codec::E2M1;
    const DROP: u32 = 23 - TO.man;
    let c = _mm512_min_epu32(a, splat(TO.widen_f32(TO.max as u32)));
    let e = _mm512_and_si512(_mm512_max_epu32(c, splat(TO.min_normal_f32())), splat(F32_EXP));
    let magic = _mm512_add_epi32(e, splat((DROP << 23) + TO.offset()));
    let t = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(c), _mm512_castsi512_ps(magic)));
    _mm512_and_si512(_mm512_add_epi32(_mm512_srli_epi32::<DROP>(t), t), splat(7))
}

/// The code of each value, rounded by its byte: see the scalar path.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn stochastic(a: __m512i, words: &[u32; 4]) -> __m512i {
    const TO: codec::Format = codec::E2M1;
    let c = _mm512_min_epu32(a, splat(TO.widen_f32(TO.max as u32)));
    let binade = _mm512_sub_epi32(_mm512_srli_epi32::<23>(_mm512_max_epu32(c, splat(127 << 23))), splat(127));
    let factor = _mm512_slli_epi32::<23>(_mm512_sub_epi32(splat(127 + 9), binade));
    let fixed = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(c), _mm512_castsi512_ps(factor)));
    // SAFETY: four words are the 16 bytes that are read.
    let bytes = unsafe { _mm_loadu_si128(words.as_ptr().cast()) };
    let sum = _mm512_add_epi32(fixed, _mm512_cvtepu8_epi32(bytes));
    _mm512_add_epi32(_mm512_srli_epi32::<8>(sum), _mm512_add_epi32(binade, binade))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn fp4_codes<S: Source>(src: &[S], factors: &[f32], words: Option<&[[u32; 4]]>, dst: &mut [u8]) {
    let (blocks, rest) = src.as_chunks::<FP4_BLOCK>();
    let count = blocks.len();
    let (lines, last) = dst.split_at_mut(count * FP4_BLOCK / 2);
    let blocks = blocks.iter().zip(lines.as_chunks_mut().0).zip(factors);
    match words {
        None => {
            blocks.for_each(|((block, line), factor)| *line = packed_block(block, *factor, |a| nearest(a)))
        }
        Some(words) => blocks.zip(words).for_each(|(((block, line), factor), words)| {
            *line = packed_block(block, *factor, |a| stochastic(a, words));
        }),
    }
    if !rest.is_empty() {
        scalar::fp4_codes(rest, &factors[count..], words.map(|words| &words[count..]), last);
    }
}

/// The bytes of a block, with the signs of its values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn packed_block<S: Source>(
    block: &[S; FP4_BLOCK],
    factor: f32,
    round: impl Fn(__m512i) -> __m512i,
) -> [u8; FP4_BLOCK / 2] {
    let bits = _mm512_castps_si512(_mm512_mul_ps(floats(block), _mm512_set1_ps(factor)));
    let a = _mm512_and_si512(bits, splat(F32_ABS));
    let numbers = _mm512_cmple_epu32_mask(a, splat(F32_EXP));
    let sign = _mm512_maskz_and_epi32(numbers, _mm512_srli_epi32::<28>(bits), splat(8));
    let codes = _mm512_or_si512(round(a), sign);
    // Two codes to the low byte of their 64 bits.
    let pairs = _mm512_or_si512(codes, _mm512_srli_epi64::<28>(codes));
    _mm_cvtsi128_si64(_mm512_cvtepi64_epi8(pairs)).to_le_bytes()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn fp4_values<D: Source>(src: &[u8], scales: &[E4M3], decode: f32, dst: &mut [D]) {
    // SAFETY: the table is the 16 floats that are read.
    let table = unsafe { _mm512_loadu_ps(FP4_VALUES.as_ptr()) };
    let decode_lanes = _mm512_set1_ps(decode);
    let (blocks, rest) = dst.as_chunks_mut::<FP4_BLOCK>();
    let count = blocks.len();
    let lines = src.as_chunks::<{ FP4_BLOCK / 2 }>().0;
    for ((scales, lines), blocks) in
        scales[..count].chunks(LANES).zip(lines.chunks(LANES)).zip(blocks.chunks_mut(LANES))
    {
        let (mut codes, mut factors) = ([0; LANES], [0.0_f32; LANES]);
        codes[..scales.len()].copy_from_slice(bytes(scales));
        let decoded = decode_sixteen::<Saturating<E4M3>>(&codes);
        // SAFETY: 16 floats are written.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), decoded) };
        for ((block, line), factor) in blocks.iter_mut().zip(lines).zip(factors) {
            // A byte in 64 bits, its upper code in the upper word. Above a code are others, which the table does not see.
            let pairs = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(i64::from_le_bytes(*line)));
            let codes = _mm512_or_si512(pairs, _mm512_slli_epi64::<28>(pairs));
            let x = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), _mm512_set1_ps(factor));
            let x = canonical(_mm512_mul_ps(x, decode_lanes));
            match D::KIND {
                // SAFETY: a block is the 16 f32 that are written.
                Kind::F32 => unsafe { _mm512_storeu_si512(block.as_mut_ptr().cast(), x.0) },
                Kind::F16 | Kind::BF16 => {
                    const { assert!(size_of::<D>() >= 2) };
                    let halves = narrow::<D>(x);
                    // SAFETY: a block is 32 bytes at least, which are written.
                    unsafe { _mm256_storeu_si256(block.as_mut_ptr().cast(), halves) };
                }
            }
        }
    }
    scalar::fp4_values(&src[count * FP4_BLOCK / 2..], &scales[count..], decode, rest);
}
