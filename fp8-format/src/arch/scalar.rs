//! One element after the other, in loops that the compiler may turn into vectors: the path of every machine, and what the
//! others are judged by.

mod blocks;
mod fp4;

use super::target::Target;
use super::{Scale, TILE};
use crate::codec;
use crate::philox::Philox;
use crate::traits::{Kind, Source};
pub(crate) use blocks::{
    amax_columns, amaxes, dequantize_blocks, mx_scales, quantize_blocks, quantize_columns, quantize_row,
    quantize_rows, quantize_tiles, scales,
};
#[cfg(all(target_arch = "x86_64", feature = "std"))]
pub(crate) use fp4::FP4_VALUES;
pub(crate) use fp4::{FP4_BLOCK, Peak, fp4_codes, fp4_peaks, fp4_scales, fp4_values, fp4_words};

/// Elements that loops take at a time: enough for the widest vectors, few enough for registers or the nearest cache.
const BLOCK: usize = 64;

#[inline(always)]
fn encode_one<S: Source, T: Target>(x: S) -> u8 {
    T::FORMAT.encode_f32(x.to_f32(), T::TOP)
}

#[inline]
pub(crate) fn encode<S: Source, T: Target>(src: &[S], dst: &mut [u8], _streams: bool) {
    for (code, x) in dst.iter_mut().zip(src) {
        *code = encode_one::<S, T>(*x);
    }
}

/// Independent running maxima, so that the reduction is vector code, too. `a > max` is false for NaN, which is thereby
/// passed over.
struct Amax([f32; 32]);

impl Amax {
    #[inline(always)]
    fn add(&mut self, values: &[f32]) {
        for (max, v) in self.0.iter_mut().zip(values) {
            let a = v.abs();
            *max = if a > *max { a } else { *max };
        }
    }

    #[inline(always)]
    fn add_block(&mut self, block: &[f32; BLOCK]) {
        let [low, high] = [&block[..BLOCK / 2], &block[BLOCK / 2..]];
        self.add(low);
        self.add(high);
    }

    #[inline(always)]
    fn total(self) -> f32 {
        self.0.into_iter().fold(0.0, |max, a| if a > max { a } else { max })
    }
}

#[inline]
pub(crate) fn amax<S: Source>(src: &[S]) -> f32 {
    let (blocks, rest) = src.as_chunks::<BLOCK>();
    let mut amax = Amax([0.0; 32]);
    for block in blocks {
        amax.add_block(&block.map(S::to_f32));
    }
    for x in rest {
        amax.add(&[x.to_f32()]);
    }
    amax.total()
}

#[inline]
pub(crate) fn quantize<S: Source, T: Target>(
    src: &[S],
    scale: &Scale,
    dst: &mut [u8],
    _streams: bool,
) -> f32 {
    let scale = scale.value;
    let (blocks, src_rest) = src.as_chunks::<BLOCK>();
    let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
    let mut amax = Amax([0.0; 32]);
    for (block, codes) in blocks.iter().zip(dst_blocks) {
        let values = block.map(S::to_f32);
        for (code, v) in codes.iter_mut().zip(&values) {
            *code = encode_one::<f32, T>(*v * scale);
        }
        amax.add_block(&values);
    }
    for (code, x) in dst_rest.iter_mut().zip(src_rest) {
        let v = x.to_f32();
        *code = encode_one::<f32, T>(v * scale);
        amax.add(&[v]);
    }
    amax.total()
}

#[inline]
pub(crate) fn decode<T: Target, D: Source>(src: &[u8], dst: &mut [D], _streams: bool) {
    for (d, code) in dst.iter_mut().zip(src) {
        *d = D::of_bits(match D::KIND {
            Kind::F32 => T::FORMAT.decode_f32(*code).to_bits(),
            Kind::F16 => T::FORMAT.decode_f16(*code).into(),
            Kind::BF16 => T::FORMAT.decode_bf16(*code).into(),
        });
    }
}

#[inline]
pub(crate) fn dequantize<T: Target, D: Source>(src: &[u8], scale_inv: f32, dst: &mut [D], _streams: bool) {
    for (d, code) in dst.iter_mut().zip(src) {
        let v = T::FORMAT.decode_f32(*code) * scale_inv;
        *d = D::from_f32(if v.is_nan() { f32::from_bits(codec::F32_ABS) } else { v });
    }
}

/// Stochastic rounding with the words of a stream. Other paths compile this loop for their vectors.
#[inline(always)]
pub(crate) fn stochastic<S: Source, T: Target>(src: &[S], scale: f32, random: Philox, dst: &mut [u8]) {
    let round = |src: &[S], dst: &mut [u8], words: &[u32]| {
        for ((code, x), word) in dst.iter_mut().zip(src).zip(words) {
            *code = T::FORMAT.encode_f32_stochastic(x.to_f32() * scale, *word);
        }
    };
    // The words that a counter has left for the first elements, then counters by the block.
    let head = random.left().min(src.len());
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    for (i, (x, code)) in (0..).zip(src_head.iter().zip(dst_head)) {
        round(&[*x], core::slice::from_mut(code), &[random.word(i)]);
    }
    let mut random = random.at(head as u64);
    for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK)) {
        round(src, dst, &random.block());
        random = random.at(BLOCK as u64);
    }
}

/// Writes the columns of a tile as rows of `dst`, `stride` apart.
#[inline]
pub(crate) fn transpose(src: &[u8], src_stride: usize, dst: &mut [u8], stride: usize, _streams: bool) {
    for (c, line) in dst.chunks_mut(stride).enumerate().take(TILE) {
        for (byte, row) in line.iter_mut().zip(src.chunks(src_stride)).take(TILE) {
            *byte = row[c];
        }
    }
}

/// Codes as they are.
pub(crate) fn copy(src: &[u8], dst: &mut [u8], _streams: bool) {
    dst.copy_from_slice(src);
}

/// Nothing: the processor fetches by itself.
pub(crate) fn fetch<S: Source>(_src: &[S]) {}

/// Nothing: no store here is streamed.
pub(crate) fn fence() {}
