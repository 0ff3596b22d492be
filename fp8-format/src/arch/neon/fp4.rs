//! Blocks of E2M1: the portable loops, in this path's vectors.

use crate::arch::scalar::{self, Peak};
use crate::philox::BlockRandom;
use crate::traits::Source;
use crate::{E4M3, TensorScale};

#[target_feature(enable = "neon")]
pub(crate) fn fp4_peaks<S: Source>(src: &[S], peaks: &mut [Peak]) {
    scalar::fp4_peaks(src, peaks);
}

#[target_feature(enable = "neon")]
pub(crate) fn fp4_scales(tensor: TensorScale, peaks: &[Peak], factors: &mut [f32], scales: &mut [E4M3]) {
    scalar::fp4_scales(tensor, peaks, factors, scales);
}

#[target_feature(enable = "neon")]
pub(crate) fn fp4_words(random: BlockRandom, step: u64, words: &mut [[u32; 4]]) {
    scalar::fp4_words(random, step, words);
}

#[target_feature(enable = "neon")]
pub(crate) fn fp4_codes<S: Source>(src: &[S], factors: &[f32], words: Option<&[[u32; 4]]>, dst: &mut [u8]) {
    scalar::fp4_codes(src, factors, words, dst);
}

#[target_feature(enable = "neon")]
pub(crate) fn fp4_values<D: Source>(src: &[u8], scales: &[E4M3], decode: f32, dst: &mut [D]) {
    scalar::fp4_values(src, scales, decode, dst);
}
