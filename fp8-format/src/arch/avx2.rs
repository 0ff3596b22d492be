//! 32 elements at a time with AVX2 and F16C, in 32-bit lanes.
//!
//! Rounding is the scalar path's: a float addition does it. An even constant in the magic number's low bits makes the code
//! the low byte of `(t >> drop) + t`: the first term brings the exponent, the second the rounded significand.
//!
//! NaN is a branch per 32 elements that ordinary data never take.

mod blocks;
mod decode;
mod fp4;

use super::interleave::{sixteen, turn};
use super::target::Target;
use super::{Scale, TILE, needs_prefetch, scalar};
use crate::codec;
use crate::philox::Philox;
use crate::traits::{Kind, Source};
pub(crate) use blocks::{
    amax_columns, amaxes, dequantize_blocks, mx_scales, quantize_blocks, quantize_columns, quantize_row,
    quantize_rows, quantize_tiles, scales,
};
use core::arch::x86_64::*;
pub(crate) use decode::{decode, dequantize};
pub(crate) use fp4::{fp4_codes, fp4_peaks, fp4_scales, fp4_values, fp4_words};

/// Elements of a block: a vector of codes.
const BLOCK: usize = 32;

/// A line of codes. Past the caches lines are written whole: one of which a half is written keeps one of the few buffers
/// that loads from memory need, too, until the other half comes.
const LINE: usize = 2 * BLOCK;

/// A block's codes.
type Codes = __m256i;

/// Elements in front of the first line of `dst`, and whether lines are to be streamed.
#[inline]
fn head<D>(dst: &[D], streams: bool) -> (usize, bool) {
    let head = dst.as_ptr().align_offset(LINE);
    // Streaming stores are inline assembly, which Miri does not run.
    if streams && head < LINE && !cfg!(miri) { (head.min(dst.len()), true) } else { (0, false) }
}

/// The prefetch distance in bytes: two pages, so that addresses are translated in time, too.
const AHEAD: usize = 8 << 10;

/// Prefetches what is read `AHEAD` bytes later.
#[inline]
#[target_feature(enable = "avx2")]
fn fetch_ahead<B>(now: &B) {
    let first = core::ptr::from_ref(now).cast::<i8>().wrapping_add(AHEAD);
    for line in 0..size_of::<B>().div_ceil(LINE) {
        prefetch(first.wrapping_add(LINE * line));
    }
}

/// Calls `codes` for each block and stores what it gives, the rests at both ends by way of a whole block.
///
/// `streams` says that the codes go past the caches; then the blocks begin where `dst` has a line.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn drive<S: Source>(src: &[S], dst: &mut [u8], streams: bool, mut codes: impl FnMut(&[S; BLOCK]) -> Codes) {
    let (head, streams) = head(dst, streams);
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    let (blocks, src_tail) = src.as_chunks::<BLOCK>();
    let (pairs, src_last) = blocks.as_chunks::<2>();
    let (halves, dst_tail) = dst.as_chunks_mut::<BLOCK>();
    let (lines, dst_last) = halves.as_chunks_mut::<2>();
    let prefetches = streams && needs_prefetch();
    for (pair, line) in pairs.iter().zip(lines) {
        let [low, high] = pair;
        if streams {
            if prefetches {
                fetch_ahead(pair);
            }
            let (low, high) = (codes(low), codes(high));
            let line = line.as_mut_ptr().cast::<__m256i>();
            // SAFETY: the first half of a line, and aligned, as all before it are lines and the first begins where `dst` does.
            unsafe { _mm256_stream_si256(line, low) };
            // SAFETY: as above, the second half.
            unsafe { _mm256_stream_si256(line.wrapping_add(1), high) };
        } else {
            let [low_line, high_line] = line;
            store(low_line, codes(low));
            store(high_line, codes(high));
        }
    }
    if streams {
        // Streamed lines are seen by others only after this.
        fence();
    }
    for (block, line) in src_last.iter().zip(dst_last) {
        store(line, codes(block));
    }
    for (src, dst) in [(src_head, dst_head), (src_tail, dst_tail)] {
        for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK)) {
            let (mut block, mut line) = ([S::default(); BLOCK], [0; BLOCK]);
            block[..src.len()].copy_from_slice(src);
            store(&mut line, codes(&block));
            dst.copy_from_slice(&line[..dst.len()]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(line: &mut [u8; BLOCK], codes: Codes) {
    // SAFETY: a line is the 32 bytes that are written.
    unsafe { _mm256_storeu_si256(line.as_mut_ptr().cast(), codes) };
}

/// The values of a block, as vectors of eight.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn floats<S: Source, const LEN: usize, const VECTORS: usize>(block: &[S; LEN]) -> [__m256; VECTORS] {
    const { assert!(LEN == 8 * VECTORS && size_of::<S>() >= 2) };
    let mut vectors = [_mm256_setzero_ps(); VECTORS];
    for (i, vector) in vectors.iter_mut().enumerate() {
        *vector = match S::KIND {
            // SAFETY: a block is 8 f32 for each vector.
            Kind::F32 => unsafe { _mm256_loadu_ps(block.as_ptr().cast::<f32>().wrapping_add(8 * i)) },
            Kind::F16 | Kind::BF16 => {
                // SAFETY: a block is 16 bytes for each vector.
                let x = unsafe { _mm_loadu_si128(block.as_ptr().cast::<__m128i>().wrapping_add(i)) };
                match S::KIND {
                    Kind::F16 => _mm256_cvtph_ps(x),
                    _ => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x))),
                }
            }
        };
    }
    vectors
}

#[inline]
#[target_feature(enable = "avx2")]
fn splat(x: u32) -> __m256i {
    _mm256_set1_epi32(x.cast_signed())
}

#[inline]
#[target_feature(enable = "avx2")]
fn abs(x: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(x), splat(codec::F32_ABS))
}

/// Shift counts are constants to the compiler, which makes them part of the instruction.
#[inline]
#[target_feature(enable = "avx2")]
fn shift_right(x: __m256i, count: u32) -> __m256i {
    _mm256_srl_epi32(x, _mm_cvtsi32_si128(count.cast_signed()))
}

/// Codes without their signs in the low bytes of lanes; the other bytes are 0. Those of NaN are anything.
#[inline]
#[target_feature(enable = "avx2")]
fn round<T: Target>(a: __m256i) -> __m256i {
    let format = T::FORMAT;
    let drop = 23 - format.man;
    let c = _mm256_min_epi32(a, splat(format.widen_f32(T::TOP.into())));
    let e = _mm256_and_si256(_mm256_max_epi32(c, splat(format.min_normal_f32())), splat(codec::F32_EXP));
    let magic = _mm256_add_epi32(e, splat((drop << 23) + format.offset()));
    let t = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(c), _mm256_castsi256_ps(magic)));
    _mm256_and_si256(_mm256_add_epi32(shift_right(t, drop), t), splat(0xFF))
}

/// Lanes of four vectors as bytes, in order. A lane beyond the bytes becomes the nearest.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(packed: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// Lanes of four vectors as bytes of their signs, in the order that packing gives.
#[inline]
#[target_feature(enable = "avx2")]
fn signs([a, b, c, d]: [__m256i; 4]) -> __m256i {
    _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d))
}

/// Marks a branch as one that is hardly ever taken.
#[cold]
fn cold() {}

/// Codes of four vectors, and whether one of them is NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn encode_floats<T: Target>([x0, x1, x2, x3]: [__m256; 4]) -> (Codes, bool) {
    let [a0, a1, a2, a3] = [abs(x0), abs(x1), abs(x2), abs(x3)];
    let low = _mm256_packus_epi32(round::<T>(a0), round::<T>(a1));
    let high = _mm256_packus_epi32(round::<T>(a2), round::<T>(a3));
    let bits = |x| _mm256_castps_si256(x);
    let sign = _mm256_and_si256(signs([bits(x0), bits(x1), bits(x2), bits(x3)]), _mm256_set1_epi8(i8::MIN));
    let mut codes = _mm256_or_si256(_mm256_packus_epi16(low, high), sign);
    let is_beyond = |a| _mm256_cmpgt_epi32(a, splat(codec::F32_EXP));
    let most = _mm256_max_epi32(_mm256_max_epi32(a0, a1), _mm256_max_epi32(a2, a3));
    let is_nan = _mm256_movemask_epi8(is_beyond(most)) != 0;
    if is_nan {
        cold();
        let nan = signs([is_beyond(a0), is_beyond(a1), is_beyond(a2), is_beyond(a3)]);
        codes = _mm256_blendv_epi8(codes, _mm256_set1_epi8(codec::NAN.cast_signed()), nan);
    }
    (in_order(codes), is_nan)
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn encode<S: Source, T: Target>(src: &[S], dst: &mut [u8], streams: bool) {
    drive(src, dst, streams, |block| encode_floats::<T>(floats(block)).0);
}

/// Largest magnitudes of lanes so far.
struct Amax([__m256; 4]);

impl Amax {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new() -> Self {
        Self([_mm256_setzero_ps(); 4])
    }

    /// A NaN is passed over, as `max` gives its second operand where one is NaN.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn add(&mut self, x: [__m256; 4]) {
        for (lane, x) in self.0.iter_mut().zip(x) {
            *lane = _mm256_max_ps(_mm256_castsi256_ps(abs(x)), *lane);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn total(self) -> f32 {
        let [a, b, c, d] = self.0;
        let most = _mm256_max_ps(_mm256_max_ps(a, b), _mm256_max_ps(c, d));
        let most = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
        let most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)))
    }
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn amax<S: Source>(src: &[S]) -> f32 {
    let (blocks, rest) = src.as_chunks::<BLOCK>();
    let mut last = [S::default(); BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let mut amax = Amax::new();
    for block in blocks.iter().chain([&last]) {
        amax.add(floats(block));
    }
    amax.total()
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn quantize<S: Source, T: Target>(src: &[S], scale: &Scale, dst: &mut [u8], streams: bool) -> f32 {
    let scale = _mm256_set1_ps(scale.value);
    let mut amax = Amax::new();
    drive(src, dst, streams, |block| {
        let [a, b, c, d] = floats(block);
        amax.add([a, b, c, d]);
        let mul = |x| _mm256_mul_ps(x, scale);
        encode_floats::<T>([mul(a), mul(b), mul(c), mul(d)]).0
    });
    amax.total()
}

/// Stochastic rounding: the portable loop, in this path's vectors.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn stochastic<S: Source, T: Target>(src: &[S], scale: f32, random: Philox, dst: &mut [u8]) {
    scalar::stochastic::<S, T>(src, scale, random, dst);
}

/// Whether this begins at a cache line.
#[inline]
pub(super) fn is_aligned(dst: &[u8]) -> bool {
    dst.as_ptr().cast::<__m512i>().is_aligned()
}

/// Writes the columns of a tile, whose rows begin `src_stride` apart, as rows of `dst`, `stride` apart: past the caches where
/// that is asked for and these are whole lines.
#[target_feature(enable = "avx2")]
pub(crate) fn transpose(src: &[u8], src_stride: usize, dst: &mut [u8], stride: usize, streams: bool) {
    let mut columns = [[0; TILE]; TILE];
    for left in [0, 32] {
        for group in 0..TILE / 16 {
            let row = |i: usize| {
                let row = &src[(16 * group + i) * src_stride + left..][..32];
                // SAFETY: half a row is the 32 bytes that are read.
                unsafe { _mm256_loadu_si256(row.as_ptr().cast()) }
            };
            let v =
                turn!(|a, b| _mm256_unpacklo_epi8(a, b), |a, b| _mm256_unpackhi_epi8(a, b), sixteen!(row));
            for (i, v) in v.into_iter().enumerate() {
                let [low, high] = [_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v)];
                for (column, piece) in [(left + i, low), (left + 16 + i, high)] {
                    let place = columns[column].as_mut_ptr().wrapping_add(16 * group);
                    // SAFETY: a column is 64 bytes, of which these are 16, a group's.
                    unsafe { _mm_storeu_si128(place.cast(), piece) };
                }
            }
        }
    }
    // Then every row of `dst` begins at a line.
    let streams = streams && !cfg!(miri) && is_aligned(dst) && stride.is_multiple_of(TILE);
    for (column, line) in columns.iter().zip(dst.chunks_mut(stride)) {
        if streams {
            let line = line[..TILE].as_mut_ptr();
            for at in [0, 32] {
                // SAFETY: half a column.
                let half = unsafe { _mm256_loadu_si256(column.as_ptr().wrapping_add(at).cast()) };
                // SAFETY: half of the line's first 64 bytes; aligned, as `dst` is and rows are whole lines.
                unsafe { _mm256_stream_si256(line.wrapping_add(at).cast(), half) };
            }
        } else {
            line[..TILE].copy_from_slice(column);
        }
    }
}

/// Codes as they are.
#[target_feature(enable = "avx2")]
pub(crate) fn copy(src: &[u8], dst: &mut [u8], streams: bool) {
    let head = dst.as_ptr().align_offset(32);
    if !streams || cfg!(miri) || head > dst.len() {
        return dst.copy_from_slice(src);
    }
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    let (blocks, src_tail) = src.as_chunks::<32>();
    let (lines, dst_tail) = dst.as_chunks_mut::<32>();
    for (block, line) in blocks.iter().zip(lines) {
        // SAFETY: a block is the 32 bytes that are read.
        let codes = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
        // SAFETY: a line is 32 bytes, and aligned, as the first begins where `dst` is.
        unsafe { _mm256_stream_si256(line.as_mut_ptr().cast(), codes) };
    }
    dst_head.copy_from_slice(src_head);
    dst_tail.copy_from_slice(src_tail);
}

/// Elements that are read soon: their lines come into the nearest cache.
#[target_feature(enable = "avx2")]
pub(crate) fn fetch<S: Source>(src: &[S]) {
    let first = src.as_ptr().cast::<i8>();
    for at in (0..size_of_val(src)).step_by(64) {
        prefetch(first.wrapping_add(at));
    }
}

/// Brings the line of an address into the nearest cache.
#[inline]
#[target_feature(enable = "avx2")]
#[allow(unused_unsafe, reason = "safe in newer Rust")]
pub(super) fn prefetch(place: *const i8) {
    // SAFETY: AVX2 implies SSE; fetching ahead is a hint, for any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(place) };
}

/// Makes streamed codes seen by others.
#[inline]
#[target_feature(enable = "avx2")]
#[allow(unused_unsafe, reason = "safe in newer Rust")]
pub(crate) fn fence() {
    // SAFETY: AVX2 implies SSE; a fence orders stores and does nothing else.
    unsafe { _mm_sfence() };
}
