//! The lanes of AVX-512: f32, and pairs of bf16 values with `vdpbf16ps`.

use super::avx2::{OFFSET, look_up};
use super::decoding::{Decoding, FP4_VALUES};
use super::lanes::{Job, Lanes};
use crate::Result;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Proof that the CPU has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

/// Proof that the CPU has AVX-512 F, BW, DQ, VL and BF16, and that `vdpbf16ps` rounds as two fused multiply-adds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma");
        has_all.then_some(Self(()))
    }
}

impl Avx512Bf16 {
    pub(super) fn detect() -> Option<Self> {
        static ROUNDS_TWICE: OnceLock<bool> = OnceLock::new();
        let lanes = Self(Avx512::detect()?);
        let has_it = is_x86_feature_detected!("avx512bf16");
        (has_it && *ROUNDS_TWICE.get_or_init(|| super::pair_rounding::rounds_twice(lanes))).then_some(lanes)
    }
}

/// Runs `job`, compiled for AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn run(job: impl Job, lanes: Avx512) -> Result<()> {
    job.run(lanes)
}

/// Runs `job`, compiled for AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) fn run_bf16(job: impl Job, lanes: Avx512Bf16) -> Result<()> {
    job.run(lanes)
}

/// Writes an implementation of `Lanes` for 16 lanes.
macro_rules! lanes {
    ($name:ident, $pairs:literal, $decode:ident, $decode_fp4:ident, |$sums:ident, $a:ident, $b:ident| $multiply_add:expr) => {
        impl Lanes for $name {
            type Vector = __m512;
            type Square = [__m512; 16];

            const WIDTH: usize = 16;
            const ROWS: usize = 12;
            const PAIRS: bool = $pairs;
            const OFFSET: u8 = OFFSET;

            #[inline(always)]
            fn zero(self) -> __m512 {
                // SAFETY: `self` proves AVX-512 F.
                unsafe { _mm512_setzero_ps() }
            }

            #[inline(always)]
            fn splat(self, word: u32) -> __m512 {
                // SAFETY: `self` proves AVX-512 F.
                unsafe { _mm512_set1_ps(f32::from_bits(word)) }
            }

            #[inline(always)]
            unsafe fn words(self, from: *const u32) -> __m512 {
                // SAFETY: `self` proves AVX-512 F; the caller vouches for 16 words.
                unsafe { _mm512_loadu_ps(from.cast()) }
            }

            #[inline(always)]
            unsafe fn sums(self, from: *const f32) -> __m512 {
                // SAFETY: `self` proves AVX-512 F; the caller vouches for 16 values.
                unsafe { _mm512_loadu_ps(from) }
            }

            #[inline(always)]
            unsafe fn store(self, sums: __m512, to: *mut f32) {
                // SAFETY: `self` proves AVX-512 F; the caller vouches for 16 values.
                unsafe { _mm512_storeu_ps(to, sums) }
            }

            #[inline(always)]
            fn multiply_add(self, $sums: __m512, $a: __m512, $b: __m512) -> __m512 {
                // SAFETY: `self` proves AVX-512 F and, where it is used, BF16.
                unsafe { $multiply_add }
            }

            #[inline(always)]
            fn add_product(self, sums: __m512, others: __m512, factors: __m512) -> __m512 {
                // SAFETY: `self` proves AVX-512 F.
                unsafe { _mm512_fmadd_ps(others, factors, sums) }
            }

            #[inline(always)]
            fn multiply(self, a: __m512, b: __m512) -> __m512 {
                // SAFETY: `self` proves AVX-512 F.
                unsafe { _mm512_mul_ps(a, b) }
            }

            #[inline(always)]
            fn look_up(self, codes: [u8; 8], table: &[u8; 16]) -> [u32; 4] {
                // SAFETY: `self` proves AVX2.
                unsafe { look_up(codes, table) }
            }

            #[inline(always)]
            fn block_sum(self, a: [__m512; 4], b: [__m512; 4], start: __m512) -> __m512 {
                // SAFETY: `self` proves AVX-512 F and BW.
                unsafe { block_sum(a, b, start) }
            }

            #[inline(always)]
            fn block_start(self, b: [__m512; 4]) -> __m512 {
                // SAFETY: `self` proves AVX-512 F and BW.
                unsafe { block_start(b) }
            }

            #[inline(always)]
            fn canonical(self, sums: __m512) -> __m512 {
                // SAFETY: `self` proves AVX-512 F.
                let is_nan = unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums) };
                let nan = self.splat(f32::NAN.to_bits());
                // SAFETY: as above.
                unsafe { _mm512_mask_mov_ps(sums, is_nan, nan) }
            }

            #[inline(always)]
            unsafe fn columns(self, from: *const u32, stride: usize) -> [__m512; 16] {
                // SAFETY: `self` proves AVX-512 F; the caller vouches for the words.
                unsafe { columns(from, stride) }
            }

            #[inline(always)]
            fn decode<const IS_E5M2: bool>(self, codes: __m512, step: usize) -> __m512 {
                // SAFETY: `self` proves AVX-512 F and BW.
                unsafe { $decode::<IS_E5M2>(codes, step) }
            }

            #[inline(always)]
            fn decode_fp4(self, codes: __m512, step: usize) -> __m512 {
                // SAFETY: `self` proves AVX-512 F and BW.
                unsafe { $decode_fp4(codes, step) }
            }

            #[inline(always)]
            fn widen(self, values: __m512, step: usize) -> __m512 {
                // SAFETY: `self` proves AVX-512 F.
                unsafe { widen(values, step) }
            }

            #[inline(always)]
            fn prefetch(self, address: *const u32) {
                // SAFETY: a hint, which reads nothing and faults at no address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
            }
        }
    };
}

lanes!(Avx512, false, decode, decode_fp4, |sums, a, b| _mm512_fmadd_ps(a, b, sums));
lanes!(Avx512Bf16, true, decode_pairs, decode_fp4_pairs, |sums, a, b| _mm512_dpbf16_ps(
    sums,
    pairs(a),
    pairs(b)
));

/// The same bits as pairs of bf16 values.
#[inline(always)]
fn pairs(words: __m512) -> __m512bh {
    // SAFETY: both types are 512 bits of any value.
    unsafe { std::mem::transmute(words) }
}

/// Returns the columns of 16 × 16 words: within groups of 4 × 4 by two rounds of interleaving, then the groups by two rounds of
/// 128-bit moves.
///
/// # Safety
/// The CPU must have AVX-512 F. `from` must have 16 rows of 16 readable words.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn columns(from: *const u32, stride: usize) -> [__m512; 16] {
    let mut rows = [_mm512_setzero_si512(); 16];
    for (j, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller vouches for row j.
        *row = unsafe { _mm512_loadu_si512(from.wrapping_add(j * stride).cast()) };
    }
    let mut pairs = rows;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    let mut fours = rows;
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // fours[4g + c] holds the columns c, 4 + c, 8 + c and 12 + c of the rows 4g … 4g + 3.
    let mut columns = [_mm512_setzero_ps(); 16];
    for c in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x88>(fours[c], fours[c + 4]);
        let high = _mm512_shuffle_i32x4::<0xDD>(fours[c], fours[c + 4]);
        let low_2 = _mm512_shuffle_i32x4::<0x88>(fours[c + 8], fours[c + 12]);
        let high_2 = _mm512_shuffle_i32x4::<0xDD>(fours[c + 8], fours[c + 12]);
        columns[c] = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0x88>(low, low_2));
        columns[c + 4] = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0x88>(high, high_2));
        columns[c + 8] = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0xDD>(low, low_2));
        columns[c + 12] = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0xDD>(high, high_2));
    }
    columns
}

/// For each byte of a word, where it comes from if step `step` of it is read: code i in the lowest byte, for the magnitude, and in the
/// highest, for the sign.
const fn shuffle(step: usize, pairs: bool) -> [u32; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        let first = (i % 4 * 4) as u32;
        // A byte with its highest bit set is zero.
        out[i] = if pairs {
            let (high, low) = (first + 2 * step as u32, first + 2 * step as u32 + 1);
            low | low << 8 | high << 16 | high << 24
        } else {
            let code = first + step as u32;
            code | 0x80_8000 | code << 24
        };
        i += 1;
    }
    out
}

/// Implements [`Lanes::decode`] in f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode<const IS_E5M2: bool>(codes: __m512, step: usize) -> __m512 {
    const SHUFFLES: [[u32; 16]; 4] =
        [shuffle(0, false), shuffle(1, false), shuffle(2, false), shuffle(3, false)];
    let splat = |bits: u32| _mm512_set1_epi32(bits.cast_signed());
    let code = _mm512_shuffle_epi8(_mm512_castps_si512(codes), words(&SHUFFLES[step]));
    let shifted = match IS_E5M2 {
        true => _mm512_slli_epi32::<{ Decoding::<true>::SHIFT }>(code),
        false => _mm512_slli_epi32::<{ Decoding::<false>::SHIFT }>(code),
    };
    let magnitude = _mm512_and_si512(shifted, splat(Decoding::<IS_E5M2>::MAGNITUDE));
    let normal = _mm512_add_epi32(magnitude, splat(Decoding::<IS_E5M2>::BIAS));
    // What is below wraps around.
    let above = _mm512_sub_epi32(magnitude, splat(Decoding::<IS_E5M2>::NORMAL));
    let range = Decoding::<IS_E5M2>::SPECIAL - Decoding::<IS_E5M2>::NORMAL;
    let is_not_normal = _mm512_cmpge_epu32_mask(above, splat(range));
    let table = words(const { &Decoding::<IS_E5M2>::table::<16>() });
    let value = _mm512_mask_permutexvar_epi32(normal, is_not_normal, code, table);
    // The sign of the code, the rest of the value.
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xF8>(value, code, splat(0x8000_0000)))
}

/// Implements [`Lanes::decode`] in pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_pairs<const IS_E5M2: bool>(codes: __m512, step: usize) -> __m512 {
    const SHUFFLES: [[u32; 16]; 2] = [shuffle(0, true), shuffle(1, true)];
    let splat = |bits: u32| _mm512_set1_epi16(((bits >> 16) as u16).cast_signed());
    let code = _mm512_shuffle_epi8(_mm512_castps_si512(codes), words(&SHUFFLES[step]));
    let shifted = match IS_E5M2 {
        true => _mm512_slli_epi16::<{ Decoding::<true>::SHIFT - 16 }>(code),
        false => _mm512_slli_epi16::<{ Decoding::<false>::SHIFT - 16 }>(code),
    };
    let magnitude = _mm512_and_si512(shifted, splat(Decoding::<IS_E5M2>::MAGNITUDE));
    let normal = _mm512_add_epi16(magnitude, splat(Decoding::<IS_E5M2>::BIAS));
    let above = _mm512_sub_epi16(magnitude, splat(Decoding::<IS_E5M2>::NORMAL));
    let range = Decoding::<IS_E5M2>::SPECIAL - Decoding::<IS_E5M2>::NORMAL;
    let is_not_normal = _mm512_cmpge_epu16_mask(above, splat(range));
    let table = const { &Decoding::<IS_E5M2>::bf16_table::<32>() };
    // SAFETY: the table is 64 bytes long.
    let table = unsafe { _mm512_loadu_si512(table.as_ptr().cast()) };
    let value = _mm512_mask_permutexvar_epi16(normal, is_not_normal, code, table);
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xF8>(value, code, splat(0x8000_0000)))
}

/// Implements [`Lanes::block_sum`] as AVX2 does.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn block_sum(a: [__m512; 4], b: [__m512; 4], start: __m512) -> __m512 {
    let mut sums = _mm512_castps_si512(start);
    for (a, b) in a.into_iter().zip(b) {
        let products = _mm512_maddubs_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b));
        sums = _mm512_add_epi16(sums, products);
    }
    _mm512_cvtepi32_ps(_mm512_madd_epi16(sums, _mm512_set1_epi16(1)))
}

/// Implements [`Lanes::block_start`] as AVX2 does.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn block_start(b: [__m512; 4]) -> __m512 {
    let mut start = _mm512_setzero_si512();
    for b in b {
        let products = _mm512_maddubs_epi16(_mm512_set1_epi8(OFFSET.cast_signed()), _mm512_castps_si512(b));
        start = _mm512_sub_epi16(start, products);
    }
    _mm512_castsi512_ps(start)
}

/// Implements [`Lanes::decode_fp4`] in f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn decode_fp4(codes: __m512, step: usize) -> __m512 {
    let shift = _mm512_set1_epi32(4 * step as i32);
    // The lowest four bits decide.
    let code = _mm512_srlv_epi32(_mm512_castps_si512(codes), shift);
    _mm512_castsi512_ps(_mm512_permutexvar_epi32(code, words(&FP4_VALUES)))
}

/// Implements [`Lanes::decode_fp4`] in pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_fp4_pairs(codes: __m512, step: usize) -> __m512 {
    /// The values in bf16, twice: five bits choose one of them, of which four are the code.
    const TABLE: [u16; 32] = {
        let mut table = [0; 32];
        let mut i = 0;
        while i < 32 {
            table[i] = (FP4_VALUES[i % 16] >> 16) as u16;
            i += 1;
        }
        table
    };
    let codes = _mm512_castps_si512(codes);
    // The first code to the lowest bits of the high half, the second to those of the low half.
    let high = _mm512_rolv_epi32(codes, _mm512_set1_epi32((48 - 8 * step as i32) % 32));
    let low = _mm512_srlv_epi32(codes, _mm512_set1_epi32(8 * step as i32 + 4));
    let code = _mm512_mask_blend_epi16(0xAAAA_AAAA, low, high);
    // SAFETY: the table is 64 bytes long.
    let table = unsafe { _mm512_loadu_si512(TABLE.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_permutexvar_epi16(code, table))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words(words: &[u32; 16]) -> __m512i {
    // SAFETY: the array is 64 bytes long.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// Implements [`Lanes::widen`].
#[inline]
#[target_feature(enable = "avx512f")]
fn widen(values: __m512, step: usize) -> __m512 {
    let values = _mm512_castps_si512(values);
    _mm512_castsi512_ps(match step {
        0 => _mm512_slli_epi32::<16>(values),
        _ => _mm512_and_si512(values, _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed())),
    })
}
