//! The sweep over the codec. The oracle is asked once per pattern, format and mode; every path answers to it.

use super::count::{Path as Count, for_each_chunk, timed, total};
use super::oracle::{self, Spec};
use super::{draw, places};
use fp8_format::slice::{Codec, Path};
use fp8_format::{E4M3, E5M2, Fp8, Source};
use half::{bf16, f16};
use std::time::Duration;

/// Scales for the fused conversion: those that are powers of two and that are not, negative ones, subnormal, huge and
/// tiny ones, and those that make products NaN or 0. All patterns have the first; [`draw`] says which the others have.
pub(super) const SCALES: [f32; 14] = [
    0.37,
    1.0,
    448.0 / 6.3,
    4096.0,
    1.0 / 1024.0,
    1.999_999_9,
    -3e5,
    1e-40,
    f32::MAX,
    f32::MIN_POSITIVE,
    1.2e30,
    7.9e-31,
    f32::INFINITY,
    0.0,
];
/// Returns (conversions, mismatches) of everything.
pub(super) fn sweep_all(stride: u32) -> (u64, u64) {
    let names: Vec<_> = Path::available().map(Path::name).collect();
    println!("paths: {}", names.join(", "));
    println!("{:<44} {:>11} {:>11}", "path", "count", "time in it");
    let reports = [
        f32_patterns::<E4M3>(oracle::E4M3, stride),
        f32_patterns::<E5M2>(oracle::E5M2, stride),
        small_patterns::<E4M3>(oracle::E4M3),
        small_patterns::<E5M2>(oracle::E5M2),
        places::everywhere::<E4M3>(),
        places::everywhere::<E5M2>(),
    ];
    reports.into_iter().fold((0, 0), |total, one| (total.0 + one.0, total.1 + one.1))
}

fn bytes<T: Fp8>(codes: &[T], out: &mut Vec<u8>) {
    out.clear();
    out.extend(codes.iter().map(|code| code.to_bits()));
}

/// A path with its counts of one format.
struct OfPath {
    codec: Codec,
    plain: Count,
    saturating: Count,
    quantize: Count,
    amax: Count,
}

fn compare_one_by_one<T: Fp8>(
    count: &Count,
    input: impl Fn(usize) -> u64,
    x: &[f32],
    encode: impl Fn(f32) -> T,
    expected: &[u8],
) {
    // Opaque to the optimizer, which must not make a loop over slices of it.
    let all = || x.iter().map(|x| std::hint::black_box(encode(*x)).to_bits()).collect::<Vec<u8>>();
    let (got, took) = timed(all);
    count.compare(input, &got, expected, took);
}

/// All f32 patterns, converted in both modes and quantized, by the function of one value and by each path; quantize's amax
/// by chunk. The function's answers, once the oracle has found them right, judge those with scales.
fn f32_patterns<T: Fp8>(spec: Spec, stride: u32) -> (u64, u64) {
    let count = |name: &str| Count::new(format!("{}: f32, {name}", spec.name));
    let (one, one_saturating) = (count("one by one"), count("one by one, saturating"));
    let paths: Vec<OfPath> = Path::available()
        .map(|path| OfPath {
            codec: Codec::new().on(path),
            plain: count(&format!("{path}")),
            saturating: count(&format!("{path}, saturating")),
            quantize: count(&format!("{path}, quantize")),
            amax: count(&format!("{path}, quantize's amax")),
        })
        .collect();
    for_each_chunk(stride, |patterns| {
        let input = |i: usize| patterns.get(i).copied().unwrap_or(0).into();
        let first = patterns.first().copied().unwrap_or(0);
        let x: Vec<f32> = patterns.iter().map(|bits| f32::from_bits(*bits)).collect();
        let mut codes = vec![T::default(); x.len()];
        let mut got = Vec::with_capacity(x.len());
        let streaming = |scale| if draw::streams(first, scale) { 0 } else { usize::MAX };

        // In one go: what both modes have in common is computed once.
        let judge = |bits: &u32| {
            let parts = oracle::parts_f32(*bits);
            (oracle::encode(spec, parts, false), oracle::encode(spec, parts, true))
        };
        let (plain, saturated): (Vec<u8>, Vec<u8>) = patterns.iter().map(judge).unzip();
        compare_one_by_one(&one, input, &x, T::from_f32, &plain);
        compare_one_by_one(&one_saturating, input, &x, T::from_f32_saturating, &saturated);
        for (saturating, expected) in [(false, plain), (true, saturated)] {
            for of in &paths {
                let codec = of.codec.streaming_beyond(streaming(usize::from(saturating)));
                codes.fill(T::default());
                let (ok, took) = timed(|| match saturating {
                    false => codec.from_f32(&x, &mut codes).is_ok(),
                    true => codec.from_f32_saturating(&x, &mut codes).is_ok(),
                });
                bytes(&codes, &mut got);
                let count = if saturating { &of.saturating } else { &of.plain };
                count.compare(input, if ok { &got } else { &[] }, &expected, took);
            }
        }

        let mut drawn = Vec::with_capacity(x.len());
        for (place, scale) in SCALES.into_iter().enumerate() {
            draw::draw(first, &x, place, &mut drawn);
            let codes = &mut codes[..drawn.len()];
            let input = |i: usize| drawn[i].to_bits().into();
            // Magnitudes are ordered as their bits; what lies above infinity is NaN.
            let magnitudes = drawn.iter().map(|x| x.to_bits() & 0x7FFF_FFFF);
            let want = magnitudes.filter(|bits| *bits <= 0x7F80_0000).max().unwrap_or(0);
            let expected: Vec<u8> =
                drawn.iter().map(|x| T::from_f32_saturating(x * scale).to_bits()).collect();
            for of in &paths {
                let codec = of.codec.streaming_beyond(streaming(place));
                codes.fill(T::default());
                let (amax, took) = timed(|| codec.quantize(&drawn, scale, codes));
                bytes(codes, &mut got);
                of.quantize.compare(input, &got, &expected, took);
                let equal = u8::from(amax.is_ok_and(|amax| amax.to_bits() == want));
                of.amax.compare(|_| input(0), &[equal], &[1], Duration::ZERO);
            }
        }
    });
    let of_paths = paths.iter().flat_map(|of| [&of.plain, &of.saturating, &of.quantize, &of.amax]);
    total([&one, &one_saturating].into_iter().chain(of_paths))
}

/// All f16 and bf16 patterns, and all codes.
fn small_patterns<T: Fp8>(spec: Spec) -> (u64, u64) {
    let mut counts = vec![
        encode_all(spec, "f16", oracle::parts_f16, f16::from_bits, [T::from_f16, T::from_f16_saturating]),
        encode_all(
            spec,
            "bf16",
            oracle::parts_bf16,
            bf16::from_bits,
            [T::from_bf16, T::from_bf16_saturating],
        ),
    ];
    for path in Path::available() {
        let codec = Codec::new().on(path);
        counts.push(encode_slices(
            spec,
            "f16",
            codec,
            oracle::parts_f16,
            f16::from_bits,
            |codec, x, codes: &mut [T], saturating| {
                if saturating { codec.from_f16_saturating(x, codes) } else { codec.from_f16(x, codes) }
            },
        ));
        counts.push(encode_slices(
            spec,
            "bf16",
            codec,
            oracle::parts_bf16,
            bf16::from_bits,
            |codec, x, codes: &mut [T], saturating| {
                if saturating { codec.from_bf16_saturating(x, codes) } else { codec.from_bf16(x, codes) }
            },
        ));
        counts.push(quantize_halves::<T, f16>(spec, "f16", codec, f16::from_bits));
        counts.push(quantize_halves::<T, bf16>(spec, "bf16", codec, bf16::from_bits));
        counts.push(decode_all::<T>(spec, codec));
    }
    total(&counts)
}

fn encode_all<S: Copy, T: Fp8>(
    spec: Spec,
    source: &str,
    parts: fn(u16) -> oracle::Parts,
    from_bits: fn(u16) -> S,
    modes: [fn(S) -> T; 2],
) -> Count {
    let count = Count::new(format!("{}: {source}, one by one", spec.name));
    for (encode, saturating) in modes.into_iter().zip([false, true]) {
        let expected: Vec<u8> =
            (0..=u16::MAX).map(|bits| oracle::encode(spec, parts(bits), saturating)).collect();
        let all = || (0..=u16::MAX).map(|bits| encode(from_bits(bits)).to_bits()).collect::<Vec<u8>>();
        let (got, took) = timed(all);
        count.compare(|i| i as u64, &got, &expected, took);
    }
    count
}

fn encode_slices<S: Copy, T: Fp8>(
    spec: Spec,
    source: &str,
    codec: Codec,
    parts: fn(u16) -> oracle::Parts,
    from_bits: fn(u16) -> S,
    encode: fn(Codec, &[S], &mut [T], bool) -> fp8_format::Result<()>,
) -> Count {
    let count = Count::new(format!("{}: {source}, {}", spec.name, codec.path()));
    let x: Vec<S> = (0..=u16::MAX).map(from_bits).collect();
    let (mut codes, mut got) = (vec![T::default(); x.len()], Vec::new());
    for saturating in [false, true] {
        let expected: Vec<u8> =
            (0..=u16::MAX).map(|bits| oracle::encode(spec, parts(bits), saturating)).collect();
        for streaming in [0, usize::MAX] {
            codes.fill(T::default());
            let (ok, took) =
                timed(|| encode(codec.streaming_beyond(streaming), &x, &mut codes, saturating).is_ok());
            bytes(&codes, &mut got);
            count.compare(|i| i as u64, if ok { &got } else { &[] }, &expected, took);
        }
    }
    count
}

/// All patterns in one slice, and in one without infinity, with each scale and with 97 others.
fn quantize_halves<T: Fp8, S: Source>(
    spec: Spec,
    source: &str,
    codec: Codec,
    from_bits: fn(u16) -> S,
) -> Count {
    let count = Count::new(format!("{}: {source}, {}, quantize", spec.name, codec.path()));
    let all: Vec<S> = (0..=u16::MAX).map(from_bits).collect();
    let finite_or_nan: Vec<S> = all.iter().copied().filter(|x| !x.to_f32().is_infinite()).collect();
    // Spread over the significands and the exponents of f32.
    let others = (1..98).map(|i| f32::from_bits((0x0123_4567 * i) & 0x7FFF_FFFF));
    let mut got = Vec::new();
    for scale in SCALES.into_iter().chain(others) {
        for x in [&all, &finite_or_nan] {
            let mut codes = vec![T::default(); x.len()];
            let expected: Vec<u8> =
                x.iter().map(|x| T::from_f32_saturating(x.to_f32() * scale).to_bits()).collect();
            let amax = x.iter().map(|x| x.to_f32().abs()).filter(|x| !x.is_nan()).fold(0.0, f32::max);
            let (found, took) = timed(|| codec.quantize(x, scale, &mut codes));
            bytes(&codes, &mut got);
            let is_right = |found: f32| found.to_bits() == amax.to_bits();
            let right = found.is_ok_and(is_right) && is_right(codec.amax(x));
            count.compare(|i| i as u64, if right { &got } else { &[] }, &expected, took);
        }
    }
    count
}

/// Each of the 256 codes to the four wider types, one comparison a code and type.
fn decode_all<T: Fp8>(spec: Spec, codec: Codec) -> Count {
    let count = Count::new(format!("{}: codes to f32, f64, f16, bf16, {}", spec.name, codec.path()));
    let codes: Vec<T> = (0..=u8::MAX).map(T::from_bits).collect();
    let (mut f32s, mut f16s, mut bf16s) = (vec![0.0; 256], vec![f16::ZERO; 256], vec![bf16::ZERO; 256]);
    let (ok, took) = timed(|| {
        codec.to_f32(&codes, &mut f32s).is_ok()
            && codec.to_f16(&codes, &mut f16s).is_ok()
            && codec.to_bf16(&codes, &mut bf16s).is_ok()
    });
    let mut right = Vec::new();
    for (((code, x), y), z) in (0..=u8::MAX).zip(&f32s).zip(&f16s).zip(&bf16s) {
        let (want, w) = (oracle::decode(spec, code), T::from_bits(code).to_f64());
        // NaN has one pattern in each type: all ones below the sign.
        let equal = if want.is_nan() {
            let nan = (0x7FFF_FFFF, 0x7FFF_FFFF_FFFF_FFFF, 0x7FFF, 0x7FFF);
            let got = (x.to_bits(), w.to_bits(), y.to_bits(), z.to_bits());
            [got.0 == nan.0, got.1 == nan.1, got.2 == nan.2, got.3 == nan.3]
        } else {
            [f64::from(*x), w, f64::from(*y), f64::from(*z)].map(|got| got.to_bits() == want.to_bits())
        };
        right.extend(equal.map(|equal| u8::from(equal && ok)));
    }
    count.compare(|i| i as u64 / 4, &right, &vec![1; 4 * 256], took);
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coarse_sweep_has_no_mismatch_and_counts_what_it_compares() {
        const STRIDE: u32 = 40_009;
        let patterns = u64::from(u32::MAX / STRIDE + 1);
        let paths = Path::available().count() as u64;
        let (conversions, mismatches) = f32_patterns::<E5M2>(oracle::E5M2, STRIDE);
        assert_eq!(mismatches, 0);
        // Two modes one by one; by each path two modes, a whole scale and a sixteenth of all others.
        let least = 2 * patterns + paths * (3 * patterns + (SCALES.len() as u64 - 1) * (patterns / 16));
        assert!((least..least + least / 50).contains(&conversions), "{conversions} of {least}");
    }
}
