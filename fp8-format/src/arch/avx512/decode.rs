//! Codes to wider types, 64 at a time: words by a table of all magnitudes, of f32 the upper ones.

use super::{ABS, BLOCK, fence, fetch_ahead, head, splat, table};
use crate::arch::target::Target;
use crate::traits::{Kind, Source};
use core::arch::x86_64::*;

/// Calls `values` for each block and stores what it gives: two vectors of 16-bit elements, or four of f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn fill<D: Source>(
    src: &[u8],
    dst: &mut [D],
    streams: bool,
    mut values: impl FnMut(&[u8; BLOCK]) -> [__m512i; 4],
) {
    let vectors = const { size_of::<[D; BLOCK]>() / 64 };
    let (head, streams) = head(dst, streams);
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    let (blocks, src_tail) = src.as_chunks::<BLOCK>();
    let (lines, dst_tail) = dst.as_chunks_mut::<BLOCK>();
    for (block, line) in blocks.iter().zip(lines) {
        if streams {
            fetch_ahead(block);
        }
        let values = values(block);
        let line = line.as_mut_ptr().cast::<__m512i>();
        for (at, value) in values.into_iter().enumerate().take(vectors) {
            if streams {
                // SAFETY: within the block of `dst`, and aligned, as blocks are some lines long and `head` leads to one.
                unsafe { _mm512_stream_si512(line.wrapping_add(at), value) };
            } else {
                // SAFETY: within the block of `dst`.
                unsafe { _mm512_storeu_si512(line.wrapping_add(at), value) };
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
            let first = line.as_mut_ptr().cast::<__m512i>();
            for (at, value) in values(&block).into_iter().enumerate().take(vectors) {
                // SAFETY: within the block.
                unsafe { _mm512_storeu_si512(first.wrapping_add(at), value) };
            }
            dst.copy_from_slice(&line[..dst.len()]);
        }
    }
}

/// The words of all magnitudes.
struct Values<T, D>(core::marker::PhantomData<(T, D)>);

impl<T: Target, D: Source> Values<T, D> {
    /// As f16, or as bf16, which are the upper halves of f32.
    const TABLE: [[u16; 32]; 4] = {
        let mut table = [[0; 32]; 4];
        let mut code = 0;
        while code < 128 {
            let word = &mut table[code / 32][code % 32];
            let code_byte = code.to_le_bytes()[0];
            *word = match D::KIND {
                Kind::F16 => T::FORMAT.decode_f16(code_byte),
                Kind::F32 | Kind::BF16 => T::FORMAT.decode_bf16(code_byte),
            };
            code += 1;
        }
        table
    };
}

/// The words of 32 codes, and which are NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_words<T: Target, D: Source>(codes: __m256i) -> (__m512i, __mmask32) {
    let codes = _mm512_cvtepu8_epi16(codes);
    let is_nan =
        _mm512_cmpge_epu16_mask(_mm512_and_si512(codes, splat(0x7F)), splat(T::FORMAT.first_nan.into()));
    let high = _mm512_slli_epi16::<8>(codes);
    let words = if matches!(D::KIND, Kind::F16) && T::FORMAT.bias == 15 {
        high // E5M2 is the upper byte of an f16
    } else {
        let [a, b, c, d] = &Values::<T, D>::TABLE;
        let low = _mm512_permutex2var_epi16(table(a), codes, table(b));
        let upper = _mm512_permutex2var_epi16(table(c), codes, table(d));
        let words = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, splat(0x40)), upper);
        // words | (high & sign)
        _mm512_ternarylogic_epi32::<0xF8>(words, high, splat(!ABS))
    };
    (_mm512_mask_mov_epi16(words, is_nan, splat(ABS)), is_nan)
}

/// The halves of a block of codes.
#[inline]
#[target_feature(enable = "avx512f")]
fn codes(block: &[u8; BLOCK]) -> [__m256i; 2] {
    let first = block.as_ptr().cast::<__m256i>();
    // SAFETY: the first 32 of 64 bytes.
    let low = unsafe { _mm256_loadu_si256(first) };
    // SAFETY: the others.
    let high = unsafe { _mm256_loadu_si256(first.wrapping_add(1)) };
    [low, high]
}

/// Sixteen codes as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn decode_sixteen<T: Target>(codes: &[u8; 16]) -> __m512 {
    // SAFETY: 16 bytes are read.
    let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
    let (words, is_nan) = decode_words::<T, f32>(_mm256_zextsi128_si256(codes));
    let x = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)));
    let [low, high, ..] = is_nan.to_le_bytes();
    let nan = u16::from_le_bytes([low, high]);
    _mm512_castsi512_ps(_mm512_mask_or_epi32(x, nan, x, _mm512_set1_epi32(0xFFFF)))
}

/// The values of a block, as four vectors of f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_floats<T: Target>(block: &[u8; BLOCK]) -> [__m512i; 4] {
    let [low, high] = codes(block);
    let (low, low_nan) = decode_words::<T, f32>(low);
    let (high, high_nan) = decode_words::<T, f32>(high);
    let widen = |words, is_nan: __mmask32| {
        let x = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words));
        let [low, high, ..] = is_nan.to_le_bytes();
        _mm512_mask_or_epi32(x, u16::from_le_bytes([low, high]), x, _mm512_set1_epi32(0xFFFF))
    };
    [
        widen(_mm512_castsi512_si256(low), low_nan),
        widen(_mm512_extracti64x4_epi64::<1>(low), low_nan >> 16),
        widen(_mm512_castsi512_si256(high), high_nan),
        widen(_mm512_extracti64x4_epi64::<1>(high), high_nan >> 16),
    ]
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn decode<T: Target, D: Source>(src: &[u8], dst: &mut [D], streams: bool) {
    fill(src, dst, streams, |block| match D::KIND {
        Kind::F32 => decode_floats::<T>(block),
        Kind::F16 | Kind::BF16 => {
            let [low, high] = codes(block);
            let none = _mm512_setzero_si512();
            [decode_words::<T, D>(low).0, decode_words::<T, D>(high).0, none, none]
        }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn dequantize<T: Target, D: Source>(src: &[u8], scale_inv: f32, dst: &mut [D], streams: bool) {
    let scale_inv = _mm512_set1_ps(scale_inv);
    fill(src, dst, streams, |block| scaled::<T, D>(block, [scale_inv; 2]));
}

/// Values by their bits, with one NaN, and which are NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn canonical(x: __m512) -> (__m512i, __mmask16) {
    let is_nan = _mm512_cmpunord_ps_mask(x, x);
    (_mm512_mask_mov_epi32(_mm512_castps_si512(x), is_nan, _mm512_set1_epi32(i32::MAX)), is_nan)
}

/// Canonical values as 16-bit elements: rounded to nearest, ties to even.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn narrow<D: Source>((x, is_nan): (__m512i, __mmask16)) -> __m256i {
    match D::KIND {
        Kind::BF16 => {
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(x), _mm512_set1_epi32(1));
            let x = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7FFF)), odd);
            let x = _mm512_mask_mov_epi32(x, is_nan, _mm512_set1_epi32(i32::MAX));
            _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x))
        }
        Kind::F16 | Kind::F32 => {
            _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_castsi512_ps(x))
        }
    }
}

/// The values of a block, the halves each multiplied by a factor.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn scaled<T: Target, D: Source>(block: &[u8; BLOCK], scale_inv: [__m512; 2]) -> [__m512i; 4] {
    let mul = |x, scale_inv| canonical(_mm512_mul_ps(_mm512_castsi512_ps(x), scale_inv));
    let [a, b, c, d] = decode_floats::<T>(block);
    let [low, high] = scale_inv;
    let [a, b, c, d] = [mul(a, low), mul(b, low), mul(c, high), mul(d, high)];
    let narrow = |x| narrow::<D>(x);
    let join = |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    match D::KIND {
        Kind::F32 => [a.0, b.0, c.0, d.0],
        Kind::F16 | Kind::BF16 => {
            let none = _mm512_setzero_si512();
            [join(narrow(a), narrow(b)), join(narrow(c), narrow(d)), none, none]
        }
    }
}
