//! Blocks with scales of their own, in the vectors of one scale: 32 elements at a time.

use super::*;
use crate::E8M0;
use crate::arch::blocks::{self, F32Rule, MxRule, Rule, SIDE};

#[target_feature(enable = "neon")]
pub(crate) fn scales(rule: &F32Rule, amaxes: &[f32], scales: &mut [f32], scale_inv: &mut [f32]) {
    blocks::scales(rule, amaxes, scales, scale_inv);
}

#[target_feature(enable = "neon")]
pub(crate) fn mx_scales(rule: MxRule, amaxes: &[f32], factors: &mut [f32], scales: &mut [E8M0]) {
    blocks::mx_scales(rule, amaxes, factors, scales);
}

/// The amaxes of blocks of so many elements; the last may have fewer.
#[target_feature(enable = "neon")]
pub(crate) fn amaxes<S: Source>(src: &[S], block: usize, amaxes: &mut [f32]) {
    for (amax, block) in amaxes.iter_mut().zip(src.chunks(block)) {
        let (parts, rest) = block.as_chunks::<BLOCK>();
        let mut running = Amax::new();
        parts.iter().for_each(|part| running.add(&floats(part)));
        if !rest.is_empty() {
            let mut last = [S::default(); BLOCK];
            last[..rest.len()].copy_from_slice(rest);
            running.add(&floats(&last));
        }
        *amax = running.total();
    }
}

/// Raises amaxes to the magnitudes of the elements beside them: the portable loop, in this path's vectors.
#[target_feature(enable = "neon")]
pub(crate) fn amax_columns<S: Source>(src: &[S], amaxes: &mut [f32]) {
    scalar::amax_columns::<S>(src, amaxes);
}

/// Codes of blocks, each multiplied by a scale of its own.
#[target_feature(enable = "neon")]
pub(crate) fn quantize_blocks<S: Source, T: Target>(
    src: &[S],
    block: usize,
    scales: &[f32],
    dst: &mut [u8],
    _streams: bool,
) {
    for ((src, scale), dst) in src.chunks(block).zip(scales).zip(dst.chunks_mut(block)) {
        let scale = vdupq_n_f32(*scale);
        drive(src, dst, |x| encode_floats::<T>(&floats(x).map(|half| half.map(|x| vmulq_f32(x, scale)))));
    }
}

/// Codes of blocks with the factors that `rule` makes of their amaxes, which are stored.
#[target_feature(enable = "neon")]
pub(crate) fn quantize_rows<S: Source, T: Target>(
    src: &[S],
    block: usize,
    rule: &Rule,
    amaxes: &mut [f32],
    dst: &mut [u8],
    streams: bool,
) {
    let find = |src: &[S], amaxes: &mut [f32]| self::amaxes::<S>(src, block, amaxes);
    let encode = |src: &[S], factors: &[f32], dst: &mut [u8]| {
        quantize_blocks::<S, T>(src, block, factors, dst, streams);
    };
    blocks::in_groups(src, block, rule, amaxes, dst, find, encode);
}

/// Codes of a row with the factor that `rule` makes of its amax, which is returned.
#[target_feature(enable = "neon")]
pub(crate) fn quantize_row<S: Source, T: Target>(
    src: &[S],
    rule: &Rule,
    dst: &mut [u8],
    streams: bool,
) -> f32 {
    let amax = super::amax::<S>(src);
    quantize_blocks::<S, T>(src, src.len(), &[rule.factor(amax)], dst, streams);
    amax
}

/// Codes of a row of tiles with the factors that `rule` makes of their amaxes, which are stored.
#[target_feature(enable = "neon")]
pub(crate) fn quantize_tiles<S: Source, T: Target>(
    src: &[S],
    shape: [usize; 3],
    rule: &Rule,
    amaxes: &mut [f32],
    dst: &mut [u8],
    streams: bool,
) {
    let find = |src: &[S], amaxes: &mut [f32]| self::amaxes::<S>(src, SIDE, amaxes);
    let encode = |src: &[S], factors: &[f32], dst: &mut [u8]| {
        quantize_blocks::<S, T>(src, SIDE, factors, dst, streams);
    };
    blocks::in_tiles(src, shape, rule, amaxes, dst, find, encode);
}

/// Codes of elements, each multiplied by the scale beside it.
#[target_feature(enable = "neon")]
pub(crate) fn quantize_columns<S: Source, T: Target>(src: &[S], scales: &[f32], dst: &mut [u8]) {
    let (whole, rest) = scales.as_chunks::<BLOCK>();
    let mut last = [1.0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let mut whole = whole.iter();
    drive(src, dst, |x| {
        let [scales_low, scales_high] = floats(whole.next().unwrap_or(&last));
        let [low, high] = floats(x);
        let mul = |x: Floats, scales: Floats| {
            let product = |i: usize| vmulq_f32(x[i], scales[i]);
            [product(0), product(1), product(2), product(3)]
        };
        encode_floats::<T>(&[mul(low, scales_low), mul(high, scales_high)])
    });
}

/// The values of codes in blocks, each multiplied by a factor of its own.
#[target_feature(enable = "neon")]
pub(crate) fn dequantize_blocks<T: Target, D: Source>(
    src: &[u8],
    block: usize,
    scale_inv: &[f32],
    dst: &mut [D],
    _streams: bool,
) {
    let decoder = Decoder::new::<T, f32>();
    for ((src, scale_inv), dst) in src.chunks(block).zip(scale_inv).zip(dst.chunks_mut(block)) {
        let scale_inv = vdupq_n_f32(*scale_inv);
        fill(src, dst, |codes| scaled::<D>(&decoder, codes, scale_inv));
    }
}
