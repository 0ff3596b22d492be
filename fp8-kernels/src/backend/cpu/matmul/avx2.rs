//! The lanes of AVX2 with FMA.

use super::decoding::{Decoding, FP4_VALUES};
use super::lanes::{Job, Lanes};
use crate::Result;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

/// Runs `job`, compiled for AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) fn run<L: Lanes>(job: impl Job, lanes: L, _: Avx2) -> Result<()> {
    job.run(lanes)
}

impl Lanes for Avx2 {
    type Vector = __m256;
    type Square = [__m256; 8];

    const WIDTH: usize = 8;
    const ROWS: usize = 6;
    const PAIRS: bool = false;
    const OFFSET: u8 = OFFSET;

    #[inline(always)]
    fn zero(self) -> __m256 {
        // SAFETY: `self` proves AVX.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    fn splat(self, word: u32) -> __m256 {
        // SAFETY: `self` proves AVX.
        unsafe { _mm256_set1_ps(f32::from_bits(word)) }
    }

    #[inline(always)]
    unsafe fn words(self, from: *const u32) -> __m256 {
        // SAFETY: `self` proves AVX; the caller vouches for 8 words.
        unsafe { _mm256_loadu_ps(from.cast()) }
    }

    #[inline(always)]
    unsafe fn sums(self, from: *const f32) -> __m256 {
        // SAFETY: `self` proves AVX; the caller vouches for 8 values.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, sums: __m256, to: *mut f32) {
        // SAFETY: `self` proves AVX; the caller vouches for 8 values.
        unsafe { _mm256_storeu_ps(to, sums) }
    }

    #[inline(always)]
    fn multiply_add(self, sums: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves FMA.
        unsafe { _mm256_fmadd_ps(a, b, sums) }
    }

    #[inline(always)]
    fn add_product(self, sums: __m256, others: __m256, factors: __m256) -> __m256 {
        // SAFETY: `self` proves FMA.
        unsafe { _mm256_fmadd_ps(others, factors, sums) }
    }

    #[inline(always)]
    fn multiply(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves AVX.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn look_up(self, codes: [u8; 8], table: &[u8; 16]) -> [u32; 4] {
        // SAFETY: `self` proves AVX.
        unsafe { look_up(codes, table) }
    }

    #[inline(always)]
    fn block_sum(self, a: [__m256; 4], b: [__m256; 4], start: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { block_sum(a, b, start) }
    }

    #[inline(always)]
    fn block_start(self, b: [__m256; 4]) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { block_start(b) }
    }

    #[inline(always)]
    fn canonical(self, sums: __m256) -> __m256 {
        // SAFETY: `self` proves AVX.
        let is_nan = unsafe { _mm256_cmp_ps::<_CMP_UNORD_Q>(sums, sums) };
        let nan = self.splat(f32::NAN.to_bits());
        // SAFETY: as above.
        unsafe { _mm256_blendv_ps(sums, nan, is_nan) }
    }

    #[inline(always)]
    unsafe fn columns(self, from: *const u32, stride: usize) -> [__m256; 8] {
        // SAFETY: `self` proves AVX2; the caller vouches for the words.
        unsafe { columns(from, stride) }
    }

    #[inline(always)]
    fn decode<const IS_E5M2: bool>(self, codes: __m256, step: usize) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { decode::<IS_E5M2>(codes, step) }
    }

    #[inline(always)]
    fn decode_fp4(self, codes: __m256, step: usize) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { decode_fp4(codes, step) }
    }

    #[inline(always)]
    fn widen(self, values: __m256, step: usize) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { widen(values, step) }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u32) {
        // SAFETY: a hint, which reads nothing and faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}

/// Returns the columns of 8 × 8 words: within groups of 4 × 4 by two rounds of interleaving, then the groups by 128-bit moves.
///
/// # Safety
/// The CPU must have AVX2. `from` must have 8 rows of 8 readable words.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn columns(from: *const u32, stride: usize) -> [__m256; 8] {
    let mut rows = [_mm256_setzero_si256(); 8];
    for (j, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller vouches for row j.
        *row = unsafe { _mm256_loadu_si256(from.wrapping_add(j * stride).cast()) };
    }
    let mut pairs = rows;
    for i in (0..8).step_by(2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    let mut columns = [_mm256_setzero_ps(); 8];
    for c in 0..4 {
        // Columns c and 4 + c of the rows 0 … 3 and 4 … 7.
        let four = |i: usize| match c % 2 {
            0 => _mm256_unpacklo_epi64(pairs[i + c / 2], pairs[i + c / 2 + 2]),
            _ => _mm256_unpackhi_epi64(pairs[i + c / 2], pairs[i + c / 2 + 2]),
        };
        let (upper, lower) = (four(0), four(4));
        columns[c] = _mm256_castsi256_ps(_mm256_permute2x128_si256::<0x20>(upper, lower));
        columns[c + 4] = _mm256_castsi256_ps(_mm256_permute2x128_si256::<0x31>(upper, lower));
    }
    columns
}

/// Implements [`Lanes::decode`].
#[inline]
#[target_feature(enable = "avx2")]
fn decode<const IS_E5M2: bool>(codes: __m256, step: usize) -> __m256 {
    let splat = |bits: u32| _mm256_set1_epi32(bits.cast_signed());
    // The code in the lowest byte of each word, for the magnitude, and in the highest, for the sign.
    let first = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);
    let first = _mm256_or_si256(_mm256_or_si256(first, _mm256_slli_epi32::<24>(first)), splat(0x0080_8000));
    let bytes = _mm256_add_epi32(first, splat(0x0100_0001 * step as u32));
    let code = _mm256_shuffle_epi8(_mm256_castps_si256(codes), bytes);
    let shifted = match IS_E5M2 {
        true => _mm256_slli_epi32::<{ Decoding::<true>::SHIFT.cast_signed() }>(code),
        false => _mm256_slli_epi32::<{ Decoding::<false>::SHIFT.cast_signed() }>(code),
    };
    let magnitude = _mm256_and_si256(shifted, splat(Decoding::<IS_E5M2>::MAGNITUDE));
    let normal = _mm256_add_epi32(magnitude, splat(Decoding::<IS_E5M2>::BIAS));
    let is_special = _mm256_cmpgt_epi32(magnitude, splat(Decoding::<IS_E5M2>::SPECIAL - 1));
    let is_small = _mm256_cmpgt_epi32(splat(Decoding::<IS_E5M2>::NORMAL), magnitude);
    let table = const { &Decoding::<IS_E5M2>::table::<8>() };
    // SAFETY: the table is 32 bytes long.
    let table = unsafe { _mm256_loadu_si256(table.as_ptr().cast()) };
    let found = _mm256_permutevar8x32_epi32(table, code);
    let value = match IS_E5M2 {
        true => _mm256_blendv_epi8(normal, found, _mm256_or_si256(is_small, is_special)),
        // Eight subnormal numbers fill the table; a word of ones is NaN, too.
        false => _mm256_or_si256(_mm256_blendv_epi8(normal, found, is_small), is_special),
    };
    _mm256_castsi256_ps(_mm256_or_si256(value, _mm256_and_si256(code, splat(0x8000_0000))))
}

/// Implements [`Lanes::decode_fp4`].
#[inline]
#[target_feature(enable = "avx2")]
fn decode_fp4(codes: __m256, step: usize) -> __m256 {
    let codes = _mm256_castps_si256(codes);
    let splat = |bits: u32| _mm256_set1_epi32(bits.cast_signed());
    // SAFETY: the table is longer than the 8 words that are read, the magnitudes.
    let table = unsafe { _mm256_loadu_ps(FP4_VALUES.as_ptr().cast()) };
    // The lowest three bits decide.
    let magnitude = _mm256_permutevar8x32_ps(table, _mm256_srlv_epi32(codes, splat(4 * step as u32)));
    let sign = _mm256_sllv_epi32(codes, splat(28 - 4 * step as u32));
    let sign = _mm256_and_si256(sign, splat(0x8000_0000));
    _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
}

/// The offset of unsigned bytes: the instruction that multiplies bytes takes unsigned and signed ones.
pub(super) const OFFSET: u8 = 12;

/// Implements [`Lanes::look_up`].
#[inline]
#[target_feature(enable = "avx")]
pub(super) fn look_up(codes: [u8; 8], table: &[u8; 16]) -> [u32; 4] {
    let codes = _mm_cvtsi64_si128(i64::from_le_bytes(codes));
    let all = _mm_unpacklo_epi8(codes, _mm_srli_epi64::<4>(codes));
    let all = _mm_and_si128(all, _mm_set1_epi8(0xF));
    // SAFETY: the table is 16 bytes long.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let bytes = _mm_shuffle_epi8(table, all);
    let mut words = [0; 4];
    // SAFETY: the words have 16 bytes.
    unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), bytes) };
    words
}

/// Implements [`Lanes::block_sum`]. A sum is two integers of 16 bits, each of them less than 2 · 16 · 24 · 12.
#[inline]
#[target_feature(enable = "avx2")]
fn block_sum(a: [__m256; 4], b: [__m256; 4], start: __m256) -> __m256 {
    let mut sums = _mm256_castps_si256(start);
    for (a, b) in a.into_iter().zip(b) {
        let products = _mm256_maddubs_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b));
        sums = _mm256_add_epi16(sums, products);
    }
    _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)))
}

/// Implements [`Lanes::block_start`].
#[inline]
#[target_feature(enable = "avx2")]
fn block_start(b: [__m256; 4]) -> __m256 {
    let mut start = _mm256_setzero_si256();
    for b in b {
        let products = _mm256_maddubs_epi16(_mm256_set1_epi8(OFFSET.cast_signed()), _mm256_castps_si256(b));
        start = _mm256_sub_epi16(start, products);
    }
    _mm256_castsi256_ps(start)
}

/// Implements [`Lanes::widen`].
#[inline]
#[target_feature(enable = "avx2")]
fn widen(values: __m256, step: usize) -> __m256 {
    let values = _mm256_castps_si256(values);
    _mm256_castsi256_ps(match step {
        0 => _mm256_slli_epi32::<16>(values),
        _ => _mm256_and_si256(values, _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed())),
    })
}
