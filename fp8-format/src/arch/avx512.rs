//! 64 elements at a time with AVX-512: F, BW, DQ, VL, VBMI.
//!
//! Whatever the source, rounding happens in 16-bit lanes, 32 of them in a vector. An f32 is cut down to a bf16 first and
//! its last bit set if anything was cut off (round to odd): with four more significand bits than the target needs two
//! roundings are one. There the code is one addition away, `code = (c + D) >> shift`, whose addend D depends on the bits
//! above the target's last one alone: a formula for normal results, a register of 32 words for subnormal ones.
//!
//! NaN is a branch per 64 elements that ordinary data never take.

mod blocks;
mod decode;
mod exponents;
mod fp4;
mod product_tables;
mod products;
mod quantize;
mod rounding;
mod row;
mod rows;
mod tiles;
mod transpose;

use super::avx2::prefetch;
pub(crate) use super::avx2::{copy, fence, fetch};
use super::target::Target;
use super::{needs_prefetch, scalar};
use crate::codec;
use crate::philox::Philox;
use crate::traits::{Kind, Source};
pub(crate) use blocks::{
    amax_columns, amaxes, dequantize_blocks, mx_scales, quantize_blocks, quantize_columns, scales,
};
use core::arch::x86_64::*;
pub(crate) use decode::{decode, dequantize};
pub(crate) use fp4::{fp4_codes, fp4_peaks, fp4_scales, fp4_values, fp4_words};
pub(super) use product_tables::ProductTables;
pub(super) use products::product_tables;
pub(crate) use quantize::quantize;
use rounding::Rounding;
pub(crate) use row::quantize_row;
pub(crate) use rows::quantize_rows;
pub(crate) use tiles::quantize_tiles;
pub(crate) use transpose::transpose;

/// Elements of a block: a vector of codes, and a cache line of them.
const BLOCK: usize = 64;

/// A block's codes.
type Codes = __m512i;

/// Elements in front of the first line of `dst`, and whether lines are to be streamed.
#[inline]
fn head<D>(dst: &[D], streams: bool) -> (usize, bool) {
    let head = dst.as_ptr().align_offset(64);
    if streams && head < BLOCK { (head.min(dst.len()), true) } else { (0, false) }
}

/// The prefetch distance in bytes: two pages, so that addresses are translated in time, too.
const AHEAD: usize = 8 << 10;

/// Prefetches what is read `AHEAD` bytes later.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch_ahead<B>(now: &B) {
    let first = core::ptr::from_ref(now).cast::<i8>().wrapping_add(AHEAD);
    for line in 0..size_of::<B>().div_ceil(64) {
        prefetch(first.wrapping_add(64 * line));
    }
}

/// Prefetches what is read so many bytes later into the second cache.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch_second<B>(now: &B, ahead: usize) {
    let first = core::ptr::from_ref(now).cast::<i8>().wrapping_add(ahead);
    for line in 0..size_of::<B>().div_ceil(64) {
        _mm_prefetch::<_MM_HINT_T1>(first.wrapping_add(64 * line));
    }
}

/// Calls `codes` for each block and stores its result. The elements in front of the first and behind the last whole block are
/// copied to a block of their own.
///
/// If `streams`, results bypass the caches, and the blocks begin where `dst` is aligned. `prefetches` says whether the source is
/// then prefetched.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn drive<S: Source>(
    src: &[S],
    dst: &mut [u8],
    streams: bool,
    prefetches: bool,
    mut codes: impl FnMut(&[S; BLOCK]) -> Codes,
) {
    let (head, streams) = head(dst, streams);
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    let (blocks, src_tail) = src.as_chunks::<BLOCK>();
    let (lines, dst_tail) = dst.as_chunks_mut::<BLOCK>();
    if streams {
        // Four lines of the source at a time: one block of f32, or two of 16-bit elements.
        let (pairs, blocks) = if size_of::<S>() == 2 { blocks.as_chunks::<2>() } else { (&[][..], blocks) };
        let (line_pairs, lines) = lines.split_at_mut(2 * pairs.len());
        for (pair, [low_line, high_line]) in pairs.iter().zip(line_pairs.as_chunks_mut::<2>().0) {
            if prefetches {
                fetch_ahead(pair);
            }
            let [low, high] = pair;
            let (low, high) = (codes(low), codes(high));
            // SAFETY: a line is 64 bytes, and aligned, as all before it are lines and the first begins where `dst` is.
            unsafe { _mm512_stream_si512(low_line.as_mut_ptr().cast(), low) };
            // SAFETY: as above.
            unsafe { _mm512_stream_si512(high_line.as_mut_ptr().cast(), high) };
        }
        for (block, line) in blocks.iter().zip(lines) {
            if prefetches {
                fetch_ahead(block);
            }
            let codes = codes(block);
            // SAFETY: as above.
            unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), codes) };
        }
        // Other threads see streamed lines only after this.
        fence();
    } else {
        for (block, line) in blocks.iter().zip(lines) {
            store(line, codes(block));
        }
    }
    for (src, dst) in [(src_head, dst_head), (src_tail, dst_tail)] {
        if !src.is_empty() {
            let (mut block, mut line) = ([S::default(); BLOCK], [0; BLOCK]);
            block[..src.len()].copy_from_slice(src);
            store(&mut line, codes(&block));
            dst.copy_from_slice(&line[..dst.len()]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(line: &mut [u8; BLOCK], codes: Codes) {
    // SAFETY: a line is the 64 bytes that are written.
    unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), codes) };
}

/// A block of 16-bit elements, as two vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn words<S: Source>(block: &[S; BLOCK]) -> [__m512i; 2] {
    const { assert!(size_of::<S>() >= 2) };
    let first = block.as_ptr().cast::<__m512i>();
    // SAFETY: a block is 128 bytes at least; this reads the first half.
    let low = unsafe { _mm512_loadu_si512(first) };
    // SAFETY: as above, the second half.
    let high = unsafe { _mm512_loadu_si512(first.wrapping_add(1)) };
    [low, high]
}

/// The values of a block, as four vectors. Of f16 and bf16 they are in order, too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn floats<S: Source>(block: &[S; BLOCK]) -> [__m512; 4] {
    match S::KIND {
        Kind::F32 => {
            let first = block.as_ptr().cast::<f32>();
            // SAFETY: a block is 64 f32; each of these reads 16, from 0, 16, 32 and 48 on.
            let load = |at| unsafe { _mm512_loadu_ps(first.wrapping_add(at)) };
            [load(0), load(16), load(32), load(48)]
        }
        Kind::F16 => {
            let [a, b, c, d] = halves(block);
            [_mm512_cvtph_ps(a), _mm512_cvtph_ps(b), _mm512_cvtph_ps(c), _mm512_cvtph_ps(d)]
        }
        Kind::BF16 => {
            let widen = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)));
            let [a, b, c, d] = halves(block);
            [widen(a), widen(b), widen(c), widen(d)]
        }
    }
}

/// A block of 16-bit elements, as four vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves<S: Source>(block: &[S; BLOCK]) -> [__m256i; 4] {
    let first = block.as_ptr().cast::<__m256i>();
    const { assert!(size_of::<S>() >= 2) };
    // SAFETY: a block is 128 bytes at least; each of these reads 32, from 0, 32, 64 and 96 on.
    let load = |at| unsafe { _mm256_loadu_si256(first.wrapping_add(at)) };
    [load(0), load(1), load(2), load(3)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn table<T, const N: usize>(table: &[T; N]) -> __m512i {
    const { assert!(size_of::<[T; N]>() == 64) };
    // SAFETY: the table is the 64 bytes that are read.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

/// Shift counts are constants to the compiler, which makes them part of the instruction.
#[inline]
#[target_feature(enable = "avx512bw")]
fn shift_right(x: __m512i, count: u32) -> __m512i {
    _mm512_srl_epi16(x, _mm_cvtsi32_si128(count.cast_signed()))
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn shift_left(x: __m512i, count: u32) -> __m512i {
    _mm512_sll_epi16(x, _mm_cvtsi32_si128(count.cast_signed()))
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn splat(x: u16) -> __m512i {
    _mm512_set1_epi16(x.cast_signed())
}

const ABS: u16 = 0x7FFF;

#[inline]
#[target_feature(enable = "avx512bw")]
fn abs(x: __m512i) -> __m512i {
    _mm512_and_si512(x, splat(ABS))
}

/// Constants of rounding from an encoding of 16 bits.
struct Of<const MAN: u32, const BIAS: u32, T>(core::marker::PhantomData<T>);

impl<const MAN: u32, const BIAS: u32, T: Target> Of<MAN, BIAS, T> {
    const ROUNDING: Rounding = Rounding::new(MAN, BIAS, T::FORMAT, T::TOP);
}

/// Codes in the upper bytes of words whose magnitudes are `a`; the lower bytes are anything, as are codes of NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn round(x: __m512i, a: __m512i, of: &Rounding) -> __m512i {
    let c = _mm512_min_epu16(a, splat(of.clamp));
    let t = if of.is_even {
        // The target's subnormals are the source's: one rule for all.
        let odd = _mm512_and_si512(shift_right(c, of.shift), splat(1));
        _mm512_add_epi16(_mm512_add_epi16(c, splat((1 << (of.shift - 1)) - 1)), odd)
    } else {
        uneven(_mm512_max_epu16(c, splat(of.floor)), of)
    };
    signed(t, x, of)
}

/// Rounds magnitudes between `of.floor` and `of.clamp` where source and target have different exponents.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn uneven(c: __m512i, of: &Rounding) -> __m512i {
    let h = shift_right(c, of.shift);
    let is_subnormal = _mm512_cmplt_epu16_mask(c, splat(of.min_normal));
    // !(K | (h & 1)), and c less that is c + K + (h & 1) + 1.
    let d = _mm512_ternarylogic_epi32::<0x07>(splat(of.addend), h, splat(1));
    let d = _mm512_mask_permutexvar_epi16(d, is_subnormal, h, table(&of.subnormal));
    _mm512_sub_epi16(c, d)
}

/// Rounded magnitudes with the signs of `x`, as codes in upper bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn signed(t: __m512i, x: __m512i, of: &Rounding) -> __m512i {
    // t | (x & sign)
    _mm512_ternarylogic_epi32::<0xF8>(shift_left(t, 8 - of.shift), x, splat(!ABS))
}

/// Returns the indices of the upper bytes in two vectors of words, in the order of the elements.
const fn order(is_interleaved: bool) -> [u8; BLOCK] {
    let mut order = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        // Word of both vectors that holds element i: in order, or of each 32 the first and second half in turns.
        let word = if is_interleaved { (i & 32) | ((i & 15) << 1) | ((i >> 4) & 1) } else { i };
        order[i] = (2 * word + 1).to_le_bytes()[0];
        i += 1;
    }
    order
}

const IN_ORDER: [u8; BLOCK] = order(false);
const INTERLEAVED: [u8; BLOCK] = order(true);

/// The upper bytes of words, as codes.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi")]
fn pack([low, high]: [__m512i; 2], order: &[u8; BLOCK]) -> Codes {
    _mm512_permutex2var_epi8(low, table(order), high)
}

/// Marks a branch as one that is hardly ever taken.
#[cold]
fn cold() {}

/// Returns the codes of two vectors of words, whose magnitudes are `a`, and whether one of them is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn encode_magnitudes(x: [__m512i; 2], a: [__m512i; 2], of: &Rounding, order: &[u8; BLOCK]) -> (Codes, bool) {
    let (r, is_nan) = with_nans([round(x[0], a[0], of), round(x[1], a[1], of)], a, of);
    (pack(r, order), is_nan)
}

/// Puts the code of NaN where a magnitude of `a` is one, and returns whether there is any.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn with_nans(mut r: [__m512i; 2], a: [__m512i; 2], of: &Rounding) -> ([__m512i; 2], bool) {
    let infinity = splat(of.infinity);
    let is_nan = _mm512_cmpgt_epu16_mask(_mm512_max_epu16(a[0], a[1]), infinity) != 0;
    if is_nan {
        cold();
        let nan = splat((codec::NAN as u16) << 8);
        r[0] = _mm512_mask_mov_epi16(r[0], _mm512_cmpgt_epu16_mask(a[0], infinity), nan);
        r[1] = _mm512_mask_mov_epi16(r[1], _mm512_cmpgt_epu16_mask(a[1], infinity), nan);
    }
    (r, is_nan)
}

/// Returns the codes of two vectors of 16-bit elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn encode_words(x: [__m512i; 2], of: &Rounding) -> Codes {
    encode_magnitudes(x, [abs(x[0]), abs(x[1])], of, &IN_ORDER).0
}

/// Returns the upper halves of two vectors of f32, with the words of both vectors in turns, and words whose last two bits are set
/// if the lower half is not zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halved(even: __m512, odd: __m512) -> (__m512i, __m512i) {
    const ODD: __mmask32 = 0xAAAA_AAAA;
    let (even, odd) = (_mm512_castps_si512(even), _mm512_castps_si512(odd));
    let x = _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32::<16>(even), odd);
    let cut = _mm512_mask_blend_epi16(ODD, even, _mm512_slli_epi32::<16>(odd));
    // Rounding to a code drops four bits or more, of which the upper one decides and the others break ties. So two bits may be
    // set. (A minimum with 1 would be compiled to a comparison and two more instructions.)
    (x, _mm512_min_epu16(cut, splat(3)))
}

/// Returns the upper halves of two vectors of f32, with the words of both vectors in turns, and the magnitudes of the same
/// numbers rounded to odd: their last bits are set if the lower half is not zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round_to_odd(even: __m512, odd: __m512) -> (__m512i, __m512i) {
    let (x, sticky) = halved(even, odd);
    // (x | sticky) & ABS
    (x, _mm512_ternarylogic_epi32::<0xA8>(x, sticky, splat(ABS)))
}

/// Returns the codes of four vectors of f32, and whether one of them is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn encode_floats<T: Target>(x: [__m512; 4]) -> (Codes, bool) {
    let (low, low_magnitudes) = round_to_odd(x[0], x[1]);
    let (high, high_magnitudes) = round_to_odd(x[2], x[3]);
    let of = &Of::<7, 127, T>::ROUNDING;
    encode_magnitudes([low, high], [low_magnitudes, high_magnitudes], of, &INTERLEAVED)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn encode<S: Source, T: Target>(src: &[S], dst: &mut [u8], streams: bool) {
    let prefetches = streams && needs_prefetch();
    drive(src, dst, streams, prefetches, |block| match S::KIND {
        Kind::F32 => encode_floats::<T>(floats(block)).0,
        Kind::F16 => encode_words(words(block), &Of::<10, 15, T>::ROUNDING),
        Kind::BF16 => encode_words(words(block), &Of::<7, 127, T>::ROUNDING),
    });
}

/// Largest magnitudes of lanes so far.
struct Amax([__m512; 4]);

impl Amax {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self([_mm512_setzero_ps(); 4])
    }

    /// Includes values without a NaN, with one instruction for each vector.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn add(&mut self, x: [__m512; 4]) {
        // The larger in magnitude, with its sign cleared.
        for (lane, x) in self.0.iter_mut().zip(x) {
            *lane = _mm512_range_ps::<0b1011>(*lane, x);
        }
    }

    /// Includes any values. A NaN is ignored, because `max` returns its second operand where one is NaN.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn add_any(&mut self, x: [__m512; 4]) {
        for (lane, x) in self.0.iter_mut().zip(x) {
            *lane = _mm512_max_ps(_mm512_abs_ps(x), *lane);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn total(self) -> f32 {
        let [a, b, c, d] = self.0;
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)))
    }
}

/// Largest magnitudes of lanes of 16-bit elements so far, as their bits: magnitudes order like numbers.
struct AmaxOfWords(__m512i);

impl AmaxOfWords {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self(_mm512_setzero_si512())
    }

    /// Includes elements without a NaN.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn add(&mut self, [low, high]: [__m512i; 2]) {
        self.0 = _mm512_max_epu16(self.0, _mm512_max_epu16(abs(low), abs(high)));
    }

    /// Includes any elements. NaN is ignored.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn add_any(&mut self, [low, high]: [__m512i; 2], infinity: u16) {
        for x in [abs(low), abs(high)] {
            let is_number = _mm512_cmple_epu16_mask(x, splat(infinity));
            self.0 = _mm512_mask_max_epu16(self.0, is_number, self.0, x);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn total<S: Source>(self) -> f32 {
        let mut lanes = [0_u16; 32];
        // SAFETY: the 32 words are the 64 bytes that are written.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), self.0) };
        let bits = lanes.into_iter().fold(0, u16::max);
        if let Kind::F16 = S::KIND { codec::f16_to_f32(bits) } else { codec::bf16_to_f32(bits) }
    }
}

/// The bits of infinity in an element of 16 bits.
const fn infinity<S: Source>() -> u16 {
    if let Kind::F16 = S::KIND { 0x7C00 } else { 0x7F80 }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn amax<S: Source>(src: &[S]) -> f32 {
    let (blocks, rest) = src.as_chunks::<BLOCK>();
    let mut last = [S::default(); BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let blocks = blocks.iter().chain([&last]);
    if let Kind::F32 = S::KIND {
        let mut amax = Amax::new();
        blocks.for_each(|block| amax.add_any(floats(block)));
        amax.total()
    } else {
        let mut amax = AmaxOfWords::new();
        blocks.for_each(|block| amax.add_any(words(block), infinity::<S>()));
        amax.total::<S>()
    }
}

/// Quantization by multiplication.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn quantize_products<S: Source, T: Target>(src: &[S], scale: f32, dst: &mut [u8], streams: bool) -> f32 {
    let scale = _mm512_set1_ps(scale);
    let mut amax = Amax::new();
    drive(src, dst, streams, streams && needs_prefetch(), |block| {
        let [a, b, c, d] = floats(block);
        let mul = |x| _mm512_mul_ps(x, scale);
        let (codes, is_nan) = encode_floats::<T>([mul(a), mul(b), mul(c), mul(d)]);
        // Where no product is NaN no element is.
        if is_nan {
            cold();
            amax.add_any([a, b, c, d]);
        } else {
            amax.add([a, b, c, d]);
        }
        codes
    });
    amax.total()
}

/// Stochastic rounding: the portable loop, in this path's vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn stochastic<S: Source, T: Target>(src: &[S], scale: f32, random: Philox, dst: &mut [u8]) {
    scalar::stochastic::<S, T>(src, scale, random, dst);
}
