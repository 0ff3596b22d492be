//! Blocks with scales of their own.
//!
//! The magnitudes of 16 blocks are folded to a vector each, and these 16 vectors to one with a lane for each block. A NaN
//! shows in that lane and sends its block through the slower loop that passes over NaN.
//!
//! A bf16 times a power of two is a sum of exponents: such blocks are encoded in 16-bit lanes without becoming f32.

use super::decode::scaled;
use super::*;
use crate::E8M0;
use crate::arch::avx2::is_aligned;
use crate::arch::blocks::{self, F32Rule, MxRule};
use crate::arch::interleave::sixteen;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn scales(rule: &F32Rule, amaxes: &[f32], scales: &mut [f32], scale_inv: &mut [f32]) {
    blocks::scales(rule, amaxes, scales, scale_inv);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn mx_scales(rule: MxRule, amaxes: &[f32], factors: &mut [f32], scales: &mut [E8M0]) {
    blocks::mx_scales(rule, amaxes, factors, scales);
}

/// The amaxes of blocks of so many elements; the last may have fewer.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn amaxes<S: Source>(src: &[S], block: usize, amaxes: &mut [f32]) {
    let done = if block == 32 { amaxes_of::<S, 32>(src, amaxes) } else { 0 };
    let rest = src.get(done * block..).unwrap_or_default();
    for (amax, block) in amaxes[done..].iter_mut().zip(rest.chunks(block)) {
        *amax = super::amax::<S>(block);
    }
}

/// Sixteen blocks at a time; returns how many blocks it has done.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn amaxes_of<S: Source, const N: usize>(src: &[S], amaxes: &mut [f32]) -> usize {
    let groups = src.as_chunks::<N>().0.as_chunks::<16>().0;
    for (group, amaxes) in groups.iter().zip(amaxes.as_chunks_mut::<16>().0) {
        let magnitude = |i: usize| magnitude(&group[i]);
        totals(sixteen!(magnitude), group, amaxes);
    }
    16 * groups.len()
}

/// The amaxes of sixteen blocks, whose lanes have the magnitudes `v`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn totals<S: Source, const N: usize>(v: [__m512i; 16], blocks: &[[S; N]; 16], amaxes: &mut [f32; 16]) {
    let infinity = if let Kind::F16 = S::KIND { 0x7C00_0000 } else { codec::F32_EXP.cast_signed() };
    let bits = fold(v);
    let values = match S::KIND {
        Kind::F16 => _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits))),
        Kind::F32 | Kind::BF16 => _mm512_castsi512_ps(bits),
    };
    // SAFETY: the 16 floats are the 64 bytes that are written.
    unsafe { _mm512_storeu_ps(amaxes.as_mut_ptr(), values) };
    let is_nan = _mm512_cmpgt_epu32_mask(bits, _mm512_set1_epi32(infinity));
    if is_nan != 0 {
        cold();
        for (i, (amax, block)) in amaxes.iter_mut().zip(blocks).enumerate() {
            if is_nan >> i & 1 == 1 {
                *amax = super::amax::<S>(block);
            }
        }
    }
}

/// The largest magnitudes of a block's lanes, as bits of f32; f16 as if it were the upper half of one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn magnitude<S: Source, const N: usize>(block: &[S; N]) -> __m512i {
    widened::<S>(raised(_mm512_setzero_si512(), block))
}

/// `most` raised to the magnitudes of more elements, lane by lane: of 32 bits for f32, else of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn raised<S: Source, const N: usize>(mut most: __m512i, block: &[S; N]) -> __m512i {
    let first = block.as_ptr().cast::<__m512i>();
    // SAFETY: within the block, whose size is a multiple of 64 bytes; `at` is below their number.
    let load = |at: usize| unsafe { _mm512_loadu_si512(first.wrapping_add(at)) };
    let vectors = const { size_of::<[S; N]>() / 64 };
    for at in 0..vectors {
        most = match S::KIND {
            Kind::F32 => {
                let abs = _mm512_set1_epi32(codec::F32_ABS.cast_signed());
                _mm512_max_epu32(most, _mm512_and_si512(load(at), abs))
            }
            Kind::F16 | Kind::BF16 => _mm512_max_epu16(most, abs(load(at))),
        };
    }
    most
}

/// Lanes of 32 bits: of two words the larger as the upper half, which makes a bf16 an f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widened<S: Source>(most: __m512i) -> __m512i {
    match S::KIND {
        Kind::F32 => most,
        Kind::F16 | Kind::BF16 => {
            let most = _mm512_max_epu16(most, _mm512_slli_epi32::<16>(most));
            _mm512_and_si512(most, _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed()))
        }
    }
}

/// Folds each of sixteen vectors to its largest lane: lane i of the result is that of vector i.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold(v: [__m512i; 16]) -> __m512i {
    let max = |a, b| _mm512_max_epu32(a, b);
    let pair = |i: usize| {
        let (a, b) = (v[2 * i], v[2 * i + 1]);
        max(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
    };
    let four = |i: usize| {
        let (a, b) = (pair(2 * i), pair(2 * i + 1));
        max(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    };
    // Each quarter of a vector has a lane for each of four blocks now.
    let eight = |i: usize| {
        let (a, b) = (four(2 * i), four(2 * i + 1));
        max(_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xEE>(a, b))
    };
    let (a, b) = (eight(0), eight(1));
    max(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b))
}

/// Raises amaxes to the magnitudes of the elements beside them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(crate) fn amax_columns<S: Source>(src: &[S], amaxes: &mut [f32]) {
    let raise = |block: &[S; BLOCK], amaxes: &mut [f32; BLOCK]| {
        let first = amaxes.as_mut_ptr();
        for (i, x) in floats(block).into_iter().enumerate() {
            // SAFETY: 16 of the 64 floats, from 16 · i on.
            let amax = unsafe { _mm512_loadu_ps(first.wrapping_add(16 * i)) };
            // Of a NaN and a number, `max` gives its second operand.
            let amax = _mm512_max_ps(_mm512_abs_ps(x), amax);
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(first.wrapping_add(16 * i), amax) };
        }
    };
    let (blocks, src) = src.as_chunks::<BLOCK>();
    let (lines, amaxes) = amaxes.as_chunks_mut::<BLOCK>();
    blocks.iter().zip(lines).for_each(|(block, amaxes)| raise(block, amaxes));
    if !src.is_empty() {
        let (mut block, mut line) = ([S::default(); BLOCK], [0.0; BLOCK]);
        block[..src.len()].copy_from_slice(src);
        line[..src.len()].copy_from_slice(&amaxes[..src.len()]);
        raise(&block, &mut line);
        amaxes[..src.len()].copy_from_slice(&line[..src.len()]);
    }
}

/// Calls `codes` for each block of a vector of codes, with its number, and stores its result; past the caches if `streams`, for
/// which `dst` has to be aligned. There is no fence.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn each<S: Source>(
    src: &[S],
    dst: &mut [u8],
    streams: bool,
    mut codes: impl FnMut(usize, &[S; BLOCK]) -> Codes,
) {
    let streams = streams && is_aligned(dst);
    let prefetches = streams && needs_prefetch();
    let (blocks, src) = src.as_chunks::<BLOCK>();
    let (lines, dst) = dst.as_chunks_mut::<BLOCK>();
    for (i, (block, line)) in blocks.iter().zip(lines).enumerate() {
        if prefetches {
            fetch_ahead(block);
        }
        let codes = codes(i, block);
        if streams {
            // SAFETY: a line is 64 bytes, and aligned, as `dst` is.
            unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), codes) };
        } else {
            store(line, codes);
        }
    }
    if !src.is_empty() {
        let (mut block, mut line) = ([S::default(); BLOCK], [0; BLOCK]);
        block[..src.len()].copy_from_slice(src);
        store(&mut line, codes(blocks.len(), &block));
        dst.copy_from_slice(&line[..dst.len()]);
    }
}

/// The bits of a power of two that `adds` takes, times 2⁷: what it adds to the exponent of a bf16.
///
/// Scales up to this one leave a code of 0 for the subnormal numbers, whatever the sum makes of them.
const MOST_EXPONENT: u32 = 127 + 100;

/// Returns true if all scales are powers of two that can be added to the exponents of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn are_exponents(scales: &[f32]) -> bool {
    let mut wrong = 0;
    for scale in scales {
        let bits = scale.to_bits();
        // The sign counts as a part of the exponent, so that no negative scale passes. 0 and subnormal scales do not either.
        wrong |= bits & 0x007F_FFFF | u32::from((bits >> 23).wrapping_sub(1) >= MOST_EXPONENT);
    }
    wrong == 0
}

/// Returns, in each half of the result, the number that multiplies a bf16 by this power of two when it is added to its
/// bits.
#[inline(always)]
fn addend(scale: f32) -> u32 {
    let word = (scale.to_bits() >> 16).wrapping_sub(127 << 7) & 0xFFFF;
    word << 16 | word
}

/// Codes of bf16 times powers of two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn encode_shifted<T: Target>(x: [__m512i; 2], addends: [u32; 2]) -> Codes {
    let addends = addends.map(|addend| _mm512_set1_epi32(addend.cast_signed()));
    let of = &Of::<7, 127, T>::ROUNDING;
    let a = [abs(x[0]), abs(x[1])];
    let codes = |x, a, addend| {
        let c = _mm512_min_epi16(_mm512_adds_epi16(a, addend), splat(of.clamp));
        signed(uneven(_mm512_max_epi16(c, splat(of.floor)), of), x, of)
    };
    let (codes, _) = with_nans([codes(x[0], a[0], addends[0]), codes(x[1], a[1], addends[1])], a, of);
    pack(codes, &IN_ORDER)
}

/// Codes of blocks, each multiplied by a scale of its own.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn quantize_blocks<S: Source, T: Target>(
    src: &[S],
    block: usize,
    scales: &[f32],
    dst: &mut [u8],
    streams: bool,
) {
    // Of the halves of a vector of codes.
    let at = |i: usize| scales.get(i).copied().unwrap_or(1.0);
    match block {
        32 => quantize_halves::<S, T>(src, |i| [at(2 * i), at(2 * i + 1)], scales, dst, streams),
        128 => quantize_halves::<S, T>(src, |i| [at(i / 2); 2], scales, dst, streams),
        _ => {
            for ((src, scale), dst) in src.chunks(block).zip(scales).zip(dst.chunks_mut(block)) {
                quantize_halves::<S, T>(src, |_| [*scale; 2], &[*scale], dst, streams);
            }
        }
    }
}

/// Codes of half vectors, multiplied by the scales that `of` gives for each vector. `scales` are all that it gives.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn quantize_halves<S: Source, T: Target>(
    src: &[S],
    of: impl Fn(usize) -> [f32; 2],
    scales: &[f32],
    dst: &mut [u8],
    streams: bool,
) {
    if matches!(S::KIND, Kind::BF16) && are_exponents(scales) {
        return each(src, dst, streams, |i, block| {
            let [low, high] = of(i);
            encode_shifted::<T>(words(block), [addend(low), addend(high)])
        });
    }
    each(src, dst, streams, |i, block| times::<S, T>(block, of(i)));
}

/// The codes of a vector's halves, each multiplied by a scale.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn times<S: Source, T: Target>(block: &[S; BLOCK], [low, high]: [f32; 2]) -> Codes {
    let (low, high) = (_mm512_set1_ps(low), _mm512_set1_ps(high));
    let [a, b, c, d] = floats(block);
    let mul = |x, scale| _mm512_mul_ps(x, scale);
    encode_floats::<T>([mul(a, low), mul(b, low), mul(c, high), mul(d, high)]).0
}

/// Codes of elements, each multiplied by the scale beside it.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn quantize_columns<S: Source, T: Target>(src: &[S], scales: &[f32], dst: &mut [u8]) {
    let (whole, rest) = scales.as_chunks::<BLOCK>();
    let mut last = [1.0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    each(src, dst, false, |i, block| {
        let scales = floats(whole.get(i).unwrap_or(&last));
        let [a, b, c, d] = floats(block);
        let mul = |x, i: usize| _mm512_mul_ps(x, scales[i]);
        encode_floats::<T>([mul(a, 0), mul(b, 1), mul(c, 2), mul(d, 3)]).0
    });
}

/// The values of codes in blocks, each multiplied by a factor of its own.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn dequantize_blocks<T: Target, D: Source>(
    src: &[u8],
    block: usize,
    scale_inv: &[f32],
    dst: &mut [D],
    streams: bool,
) {
    let at = |i: usize| scale_inv.get(i).copied().unwrap_or(1.0);
    // Then the vectors come in order.
    let streams = streams && dst.as_ptr().cast::<__m512i>().is_aligned();
    let mut vectors = 0..;
    let mut next = || vectors.next().unwrap_or(0_usize);
    match block {
        32 => super::decode::fill(src, dst, streams, |codes| {
            let i = next();
            scaled::<T, D>(codes, [_mm512_set1_ps(at(2 * i)), _mm512_set1_ps(at(2 * i + 1))])
        }),
        128 => super::decode::fill(src, dst, streams, |codes| {
            scaled::<T, D>(codes, [_mm512_set1_ps(at(next() / 2)); 2])
        }),
        _ => {
            for ((src, scale_inv), dst) in src.chunks(block).zip(scale_inv).zip(dst.chunks_mut(block)) {
                dequantize::<T, D>(src, *scale_inv, dst, streams);
            }
        }
    }
}
