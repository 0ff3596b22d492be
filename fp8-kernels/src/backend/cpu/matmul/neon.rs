//! The lanes of NEON. Its BF16 instructions are not used: their rounding depends on the CPU.

use super::decoding::{Decoding, FP4_VALUES};
use super::lanes::{Job, Lanes};
use crate::Result;
use std::arch::aarch64::*;

/// Proof that the CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

/// Runs `job`, compiled for NEON.
#[target_feature(enable = "neon")]
pub(super) fn run(job: impl Job, lanes: Neon) -> Result<()> {
    job.run(lanes)
}

impl Lanes for Neon {
    type Vector = float32x4_t;
    type Square = [float32x4_t; 4];

    const WIDTH: usize = 4;
    const ROWS: usize = 12;
    const PAIRS: bool = false;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn zero(self) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    fn splat(self, word: u32) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { vdupq_n_f32(f32::from_bits(word)) }
    }

    #[inline(always)]
    unsafe fn words(self, from: *const u32) -> float32x4_t {
        // SAFETY: `self` proves NEON; the caller vouches for 4 words.
        unsafe { vld1q_f32(from.cast()) }
    }

    #[inline(always)]
    unsafe fn sums(self, from: *const f32) -> float32x4_t {
        // SAFETY: `self` proves NEON; the caller vouches for 4 values.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn store(self, sums: float32x4_t, to: *mut f32) {
        // SAFETY: `self` proves NEON; the caller vouches for 4 values.
        unsafe { vst1q_f32(to, sums) }
    }

    #[inline(always)]
    fn multiply_add(self, sums: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { vfmaq_f32(sums, a, b) }
    }

    #[inline(always)]
    fn add_product(self, sums: float32x4_t, others: float32x4_t, factors: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { vfmaq_f32(sums, others, factors) }
    }

    #[inline(always)]
    fn multiply(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    fn block_sum(self, a: [float32x4_t; 4], b: [float32x4_t; 4], _: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { block_sum(a, b) }
    }

    #[inline(always)]
    fn block_start(self, _: [float32x4_t; 4]) -> float32x4_t {
        self.zero()
    }

    #[inline(always)]
    fn canonical(self, sums: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        let is_number = unsafe { vceqq_f32(sums, sums) };
        let nan = self.splat(f32::NAN.to_bits());
        // SAFETY: as above.
        unsafe { vbslq_f32(is_number, sums, nan) }
    }

    #[inline(always)]
    unsafe fn columns(self, from: *const u32, stride: usize) -> [float32x4_t; 4] {
        // SAFETY: `self` proves NEON; the caller vouches for the words.
        unsafe { columns(from, stride) }
    }

    #[inline(always)]
    fn decode<const IS_E5M2: bool>(self, codes: float32x4_t, step: usize) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { decode::<IS_E5M2>(codes, step) }
    }

    #[inline(always)]
    fn decode_fp4(self, codes: float32x4_t, step: usize) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { decode_fp4(codes, step) }
    }

    #[inline(always)]
    fn widen(self, values: float32x4_t, step: usize) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        unsafe { widen(values, step) }
    }

    #[inline(always)]
    fn prefetch(self, _: *const u32) {}
}

/// Returns the columns of 4 × 4 words: pairs of rows are interleaved, then pairs of pairs.
///
/// # Safety
/// The CPU must have NEON. `from` must have 4 rows of 4 readable words.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn columns(from: *const u32, stride: usize) -> [float32x4_t; 4] {
    // SAFETY: the caller vouches for row j.
    let rows: [uint32x4_t; 4] = std::array::from_fn(|j| unsafe { vld1q_u32(from.wrapping_add(j * stride)) });
    // Columns 0 and 2, then 1 and 3, of two rows.
    let even = |i: usize| vreinterpretq_u64_u32(vtrn1q_u32(rows[i], rows[i + 1]));
    let odd = |i: usize| vreinterpretq_u64_u32(vtrn2q_u32(rows[i], rows[i + 1]));
    [
        vreinterpretq_f32_u64(vtrn1q_u64(even(0), even(2))),
        vreinterpretq_f32_u64(vtrn1q_u64(odd(0), odd(2))),
        vreinterpretq_f32_u64(vtrn2q_u64(even(0), even(2))),
        vreinterpretq_f32_u64(vtrn2q_u64(odd(0), odd(2))),
    ]
}

/// Implements [`Lanes::decode`].
#[inline]
#[target_feature(enable = "neon")]
fn decode<const IS_E5M2: bool>(codes: float32x4_t, step: usize) -> float32x4_t {
    // The code in the highest byte of each word.
    let code = vshlq_u32(vreinterpretq_u32_f32(codes), vdupq_n_s32(24 - 8 * step as i32));
    let magnitude = match IS_E5M2 {
        true => vshrq_n_u32::<{ 24 - Decoding::<true>::SHIFT as i32 }>(code),
        false => vshrq_n_u32::<{ 24 - Decoding::<false>::SHIFT as i32 }>(code),
    };
    let magnitude = vandq_u32(magnitude, vdupq_n_u32(Decoding::<IS_E5M2>::MAGNITUDE));
    // Exact for normal and subnormal numbers; a special one has all bits of the exponent, and in E4M3 is NaN.
    let scale = vdupq_n_f32(f32::from_bits(Decoding::<IS_E5M2>::BIAS + (127 << 23)));
    let value = vreinterpretq_u32_f32(vmulq_f32(vreinterpretq_f32_u32(magnitude), scale));
    let is_special = vcgeq_u32(magnitude, vdupq_n_u32(Decoding::<IS_E5M2>::SPECIAL));
    let special = vandq_u32(is_special, vdupq_n_u32(if IS_E5M2 { 0x7F80_0000 } else { 0x7FC0_0000 }));
    let sign = vandq_u32(code, vdupq_n_u32(0x8000_0000));
    vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(value, special), sign))
}

/// Implements [`Lanes::decode_fp4`].
#[inline]
#[target_feature(enable = "neon")]
fn decode_fp4(codes: float32x4_t, step: usize) -> float32x4_t {
    /// The bytes 3 of all values, then the bytes 2. The others are 0.
    const TABLE: [u8; 32] = {
        let mut table = [0; 32];
        let mut code = 0;
        while code < 16 {
            table[code] = (FP4_VALUES[code] >> 24) as u8;
            table[16 + code] = (FP4_VALUES[code] >> 16) as u8;
            code += 1;
        }
        table
    };
    let code = vshlq_u32(vreinterpretq_u32_f32(codes), vdupq_n_s32(-4 * step as i32));
    let code = vandq_u32(code, vdupq_n_u32(0xF));
    // Where each byte of a value is found in the table: bytes 1 and 0 beyond it, which gives 0.
    let at = vmlaq_n_u32(vdupq_n_u32(0x0010_FFFF), code, 0x0101_0000);
    // SAFETY: the first 16 of 32 bytes.
    let upper = unsafe { vld1q_u8(TABLE.as_ptr()) };
    // SAFETY: the others.
    let lower = unsafe { vld1q_u8(TABLE.as_ptr().wrapping_add(16)) };
    vreinterpretq_f32_u8(vqtbl2q_u8(uint8x16x2_t(upper, lower), vreinterpretq_u8_u32(at)))
}

/// Implements [`Lanes::block_sum`].
#[inline]
#[target_feature(enable = "neon")]
fn block_sum(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> float32x4_t {
    // Four integers of 16 bits for each sum: of the first two sums, and of the others.
    let (mut low, mut high) = (vdupq_n_s16(0), vdupq_n_s16(0));
    for (a, b) in a.into_iter().zip(b) {
        let (a, b) = (vreinterpretq_s8_f32(a), vreinterpretq_s8_f32(b));
        low = vmlal_s8(low, vget_low_s8(a), vget_low_s8(b));
        high = vmlal_high_s8(high, a, b);
    }
    vcvtq_f32_s32(vpaddlq_s16(vpaddq_s16(low, high)))
}

/// Implements [`Lanes::widen`].
#[inline]
#[target_feature(enable = "neon")]
fn widen(values: float32x4_t, step: usize) -> float32x4_t {
    let values = vreinterpretq_u32_f32(values);
    vreinterpretq_f32_u32(match step {
        0 => vshlq_n_u32::<16>(values),
        _ => vandq_u32(values, vdupq_n_u32(0xFFFF_0000)),
    })
}
