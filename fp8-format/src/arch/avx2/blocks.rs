//! Blocks with scales of their own, in the vectors of one scale: 32 elements at a time.

use super::decode::{fill, scaled};
use super::*;
use crate::E8M0;
use crate::arch::blocks::{self, F32Rule, MxRule, Rule, SIDE};

#[target_feature(enable = "avx2")]
pub(crate) fn scales(rule: &F32Rule, amaxes: &[f32], scales: &mut [f32], scale_inv: &mut [f32]) {
    blocks::scales(rule, amaxes, scales, scale_inv);
}

#[target_feature(enable = "avx2")]
pub(crate) fn mx_scales(rule: MxRule, amaxes: &[f32], factors: &mut [f32], scales: &mut [E8M0]) {
    blocks::mx_scales(rule, amaxes, factors, scales);
}

/// The amaxes of blocks of so many elements; the last may have fewer.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn amaxes<S: Source>(src: &[S], block: usize, amaxes: &mut [f32]) {
    for (amax, block) in amaxes.iter_mut().zip(src.chunks(block)) {
        let (parts, rest) = block.as_chunks::<BLOCK>();
        let mut running = Amax::new();
        parts.iter().for_each(|part| running.add(floats(part)));
        if !rest.is_empty() {
            let mut last = [S::default(); BLOCK];
            last[..rest.len()].copy_from_slice(rest);
            running.add(floats(&last));
        }
        *amax = running.total();
    }
}

/// Raises amaxes to the magnitudes of the elements beside them.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn amax_columns<S: Source>(src: &[S], amaxes: &mut [f32]) {
    let raise = |block: &[S; BLOCK], amaxes: &mut [f32; BLOCK]| {
        let first = amaxes.as_mut_ptr();
        for (i, x) in floats::<S, BLOCK, 4>(block).into_iter().enumerate() {
            // SAFETY: 8 of the 32 floats, from 8 · i on.
            let amax = unsafe { _mm256_loadu_ps(first.wrapping_add(8 * i)) };
            // Of a NaN and a number, `max` gives its second operand.
            let amax = _mm256_max_ps(_mm256_castsi256_ps(abs(x)), amax);
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(first.wrapping_add(8 * i), amax) };
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

/// Codes of blocks, each multiplied by a scale of its own.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn quantize_blocks<S: Source, T: Target>(
    src: &[S],
    block: usize,
    scales: &[f32],
    dst: &mut [u8],
    streams: bool,
) {
    if block.is_multiple_of(BLOCK) {
        // Where `dst` is aligned, the vectors come in order.
        let streams = streams && is_aligned(dst);
        let mut numbers = 0..;
        drive(src, dst, streams, |x| {
            let first = BLOCK * numbers.next().unwrap_or(0_usize);
            times::<T>(floats(x), scales.get(first / block).copied().unwrap_or(1.0))
        });
    } else {
        for ((src, scale), dst) in src.chunks(block).zip(scales).zip(dst.chunks_mut(block)) {
            drive(src, dst, false, |x| times::<T>(floats(x), *scale));
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn times<T: Target>([a, b, c, d]: [__m256; 4], scale: f32) -> Codes {
    let scale = _mm256_set1_ps(scale);
    let mul = |x| _mm256_mul_ps(x, scale);
    encode_floats::<T>([mul(a), mul(b), mul(c), mul(d)]).0
}

/// Codes of blocks with the factors that `rule` makes of their amaxes, which are stored.
#[target_feature(enable = "avx2,f16c")]
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
#[target_feature(enable = "avx2,f16c")]
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
#[target_feature(enable = "avx2,f16c")]
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
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn quantize_columns<S: Source, T: Target>(src: &[S], scales: &[f32], dst: &mut [u8]) {
    let (whole, rest) = scales.as_chunks::<BLOCK>();
    let mut last = [1.0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let mut whole = whole.iter();
    drive(src, dst, false, |x| {
        let scales: [__m256; 4] = floats(whole.next().unwrap_or(&last));
        let [a, b, c, d] = floats(x);
        let mul = |x, i: usize| _mm256_mul_ps(x, scales[i]);
        encode_floats::<T>([mul(a, 0), mul(b, 1), mul(c, 2), mul(d, 3)]).0
    });
}

/// The values of codes in blocks, each multiplied by a factor of its own.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn dequantize_blocks<T: Target, D: Source>(
    src: &[u8],
    block: usize,
    scale_inv: &[f32],
    dst: &mut [D],
    streams: bool,
) {
    if block.is_multiple_of(BLOCK) {
        // Where `dst` is aligned, the vectors come in order.
        let streams = streams && dst.as_ptr().cast::<__m512i>().is_aligned();
        let mut numbers = 0..;
        fill(src, dst, streams, |codes| {
            let first = BLOCK * numbers.next().unwrap_or(0_usize);
            let factor = scale_inv.get(first / block).copied().unwrap_or(1.0);
            scaled::<T, D>(codes, _mm256_set1_ps(factor))
        });
    } else {
        for ((src, scale_inv), dst) in src.chunks(block).zip(scale_inv).zip(dst.chunks_mut(block)) {
            dequantize::<T, D>(src, *scale_inv, dst, streams);
        }
    }
}
