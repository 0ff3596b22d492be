//! 32 elements at a time with NEON, in 32-bit lanes.
//!
//! Rounding is the scalar path's: a float addition does it. An even constant in the magic number's low bits makes the code
//! the low bits of `(t >> drop) + t`: the first term brings the exponent, the second the rounded significand. f16 is
//! rounded to in the same way. Decoding looks up the two bytes of a 16-bit float, 16 codes at a time.
//!
//! NaN is a branch per 32 elements that ordinary data never take. Stores past the caches are not used.

mod blocks;
mod fp4;

use super::interleave::{sixteen, turn};
use super::target::Target;
use super::{Scale, TILE, scalar};
use crate::codec;
use crate::philox::Philox;
use crate::traits::{Kind, Source};
pub(crate) use blocks::{
    amax_columns, amaxes, dequantize_blocks, mx_scales, quantize_blocks, quantize_columns, quantize_row,
    quantize_rows, quantize_tiles, scales,
};
use core::arch::aarch64::*;
pub(crate) use fp4::{fp4_codes, fp4_peaks, fp4_scales, fp4_values, fp4_words};

/// Elements of a block.
const BLOCK: usize = 32;

/// Elements of a half block: a vector of codes.
const HALF: usize = 16;

/// Values of a half block.
type Floats = [float32x4_t; 4];

/// A block's codes.
type Codes = [uint8x16_t; 2];

/// Calls `codes` for each block and stores what it gives, the rest by way of a whole block.
#[inline]
#[target_feature(enable = "neon")]
fn drive<S: Source>(src: &[S], dst: &mut [u8], mut codes: impl FnMut(&[S; BLOCK]) -> Codes) {
    let (blocks, src) = src.as_chunks::<BLOCK>();
    let (lines, dst) = dst.as_chunks_mut::<BLOCK>();
    for (block, line) in blocks.iter().zip(lines) {
        store(line, codes(block));
    }
    if !src.is_empty() {
        let (mut block, mut line) = ([S::default(); BLOCK], [0; BLOCK]);
        block[..src.len()].copy_from_slice(src);
        store(&mut line, codes(&block));
        dst.copy_from_slice(&line[..dst.len()]);
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(line: &mut [u8; BLOCK], [low, high]: Codes) {
    let first = line.as_mut_ptr();
    // SAFETY: a line is 32 bytes; this writes the first 16.
    unsafe { vst1q_u8(first, low) };
    // SAFETY: as above, the last 16.
    unsafe { vst1q_u8(first.wrapping_add(HALF), high) };
}

/// The values of a block.
#[inline]
#[target_feature(enable = "neon")]
fn floats<S: Source>(block: &[S; BLOCK]) -> [Floats; 2] {
    match S::KIND {
        Kind::F32 => {
            let first = block.as_ptr().cast::<f32>();
            // SAFETY: a block is 32 f32; each of these reads 4, from multiples of 4 up to 28 on.
            let load = |at| unsafe { vld1q_f32(first.wrapping_add(at)) };
            [[load(0), load(4), load(8), load(12)], [load(16), load(20), load(24), load(28)]]
        }
        Kind::F16 | Kind::BF16 => {
            const { assert!(size_of::<S>() >= 2) };
            let first = block.as_ptr().cast::<u16>();
            // SAFETY: a block is 32 elements of 16 bits at least; each of these reads 8, from 0, 8, 16 and 24 on.
            let load = |at| unsafe { vld1q_u16(first.wrapping_add(at)) };
            let widen = |x| match S::KIND {
                Kind::F16 => widen_f16(x),
                _ => vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(x))),
            };
            let half = |at| {
                let [a, b] = [load(at), load(at + 8)];
                [vget_low_u16(a), vget_high_u16(a), vget_low_u16(b), vget_high_u16(b)].map(widen)
            };
            [half(0), half(HALF)]
        }
    }
}

/// Widens f16 as the scalar path does: the exponent is moved, or the significand brought below the smallest normal's one.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(x: uint16x4_t) -> float32x4_t {
    let magnitude = vshll_n_u16::<13>(vand_u16(x, vdup_n_u16(0x7FFF)));
    let normal = vaddq_u32(magnitude, vdupq_n_u32((127 - 15) << 23));
    let min_normal = vdupq_n_u32((128 - 15) << 23);
    let with_one = vreinterpretq_f32_u32(vaddq_u32(magnitude, min_normal));
    let subnormal = vreinterpretq_u32_f32(vsubq_f32(with_one, vreinterpretq_f32_u32(min_normal)));
    let is_subnormal = vcltq_u32(magnitude, vdupq_n_u32(0x0400 << 13));
    let is_beyond = vcgeq_u32(magnitude, vdupq_n_u32(0x7C00 << 13));
    let finite = vbslq_u32(is_subnormal, subnormal, normal);
    let wide = vorrq_u32(finite, vandq_u32(is_beyond, vdupq_n_u32(codec::F32_EXP)));
    let sign = vshlq_n_u32::<16>(vmovl_u16(x));
    vreinterpretq_f32_u32(vbslq_u32(vdupq_n_u32(codec::F32_ABS), wide, sign))
}

#[inline]
#[target_feature(enable = "neon")]
fn abs(x: float32x4_t) -> uint32x4_t {
    vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(codec::F32_ABS))
}

/// The constants for rounding magnitudes to a narrower format.
struct Rounding {
    /// Bits of the f32 that the format does not have.
    drop: u32,
    /// Larger magnitudes become this one.
    limit: u32,
    /// The smallest normal magnitude.
    min_normal: u32,
    /// The excess that the exponent's term brings into the sum, negated.
    offset: u32,
}

impl Rounding {
    /// To `man` stored bits of significand; no code beyond `top` comes out.
    const fn new(man: u32, bias: u32, top: u32) -> Self {
        let drop = 23 - man;
        Self {
            drop,
            limit: (top << drop) + ((127 - bias) << 23),
            min_normal: (128 - bias) << 23,
            offset: ((128 - bias + drop) << man).wrapping_neg() & 0xFFFF,
        }
    }
}

/// Codes without their signs in the low halves of lanes; the other halves are anything, and so are codes of NaN.
#[inline]
#[target_feature(enable = "neon")]
fn round(a: uint32x4_t, to: &Rounding) -> uint16x8_t {
    let c = vminq_u32(a, vdupq_n_u32(to.limit));
    let e = vandq_u32(vmaxq_u32(c, vdupq_n_u32(to.min_normal)), vdupq_n_u32(codec::F32_EXP));
    let magic = vaddq_u32(e, vdupq_n_u32((to.drop << 23) + to.offset));
    let t = vaddq_f32(vreinterpretq_f32_u32(c), vreinterpretq_f32_u32(magic));
    let t = vreinterpretq_u32_f32(t);
    // A shift's count is part of the instruction: 3, 2 or 10 bits of significand stay.
    vreinterpretq_u16_u32(match to.drop {
        20 => vsraq_n_u32::<20>(t, t),
        21 => vsraq_n_u32::<21>(t, t),
        _ => vsraq_n_u32::<13>(t, t),
    })
}

/// The lowest bytes of lanes, in order.
#[inline]
#[target_feature(enable = "neon")]
fn low_bytes([a, b, c, d]: [uint16x8_t; 4]) -> uint8x16_t {
    let [low, high] = [vuzp1q_u16(a, b), vuzp1q_u16(c, d)];
    vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))
}

/// The highest bytes of lanes, in order.
#[inline]
#[target_feature(enable = "neon")]
fn high_bytes([a, b, c, d]: [uint16x8_t; 4]) -> uint8x16_t {
    let [low, high] = [vuzp2q_u16(a, b), vuzp2q_u16(c, d)];
    vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))
}

/// Codes of half a block, and the largest magnitudes of its lanes, by their bits; codes of NaN are anything.
#[inline]
#[target_feature(enable = "neon")]
fn encode_numbers<T: Target>(x: &Floats) -> (uint8x16_t, uint32x4_t) {
    let to = const { Rounding::new(T::FORMAT.man, T::FORMAT.bias, T::TOP as u32) };
    let a = x.map(|x| abs(x));
    let codes = low_bytes(a.map(|a| round(a, &to)));
    let signed = high_bytes(x.map(|x| vreinterpretq_u16_f32(x)));
    let most = vmaxq_u32(vmaxq_u32(a[0], a[1]), vmaxq_u32(a[2], a[3]));
    (vbslq_u8(vdupq_n_u8(0x80), signed, codes), most)
}

/// Codes with those of NaN put right.
#[inline]
#[target_feature(enable = "neon")]
fn with_nans(codes: uint8x16_t, x: &Floats) -> uint8x16_t {
    let is_beyond = |x| vreinterpretq_u16_u32(vcgtq_u32(abs(x), vdupq_n_u32(codec::F32_EXP)));
    vbslq_u8(low_bytes(x.map(is_beyond)), vdupq_n_u8(codec::NAN), codes)
}

/// Marks a branch as one that is hardly ever taken.
#[cold]
fn cold() {}

#[inline]
#[target_feature(enable = "neon")]
fn encode_floats<T: Target>([x, y]: &[Floats; 2]) -> Codes {
    let [(low, most_of_low), (high, most_of_high)] = [encode_numbers::<T>(x), encode_numbers::<T>(y)];
    if vmaxvq_u32(vmaxq_u32(most_of_low, most_of_high)) > codec::F32_EXP {
        cold();
        return [with_nans(low, x), with_nans(high, y)];
    }
    [low, high]
}

#[target_feature(enable = "neon")]
pub(crate) fn encode<S: Source, T: Target>(src: &[S], dst: &mut [u8], _streams: bool) {
    drive(src, dst, |block| encode_floats::<T>(&floats(block)));
}

/// Values of the largest magnitudes in lanes so far.
struct Amax(Floats);

impl Amax {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new() -> Self {
        Self([vdupq_n_f32(0.0); 4])
    }

    /// A NaN is passed over, as every comparison with it is false. The maximum of two numbers would pass over a quiet NaN
    /// only.
    #[inline]
    #[target_feature(enable = "neon")]
    fn add(&mut self, x: &[Floats; 2]) {
        for half in x {
            for (lane, x) in self.0.iter_mut().zip(half) {
                *lane = vbslq_f32(vcagtq_f32(*x, *lane), *x, *lane);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    fn total(self) -> f32 {
        let [a, b, c, d] = self.0.map(|x| vabsq_f32(x));
        vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, b), vmaxq_f32(c, d)))
    }
}

#[target_feature(enable = "neon")]
pub(crate) fn amax<S: Source>(src: &[S]) -> f32 {
    let (blocks, rest) = src.as_chunks::<BLOCK>();
    let mut last = [S::default(); BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let mut amax = Amax::new();
    for block in blocks.iter().chain([&last]) {
        amax.add(&floats(block));
    }
    amax.total()
}

#[target_feature(enable = "neon")]
pub(crate) fn quantize<S: Source, T: Target>(
    src: &[S],
    scale: &Scale,
    dst: &mut [u8],
    _streams: bool,
) -> f32 {
    let scale = vdupq_n_f32(scale.value);
    let mut amax = Amax::new();
    drive(src, dst, |block| {
        let x = floats(block);
        amax.add(&x);
        encode_floats::<T>(&x.map(|half| half.map(|x| vmulq_f32(x, scale))))
    });
    amax.total()
}

/// Calls `values` for 16 codes at a time and stores as many of the vectors it gives as 16 elements are.
#[inline]
#[target_feature(enable = "neon")]
fn fill<D: Source>(src: &[u8], dst: &mut [D], mut values: impl FnMut(uint8x16_t) -> [uint8x16_t; 4]) {
    let mut convert = |block: &[u8; HALF], line: &mut [D; HALF]| {
        // SAFETY: reads the 16 bytes of the block.
        let codes = unsafe { vld1q_u8(block.as_ptr()) };
        let first = line.as_mut_ptr().cast::<u8>();
        let vectors = const { size_of::<[D; HALF]>() / 16 };
        for (i, value) in values(codes).into_iter().enumerate().take(vectors) {
            // SAFETY: within the line, which is so many vectors.
            unsafe { vst1q_u8(first.wrapping_add(16 * i), value) };
        }
    };
    let (blocks, src) = src.as_chunks::<HALF>();
    let (lines, dst) = dst.as_chunks_mut::<HALF>();
    for (block, line) in blocks.iter().zip(lines) {
        convert(block, line);
    }
    if !src.is_empty() {
        let (mut block, mut line) = ([0; HALF], [D::default(); HALF]);
        block[..src.len()].copy_from_slice(src);
        convert(&block, &mut line);
        dst.copy_from_slice(&line[..dst.len()]);
    }
}

/// The low and the high byte of each magnitude's 16-bit float.
type Bytes = [[u8; 128]; 2];

/// As f16, or as bf16: that is also the upper half of the f32.
const fn bytes<T: Target>(kind: Kind) -> Bytes {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let word = match kind {
            Kind::F16 => T::FORMAT.decode_f16(code),
            Kind::BF16 | Kind::F32 => T::FORMAT.decode_bf16(code),
        };
        [bytes[0][code as usize], bytes[1][code as usize]] = word.to_le_bytes();
        code += 1;
    }
    bytes
}

/// 128 bytes in registers.
#[derive(Clone, Copy)]
struct Table([uint8x16x4_t; 2]);

impl Table {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new(bytes: &[u8; 128]) -> Self {
        // SAFETY: reads the first 64 of the 128 bytes.
        let low = unsafe { vld1q_u8_x4(bytes.as_ptr()) };
        // SAFETY: reads the last 64.
        let high = unsafe { vld1q_u8_x4(bytes.as_ptr().wrapping_add(64)) };
        Self([low, high])
    }

    /// Bytes at places below 128. A place outside a register group's 64 leaves what the other one gives.
    #[inline]
    #[target_feature(enable = "neon")]
    fn at(&self, places: uint8x16_t) -> uint8x16_t {
        let [low, high] = self.0;
        vqtbx4q_u8(vqtbl4q_u8(low, places), high, veorq_u8(places, vdupq_n_u8(64)))
    }
}

/// The tables that decode codes to 16-bit floats.
struct Decoder {
    low: Table,
    high: Table,
    last_number: uint8x16_t,
}

impl Decoder {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new<T: Target, D: Source>() -> Self {
        let [low, high] = const { &bytes::<T>(D::KIND) };
        let last_number = vdupq_n_u8(T::FORMAT.first_nan - 1);
        Self { low: Table::new(low), high: Table::new(high), last_number }
    }

    /// 16-bit floats of 16 codes, NaN canonical; and the codes that are NaN.
    #[inline]
    #[target_feature(enable = "neon")]
    fn words(&self, codes: uint8x16_t) -> ([uint8x16_t; 2], uint8x16_t) {
        let magnitude = vandq_u8(codes, vdupq_n_u8(0x7F));
        let is_nan = vcgtq_u8(magnitude, self.last_number);
        let sign = vbicq_u8(vandq_u8(codes, vdupq_n_u8(0x80)), is_nan);
        let [low, high] = [self.low.at(magnitude), vorrq_u8(self.high.at(magnitude), sign)];
        ([vzip1q_u8(low, high), vzip2q_u8(low, high)], is_nan)
    }

    /// f32 of 16 codes, by their bf16; NaN is canonical, all ones below the sign.
    #[inline]
    #[target_feature(enable = "neon")]
    fn floats(&self, codes: uint8x16_t) -> [uint16x8_t; 4] {
        let (words, is_nan) = self.words(codes);
        let [low, high] = words.map(|x| vreinterpretq_u16_u8(x));
        let nan = [vzip1q_u8(is_nan, is_nan), vzip2q_u8(is_nan, is_nan)];
        let [nan_low, nan_high] = nan.map(|x| vreinterpretq_u16_u8(x));
        [
            vzip1q_u16(nan_low, low),
            vzip2q_u16(nan_low, low),
            vzip1q_u16(nan_high, high),
            vzip2q_u16(nan_high, high),
        ]
    }
}

#[target_feature(enable = "neon")]
pub(crate) fn decode<T: Target, D: Source>(src: &[u8], dst: &mut [D], _streams: bool) {
    let decoder = Decoder::new::<T, D>();
    fill(src, dst, |codes| match D::KIND {
        Kind::F32 => decoder.floats(codes).map(|x| vreinterpretq_u8_u16(x)),
        Kind::F16 | Kind::BF16 => {
            let ([low, high], _) = decoder.words(codes);
            let none = vdupq_n_u8(0);
            [low, high, none, none]
        }
    });
}

/// f32, of which NaN is canonical, as 16-bit elements: rounded to nearest, ties to even.
#[inline]
#[target_feature(enable = "neon")]
fn narrow<D: Source>(x: uint32x4_t) -> uint16x4_t {
    let is_nan = vceqq_u32(x, vdupq_n_u32(codec::F32_ABS));
    match D::KIND {
        Kind::F16 => {
            let to = const { Rounding::new(10, 15, 0x7C00) };
            let a = vandq_u32(x, vdupq_n_u32(codec::F32_ABS));
            let magnitude = vmovn_u32(vreinterpretq_u32_u16(round(a, &to)));
            let number = vbsl_u16(vdup_n_u16(0x7FFF), magnitude, vshrn_n_u32::<16>(x));
            vbsl_u16(vmovn_u32(is_nan), vdup_n_u16(0x7FFF), number)
        }
        Kind::BF16 | Kind::F32 => {
            let odd = vandq_u32(vshrq_n_u32::<16>(x), vdupq_n_u32(1));
            // The carry would turn NaN into a number.
            let up = vbicq_u32(vaddq_u32(odd, vdupq_n_u32(0x7FFF)), is_nan);
            vaddhn_u32(x, up)
        }
    }
}

#[target_feature(enable = "neon")]
pub(crate) fn dequantize<T: Target, D: Source>(src: &[u8], scale_inv: f32, dst: &mut [D], _streams: bool) {
    let decoder = Decoder::new::<T, f32>();
    let scale_inv = vdupq_n_f32(scale_inv);
    fill(src, dst, |codes| scaled::<D>(&decoder, codes, scale_inv));
}

/// The values of 16 codes, multiplied by a factor.
#[inline]
#[target_feature(enable = "neon")]
fn scaled<D: Source>(decoder: &Decoder, codes: uint8x16_t, scale_inv: float32x4_t) -> [uint8x16_t; 4] {
    let products = decoder.floats(codes).map(|x| {
        let x = vmulq_f32(vreinterpretq_f32_u16(x), scale_inv);
        vbslq_u32(vceqq_f32(x, x), vreinterpretq_u32_f32(x), vdupq_n_u32(codec::F32_ABS))
    });
    match D::KIND {
        Kind::F32 => products.map(|x| vreinterpretq_u8_u32(x)),
        Kind::F16 | Kind::BF16 => {
            let [a, b, c, d] = products.map(|x| narrow::<D>(x));
            let [low, high] = [vcombine_u16(a, b), vcombine_u16(c, d)];
            let none = vdupq_n_u8(0);
            [vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high), none, none]
        }
    }
}

/// Stochastic rounding: the portable loop, in this path's vectors.
#[target_feature(enable = "neon")]
pub(crate) fn stochastic<S: Source, T: Target>(src: &[S], scale: f32, random: Philox, dst: &mut [u8]) {
    scalar::stochastic::<S, T>(src, scale, random, dst);
}

/// Writes the columns of a tile as rows of `dst`, `stride` apart.
#[target_feature(enable = "neon")]
pub(crate) fn transpose(src: &[u8], src_stride: usize, dst: &mut [u8], stride: usize, _streams: bool) {
    for left in (0..TILE).step_by(16) {
        for group in 0..TILE / 16 {
            let row = |i: usize| {
                let row = &src[(16 * group + i) * src_stride + left..][..16];
                // SAFETY: the part of a row is the 16 bytes that are read.
                unsafe { vld1q_u8(row.as_ptr()) }
            };
            let v = turn!(|a, b| vzip1q_u8(a, b), |a, b| vzip2q_u8(a, b), sixteen!(row));
            let lines = dst.chunks_mut(stride).skip(left);
            for (column, line) in v.into_iter().zip(lines) {
                let place = line[16 * group..][..16].as_mut_ptr();
                // SAFETY: the place is 16 bytes.
                unsafe { vst1q_u8(place, column) };
            }
        }
    }
}

/// Codes as they are.
#[target_feature(enable = "neon")]
pub(crate) fn copy(src: &[u8], dst: &mut [u8], _streams: bool) {
    dst.copy_from_slice(src);
}

/// Nothing: the processor fetches by itself.
#[target_feature(enable = "neon")]
pub(crate) fn fetch<S: Source>(_src: &[S]) {}

/// Nothing: no store here is streamed.
#[target_feature(enable = "neon")]
pub(crate) fn fence() {}
