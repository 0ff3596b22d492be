//! The sweep over the codec. The oracle is asked once per pattern, format and mode; every path answers to it.

use super::oracle::{self, Spec};
use super::{Path, for_each_chunk, timed};
use fp8_format::{E4M3, E5M2, Fp8, slice};
use half::{bf16, f16};
use std::time::Duration;

/// Returns (conversions, mismatches) of everything.
pub(super) fn sweep_all(stride: u32) -> (u64, u64) {
    println!("{:<44} {:>11} {:>11}", "path", "count", "time in it");
    let reports = [
        f32_patterns::<E4M3>(oracle::E4M3, stride),
        f32_patterns::<E5M2>(oracle::E5M2, stride),
        small_patterns::<E4M3>(oracle::E4M3),
        small_patterns::<E5M2>(oracle::E5M2),
    ];
    reports.into_iter().fold((0, 0), |total, one| (total.0 + one.0, total.1 + one.1))
}

fn total(paths: &[&Path]) -> (u64, u64) {
    paths.iter().map(|path| path.report()).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

fn bytes<T: Fp8>(codes: &[T], out: &mut Vec<u8>) {
    out.clear();
    out.extend(codes.iter().map(|code| code.to_bits()));
}

/// Scalar, slice and fused conversion of all f32 patterns, in both modes; quantize's amax by chunk.
fn f32_patterns<T: Fp8>(spec: Spec, stride: u32) -> (u64, u64) {
    let path = |name: &str| Path::new(format!("{}: f32, {name}", spec.name));
    let (scalar, scalar_sat) = (path("scalar"), path("scalar saturating"));
    let (whole, whole_sat) = (path("slice"), path("slice saturating"));
    let (fused, fused_amax) = (path("slice::quantize, scale 1"), path("slice::quantize, its amax"));
    for_each_chunk(stride, |patterns| {
        let input = |i: usize| patterns.get(i).copied().unwrap_or(0).into();
        let x: Vec<f32> = patterns.iter().map(|bits| f32::from_bits(*bits)).collect();
        let mut codes = vec![T::default(); x.len()];
        let mut got = Vec::with_capacity(x.len());
        let judge = |saturating| -> Vec<u8> {
            patterns.iter().map(|bits| oracle::encode(spec, oracle::parts_f32(*bits), saturating)).collect()
        };

        let expected = judge(false);
        let took = timed(|| got.extend(x.iter().map(|x| std::hint::black_box(T::from_f32(*x)).to_bits()))).1;
        scalar.compare(input, &got, &expected, took);
        let (ok, took) = timed(|| slice::from_f32(&x, &mut codes).is_ok());
        bytes(&codes, &mut got);
        whole.compare(input, if ok { &got } else { &[] }, &expected, took);

        let expected = judge(true);
        got.clear();
        let took = timed(|| {
            got.extend(x.iter().map(|x| std::hint::black_box(T::from_f32_saturating(*x)).to_bits()))
        })
        .1;
        scalar_sat.compare(input, &got, &expected, took);
        let (ok, took) = timed(|| slice::from_f32_saturating(&x, &mut codes).is_ok());
        bytes(&codes, &mut got);
        whole_sat.compare(input, if ok { &got } else { &[] }, &expected, took);

        codes.fill(T::default());
        let (amax, took) = timed(|| slice::quantize(&x, 1.0, &mut codes));
        bytes(&codes, &mut got);
        fused.compare(input, &got, &expected, took);
        // Magnitudes are ordered as their bits; what lies above infinity is NaN.
        let magnitudes = patterns.iter().map(|bits| bits & 0x7FFF_FFFF);
        let want = magnitudes.filter(|bits| *bits <= 0x7F80_0000).max().unwrap_or(0);
        let equal = u8::from(amax.is_ok_and(|amax| amax.to_bits() == want));
        fused_amax.compare(|_| input(0), &[equal], &[1], Duration::ZERO);
    });
    total(&[&scalar, &scalar_sat, &whole, &whole_sat, &fused, &fused_amax])
}

/// All f16 and bf16 patterns in both modes, scalar and slice; all codes to f32, f64, f16, bf16.
fn small_patterns<T: Fp8>(spec: Spec) -> (u64, u64) {
    let paths = [
        encode_all("f16", spec, oracle::parts_f16, f16::from_bits, false, T::from_f16, slice::from_f16),
        encode_all(
            "f16 saturating",
            spec,
            oracle::parts_f16,
            f16::from_bits,
            true,
            T::from_f16_saturating,
            slice::from_f16_saturating,
        ),
        encode_all("bf16", spec, oracle::parts_bf16, bf16::from_bits, false, T::from_bf16, slice::from_bf16),
        encode_all(
            "bf16 saturating",
            spec,
            oracle::parts_bf16,
            bf16::from_bits,
            true,
            T::from_bf16_saturating,
            slice::from_bf16_saturating,
        ),
        decode_all::<T>(spec),
    ];
    total(&paths.iter().collect::<Vec<_>>())
}

type OnSlice<S, T> = fn(&[S], &mut [T]) -> fp8_format::Result<()>;

fn encode_all<S: Copy, T: Fp8>(
    name: &str,
    spec: Spec,
    parts: fn(u16) -> oracle::Parts,
    from_bits: fn(u16) -> S,
    saturating: bool,
    scalar: fn(S) -> T,
    whole: OnSlice<S, T>,
) -> Path {
    let path = Path::new(format!("{}: {name}, scalar and slice", spec.name));
    let x: Vec<S> = (0..=u16::MAX).map(from_bits).collect();
    let expected: Vec<u8> =
        (0..=u16::MAX).map(|bits| oracle::encode(spec, parts(bits), saturating)).collect();
    let (got, took) = timed(|| x.iter().map(|x| scalar(*x).to_bits()).collect::<Vec<u8>>());
    path.compare(|i| i as u64, &got, &expected, took);
    let mut codes = vec![T::default(); x.len()];
    let (ok, took) = timed(|| whole(&x, &mut codes).is_ok());
    let mut got = Vec::new();
    bytes(&codes, &mut got);
    path.compare(|i| i as u64, if ok { &got } else { &[] }, &expected, took);
    path
}

/// Each of the 256 codes to the four wider types, one comparison a code and type.
fn decode_all<T: Fp8>(spec: Spec) -> Path {
    let path = Path::new(format!("{}: codes to f32, f64, f16, bf16", spec.name));
    let codes: Vec<T> = (0..=u8::MAX).map(T::from_bits).collect();
    let (mut f32s, mut f16s, mut bf16s) = (vec![0.0; 256], vec![f16::ZERO; 256], vec![bf16::ZERO; 256]);
    let (ok, took) = timed(|| {
        slice::to_f32(&codes, &mut f32s).is_ok()
            && slice::to_f16(&codes, &mut f16s).is_ok()
            && slice::to_bf16(&codes, &mut bf16s).is_ok()
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
    path.compare(|i| i as u64 / 4, &right, &vec![1; 4 * 256], took);
    path
}
