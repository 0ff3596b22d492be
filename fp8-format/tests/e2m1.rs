//! E2M1 against the codec written two other ways, and what its type promises.

mod oracle;

use fp8_format::{E2M1, Encoding, Error};
use half::{bf16, f16};
use oracle::Spec;
use std::collections::HashSet;

/// Miri is slow: it takes one in so many.
const STRIDE: usize = if cfg!(miri) { 97 } else { 1 };

const SPEC: Spec = Spec { name: "E2M1", mantissa: 1, bias: 1, max: 7, overflow: 7 };

/// The code of the oracle's byte, whose sign is bit 7.
fn four_bits(byte: u8) -> u8 {
    byte & 7 | (byte & 0x80) >> 4
}

/// Values between all neighbours, at their middles and one f32 beside these, of both signs, and what no number is near.
fn edges() -> Vec<f32> {
    let mut edges =
        vec![0.0, f32::from_bits(1), f32::MIN_POSITIVE, 1e-40, 6.5, 7.0, 1e30, f32::MAX, f32::INFINITY];
    edges.extend([f32::NAN, f32::from_bits(0x7F80_0001), f32::from_bits(0xFFC1_2345)]);
    for code in 0..8 {
        let [low, high] = [code, code + 1].map(|code| E2M1::from_bits(code.min(7)).to_f32());
        for part in 0..=16 {
            let x = low + (high - low) * part as f32 / 16.0;
            edges.extend([x, x.next_up(), x.next_down()]);
        }
    }
    edges.iter().flat_map(|x| [*x, -*x]).collect()
}

#[test]
fn values_are_those_of_the_format() {
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for code in 0..16_u8 {
        let x = E2M1::from_bits(code);
        let value = if code < 8 { values[code as usize] } else { -values[code as usize - 8] };
        assert_eq!(x.to_f32().to_bits(), f32::to_bits(value), "{code}");
        assert_eq!(x.to_f64(), f64::from(value));
        assert_eq!(x.to_f16().to_bits(), f16::from_f32(value).to_bits());
        assert_eq!(x.to_bf16().to_bits(), bf16::from_f32(value).to_bits());
        assert_eq!((f32::from(x), f64::from(x)), (value, value.into()));
        assert_eq!((f16::from(x), bf16::from(x)), (x.to_f16(), x.to_bf16()));
        assert_eq!((E2M1::from_bits(code | 0xF0).to_bits(), u8::from(x)), (code, code));
        assert_eq!(E2M1::from_f32(value).to_bits(), code, "a value is its own code");
        for r in 0..=255 {
            assert_eq!(E2M1::from_f32_stochastic(value, r).to_bits(), code);
        }
    }
}

#[test]
fn sixteen_bits_are_rounded_once() {
    for bits in (0..=u16::MAX).step_by(STRIDE) {
        let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        let want = [oracle::parts_f16(bits), oracle::parts_bf16(bits)]
            .map(|parts| four_bits(oracle::encode(SPEC, parts, true)));
        assert_eq!([E2M1::from_f16(half), E2M1::from_bf16(brain)].map(E2M1::to_bits), want, "{bits:#06x}");
        for r in [0, 77, 255] {
            let want = [half.to_f32(), brain.to_f32()].map(|x| E2M1::from_f32_stochastic(x, r).to_bits());
            let got = [E2M1::from_f16_stochastic(half, r), E2M1::from_bf16_stochastic(brain, r)];
            assert_eq!(got.map(E2M1::to_bits), want, "{bits:#06x} {r}");
        }
    }
}

#[test]
fn f32_and_f64_are_rounded_once() {
    let random = |i: u32| f32::from_bits(i.wrapping_mul(0x9E37_79B9) ^ 0x3C00_0000);
    for x in edges().into_iter().chain((0..40_000).step_by(STRIDE).map(random)) {
        let want = four_bits(oracle::encode_by_search(SPEC, x.into(), true));
        assert_eq!(E2M1::from_f32(x).to_bits(), want, "{x:e} = {:#x}", x.to_bits());
        assert_eq!(E2M1::from_f64(x.into()).to_bits(), want, "{x:e}");
        assert_eq!(want, four_bits(oracle::encode(SPEC, oracle::parts_f32(x.to_bits()), true)));
    }
    // In f32 these would be ties.
    for (x, want) in [(2.5 + 1e-12, 3.0), (2.5, 2.0), (1.75 - 1e-12, 1.5), (1.75, 2.0), (5.0 + 1e-9, 6.0)] {
        assert_eq!((E2M1::from_f64(x).to_f64(), E2M1::from_f64(-x).to_f64()), (want, -want), "{x}");
    }
}

#[test]
fn stochastic_rounding_compares_eight_bits() {
    for x in edges().into_iter().step_by(STRIDE.min(7)) {
        for r in [0, 1, 2, 100, 127, 128, 254, 255] {
            let want = four_bits(oracle::encode_stochastic(SPEC, x, u32::from(r) << 24));
            assert_eq!(E2M1::from_f32_stochastic(x, r).to_bits(), want, "{x:e} {r}");
            assert_eq!(E2M1::from_f64_stochastic(x.into(), r).to_bits(), want, "{x:e} {r}");
        }
    }
    // Of 256 bytes as many round up as the fraction has 256ths, cut off.
    for (x, ups) in
        [(2.25, 64), (2.25 + 1.0 / 512.0, 64), (4.0 + 2.0 / 256.0, 1), (0.5 / 257.0, 0), (5.99, 254)]
    {
        let low = E2M1::from_f32_stochastic(x, 0);
        let count = (0..=255).filter(|r| E2M1::from_f32_stochastic(x, *r) != low).count();
        assert_eq!(count, ups, "{x}");
    }
}

#[test]
fn pairs_survive_packing() {
    for byte in 0..=255 {
        let [first, second] = E2M1::unpack(byte);
        assert_eq!((first.to_bits(), second.to_bits()), (byte & 15, byte >> 4));
        assert_eq!(E2M1::pack(first, second), byte);
    }
}

#[test]
fn it_is_ordered_by_value() {
    let all: Vec<E2M1> = (0..16).map(E2M1::from_bits).collect();
    for a in &all {
        for b in &all {
            assert_eq!(Some(a.cmp(b)), a.to_f32().partial_cmp(&b.to_f32()), "{a} {b}");
            assert_eq!(a == b, a.to_f32() == b.to_f32());
            assert_eq!(a.copysign(*b).to_f32().to_bits(), a.to_f32().copysign(b.to_f32()).to_bits());
        }
        assert_eq!((-*a).to_f32().to_bits(), (-a.to_f32()).to_bits());
        assert_eq!(-a, -*a);
        assert_eq!(a.abs().to_f32().to_bits(), a.to_f32().abs().to_bits());
        assert_eq!(a.is_sign_negative(), a.to_f32().is_sign_negative());
        assert_eq!(a.is_sign_positive(), a.to_f32().is_sign_positive());
        let magnitude = a.to_f32().abs();
        assert_eq!(
            (a.is_zero(), a.is_subnormal(), a.is_normal()),
            (magnitude == 0.0, magnitude == 0.5, magnitude >= 1.0)
        );
    }
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 15, "both zeros are one");
    assert_eq!(
        [E2M1::ZERO, E2M1::MAX, E2M1::MIN, E2M1::ONE, E2M1::NEG_ONE].map(E2M1::to_f32),
        [0.0, 6.0, -6.0, 1.0, -1.0]
    );
    assert_eq!(E2M1::NEG_ZERO.to_f32().to_bits(), 1 << 31);
    assert_eq!(
        [E2M1::MIN_POSITIVE, E2M1::MIN_POSITIVE_SUBNORMAL, E2M1::EPSILON].map(E2M1::to_f32),
        [1.0, 0.5, 0.5]
    );
    assert_eq!(E2M1::default().to_bits(), 0);
}

#[test]
fn text_and_bits_are_read_and_written() {
    assert_eq!("2.6".parse::<E2M1>().unwrap().to_f32(), 3.0);
    assert_eq!("-inf".parse::<E2M1>().unwrap(), E2M1::MIN);
    assert_eq!("NaN".parse::<E2M1>().unwrap(), E2M1::MAX);
    let error = "six".parse::<E2M1>().unwrap_err().to_string();
    assert_eq!(error, "parse E2M1: invalid float literal: expected a decimal number such as -1.5 or 0.5");
    assert_eq!(E2M1::try_from(0xA).unwrap(), E2M1::NEG_ONE);
    let error = E2M1::try_from(16).unwrap_err();
    assert_eq!(error, Error::CodeE2M1 { code: 16 });
    assert_eq!(error.to_string(), "E2M1: 16 is no code: expected 0 to 15");
    let x = E2M1::from_f32(-1.5);
    assert_eq!(
        format!("{x} {x:?} {x:e} {x:E} {x:x} {x:X} {x:b} {x:o}"),
        "-1.5 -1.5 -1.5e0 -1.5E0 b B 1011 13"
    );
    assert_eq!(format!("{:5.2}|", E2M1::MAX), " 6.00|");
}

#[test]
fn conversions_are_const() {
    const X: [E2M1; 4] = [
        E2M1::from_f32(2.6),
        E2M1::from_f64(-0.3),
        E2M1::from_f16(f16::ONE),
        E2M1::from_f32_stochastic(2.25, 192),
    ];
    const VALUES: [f32; 2] = [X[0].to_f32(), X[1].to_f32()];
    assert_eq!((VALUES, X[2], X[3].to_f32()), ([3.0, -0.5], E2M1::ONE, 3.0));
}

#[test]
fn the_tag_of_the_format_has_its_conversions() {
    let tag = Encoding::E2M1;
    for code in 0..16 {
        let value = E2M1::from_bits(code).to_f32();
        assert_eq!(tag.to_f32(code).to_bits(), value.to_bits());
        assert!(tag.is_finite(code) && !tag.is_nan(code));
    }
    let limit = tag.saturation_limit();
    for x in [0.25, 0.26, -2.5, 5.0, limit, limit.next_up(), 1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]
    {
        let code = E2M1::from_f32(x).to_bits();
        assert_eq!((tag.from_f32(x), tag.from_f32_saturating(x)), (code, code), "{x}");
        for r in [0, 1, 128, 255] {
            let code = E2M1::from_f32_stochastic(x, r).to_bits();
            assert_eq!(tag.from_f32_stochastic(x, u32::from(r) << 24), code, "{x} {r}");
        }
    }
    // Half a step above 6 is a tie, which goes to the even 8.
    assert_eq!((limit, limit.next_up()), (7.0f32.next_down(), 7.0));
}
