//! Blocks with scales of their own, one after the other.

use super::{Amax, BLOCK, encode_one};
use crate::E8M0;
use crate::arch::blocks::{self, F32Rule, MxRule, Rule, SIDE};
use crate::arch::target::Target;
use crate::traits::Source;

pub(crate) fn scales(rule: &F32Rule, amaxes: &[f32], scales: &mut [f32], scale_inv: &mut [f32]) {
    blocks::scales(rule, amaxes, scales, scale_inv);
}

pub(crate) fn mx_scales(rule: MxRule, amaxes: &[f32], factors: &mut [f32], scales: &mut [E8M0]) {
    blocks::mx_scales(rule, amaxes, factors, scales);
}

/// The amaxes of blocks of so many elements; the last may have fewer.
pub(crate) fn amaxes<S: Source>(src: &[S], block: usize, amaxes: &mut [f32]) {
    for (amax, block) in amaxes.iter_mut().zip(src.chunks(block)) {
        let (parts, rest) = block.as_chunks::<{ BLOCK / 2 }>();
        let mut running = Amax([0.0; BLOCK / 2]);
        parts.iter().for_each(|part| running.add(&part.map(S::to_f32)));
        rest.iter().for_each(|x| running.add(&[x.to_f32()]));
        *amax = running.total();
    }
}

/// Raises amaxes to the magnitudes of the elements beside them.
pub(crate) fn amax_columns<S: Source>(src: &[S], amaxes: &mut [f32]) {
    for (amax, x) in amaxes.iter_mut().zip(src) {
        let a = x.to_f32().abs();
        *amax = if a > *amax { a } else { *amax };
    }
}

/// Codes of blocks, each multiplied by a scale of its own.
pub(crate) fn quantize_blocks<S: Source, T: Target>(
    src: &[S],
    block: usize,
    scales: &[f32],
    dst: &mut [u8],
    _streams: bool,
) {
    for ((src, scale), dst) in src.chunks(block).zip(scales).zip(dst.chunks_mut(block)) {
        for (code, x) in dst.iter_mut().zip(src) {
            *code = encode_one::<f32, T>(x.to_f32() * scale);
        }
    }
}

/// Codes of blocks with the factors that `rule` makes of their amaxes, which are stored.
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
pub(crate) fn quantize_columns<S: Source, T: Target>(src: &[S], scales: &[f32], dst: &mut [u8]) {
    for ((code, x), scale) in dst.iter_mut().zip(src).zip(scales) {
        *code = encode_one::<f32, T>(x.to_f32() * scale);
    }
}

/// The values of codes in blocks, each multiplied by a factor of its own.
pub(crate) fn dequantize_blocks<T: Target, D: Source>(
    src: &[u8],
    block: usize,
    scale_inv: &[f32],
    dst: &mut [D],
    streams: bool,
) {
    for ((src, scale_inv), dst) in src.chunks(block).zip(scale_inv).zip(dst.chunks_mut(block)) {
        super::dequantize::<T, D>(src, *scale_inv, dst, streams);
    }
}
