//! Every length to 257 at every place of a line, with plain stores and with those past the caches: what lies outside the
//! destination must stay, what lies inside be right.

use super::count::{Path as Count, timed, total};
use fp8_format::slice::{Codec, Path};
use fp8_format::{Fp8, Result, Source};
use half::{bf16, f16};
use std::fmt::LowerHex;
use std::time::Duration;

const LONGEST: usize = 257;
/// Places in a line.
const PLACES: usize = 64;
/// The length of a destination: the longest slice, and room on both sides of every place to which it is moved.
const ROOM: usize = LONGEST + 2 * PLACES;
const SCALE: f32 = 0.7;

/// A call with the elements it reads, and what it gives for each of them.
struct Trial<'a, S, D, B> {
    src: &'a [S],
    want: Vec<B>,
    guard: D,
    bits: fn(D) -> B,
}

impl<S: Copy, D: Copy, B: Copy + PartialEq + LowerHex> Trial<'_, S, D, B> {
    /// Calls `run` for all lengths and places; it says whether all that it returned was right.
    fn run(&self, count: &Count, run: impl Fn(&[S], &mut [D]) -> bool) {
        let mut dst = [self.guard; ROOM];
        let guard = (self.bits)(self.guard);
        for len in 0..=LONGEST {
            for place in 0..PLACES {
                let from = (place * 7 + len) % PLACES;
                let (src, inside) = (&self.src[from..from + len], place..place + len);
                let (is_right, took) = timed(|| run(src, &mut dst[inside.clone()]));
                let got = dst.map(self.bits);
                let want = &self.want[from..from + len];
                count.compare(|i| (from + i) as u64, &got[inside.clone()], want, took);
                let outside = got[..inside.start].iter().chain(&got[inside.end..]);
                let is_good = is_right && outside.copied().all(|bits| bits == guard);
                count.compare(|_| len as u64, &[u8::from(is_good)], &[1], Duration::ZERO);
                dst.fill(self.guard);
            }
        }
    }
}

/// All calls of a codec that convert, of all paths.
pub(super) fn everywhere<T: Fp8>() -> (u64, u64) {
    let counts: Vec<Count> = Path::available()
        .map(|path| {
            let count = Count::new(format!("{}: lengths and places, {path}", T::ENCODING));
            for bytes in [0, usize::MAX] {
                let codec = Codec::new().on(path).streaming_beyond(bytes);
                encodings::<T>(&count, codec);
                decodings::<T>(&count, codec);
            }
            count
        })
        .collect();
    total(&counts)
}

/// Ordinary numbers, some of them beyond the formats, and NaN.
fn numbers() -> Vec<f32> {
    let number = |i: u32| f32::from_bits(0x3800_0000 + i.wrapping_mul(0x00F3_4567) % 0x0D00_0000);
    let signed = |i: u32| if i.is_multiple_of(3) { -number(i) } else { number(i) };
    (0..(LONGEST + PLACES) as u32).map(|i| if i % 41 == 40 { f32::NAN } else { signed(i) }).collect()
}

fn encodings<T: Fp8>(count: &Count, codec: Codec) {
    let x = numbers();
    let x16: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
    let xb16: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    encoding(count, &x, T::from_f32, |src, dst| codec.from_f32(src, dst));
    encoding(count, &x, T::from_f32_saturating, |src, dst| codec.from_f32_saturating(src, dst));
    encoding(count, &x16, T::from_f16, |src, dst| codec.from_f16(src, dst));
    encoding(count, &x16, T::from_f16_saturating, |src, dst| codec.from_f16_saturating(src, dst));
    encoding(count, &xb16, T::from_bf16, |src, dst| codec.from_bf16(src, dst));
    encoding(count, &xb16, T::from_bf16_saturating, |src, dst| codec.from_bf16_saturating(src, dst));
    quantization::<T, f32>(count, codec, &x);
    quantization::<T, f16>(count, codec, &x16);
    quantization::<T, bf16>(count, codec, &xb16);
}

fn encoding<T: Fp8, S: Copy>(
    count: &Count,
    src: &[S],
    one: impl Fn(S) -> T,
    all: impl Fn(&[S], &mut [T]) -> Result<()>,
) {
    let want = src.iter().map(|x| one(*x).to_bits()).collect();
    let trial = Trial { src, want, guard: T::from_bits(0x55), bits: T::to_bits };
    trial.run(count, |src, dst| all(src, dst).is_ok());
}

/// With the maximum, which must be the same alone.
fn quantization<T: Fp8, S: Source>(count: &Count, codec: Codec, src: &[S]) {
    let want = src.iter().map(|x| T::from_f32_saturating(x.to_f32() * SCALE).to_bits()).collect();
    let trial = Trial { src, want, guard: T::from_bits(0x55), bits: T::to_bits };
    trial.run(count, |src, dst| {
        let magnitudes = src.iter().map(|x| x.to_f32().abs());
        let want = magnitudes.filter(|x| !x.is_nan()).fold(0.0, f32::max).to_bits();
        codec.quantize(src, SCALE, dst).is_ok_and(|amax| amax.to_bits() == want)
            && codec.amax(src).to_bits() == want
    });
}

fn decodings<T: Fp8>(count: &Count, codec: Codec) {
    let codes: Vec<T> = (0..LONGEST + PLACES).map(|i| T::from_bits((i * 7 % 256) as u8)).collect();
    let (f32s, f16s, bf16s) = (f32::to_bits, f16::to_bits, bf16::to_bits);
    decoding(count, &codes, f32s, T::to_f32, |src, dst| codec.to_f32(src, dst));
    decoding(count, &codes, f16s, T::to_f16, |src, dst| codec.to_f16(src, dst));
    decoding(count, &codes, bf16s, T::to_bf16, |src, dst| codec.to_bf16(src, dst));
    // NaN is canonical, all ones below the sign, however the multiplication left it.
    let product = |code: T| {
        let v = code.to_f32() * SCALE;
        if v.is_nan() { f32::from_bits(0x7FFF_FFFF) } else { v }
    };
    decoding(count, &codes, f32s, product, |src, dst| codec.dequantize(src, SCALE, dst));
    let half = |code| f16::from_f32(product(code));
    decoding(count, &codes, f16s, half, |src, dst| codec.dequantize(src, SCALE, dst));
    let half = |code| bf16::from_f32(product(code));
    decoding(count, &codes, bf16s, half, |src, dst| codec.dequantize(src, SCALE, dst));
}

fn decoding<T: Fp8, D: Source, B: Copy + PartialEq + LowerHex>(
    count: &Count,
    src: &[T],
    bits: fn(D) -> B,
    one: impl Fn(T) -> D,
    all: impl Fn(&[T], &mut [D]) -> Result<()>,
) {
    let want = src.iter().map(|code| bits(one(*code))).collect();
    let trial = Trial { src, want, guard: D::from_f32(0.333), bits };
    trial.run(count, |src, dst| all(src, dst).is_ok());
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_format::E4M3;

    /// A call that writes one element too many, or a wrong one, is seen.
    #[test]
    fn mistakes_are_counted() {
        let src = numbers();
        let want: Vec<u8> = src.iter().map(|x| E4M3::from_f32(*x).to_bits()).collect();
        let trial = Trial { src: &src, want, guard: E4M3::from_bits(0x55), bits: E4M3::to_bits };
        let right = |src: &[f32], dst: &mut [E4M3]| Codec::new().from_f32(src, dst).is_ok();
        let mismatches = |run: &dyn Fn(&[f32], &mut [E4M3]) -> bool| {
            let count = Count::new("a trial");
            trial.run(&count, run);
            count.report().1
        };
        assert_eq!(mismatches(&right), 0);
        assert_eq!(mismatches(&|src, dst| right(src, dst) && src.len() != 77), PLACES as u64);
        let wrong = |src: &[f32], dst: &mut [E4M3]| {
            let is_right = right(src, dst);
            if let [first, ..] = dst {
                *first = E4M3::from_bits(0x55);
            }
            is_right
        };
        assert!(mismatches(&wrong) >= (LONGEST * PLACES * 9 / 10) as u64);
    }
}
