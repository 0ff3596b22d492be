//! The lanes of NEON. Its BF16 instructions are not used: their rounding depends on the CPU.

use super::lanes::Lanes;
use std::arch::aarch64::*;

/// Proof that the CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

impl Lanes for Neon {
    type Vector = float32x4_t;
    type Square = [float32x4_t; 4];

    const WIDTH: usize = 4;
    const ROWS: usize = 12;
    const PAIRS: bool = false;

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
    fn canonical(self, sums: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves NEON.
        let is_number = unsafe { vceqq_f32(sums, sums) };
        let nan = self.splat(f32::NAN.to_bits());
        // SAFETY: as above.
        unsafe { vbslq_f32(is_number, sums, nan) }
    }

    #[inline(always)]
    unsafe fn columns(self, from: *const u32, stride: usize) -> [float32x4_t; 4] {
        std::array::from_fn(|i| {
            // SAFETY: the caller vouches for 4 words of each of 4 rows.
            let words: [u32; 4] = std::array::from_fn(|j| unsafe { *from.wrapping_add(j * stride + i) });
            // SAFETY: the array has 4 words.
            unsafe { self.words(words.as_ptr()) }
        })
    }

    #[inline(always)]
    fn prefetch(self, _: *const u32) {}
}
