//! The scalar codec against the oracles, and its properties.

mod oracle;

use fp8_format::{E4M3, E5M2, Encoding, Fp8};
use half::{bf16, f16};
use oracle::Spec;
use proptest::prelude::*;

/// Patterns between two that are taken; Miri is slow.
const STRIDE: usize = if cfg!(miri) { 1_048_573 } else { 251 };

/// The number of cases of each property.
const CASES: u32 = if cfg!(miri) { 16 } else { 4096 };

/// Values at which a codec breaks: codes, middles between codes, limits; each with its f32 neighbours, both signs.
fn edges() -> Vec<f32> {
    let mut edges = vec![0.0, 1.0, 464.0, 480.0, 61440.0, 65536.0, f32::MAX, f32::INFINITY, f32::NAN];
    edges.extend([1, 2, 0x007F_FFFF, 0x0080_0000, 0x7F80_0001, 0x7FC0_0000].map(f32::from_bits));
    for spec in [oracle::E4M3, oracle::E5M2] {
        for code in 0..spec.max as u8 {
            let (low, high) = (oracle::decode(spec, code), oracle::decode(spec, code + 1));
            edges.extend([low as f32, ((low + high) / 2.0) as f32, high as f32]);
        }
    }
    edges.extend((-30..20).map(|e| 2_f32.powi(e)));
    let some = edges.into_iter().step_by(if cfg!(miri) { 31 } else { 1 });
    some.flat_map(|x| [x.next_down(), x, x.next_up()]).flat_map(|x| [x, -x]).collect()
}

fn for_both(check: impl Fn(Spec, Encoding)) {
    check(oracle::E4M3, Encoding::E4M3);
    check(oracle::E5M2, Encoding::E5M2);
}

#[track_caller]
fn check_f32<T: Fp8>(spec: Spec, x: f32) {
    let parts = oracle::parts_f32(x.to_bits());
    let (got, want) = (T::from_f32(x).to_bits(), oracle::encode(spec, parts, false));
    assert_eq!(got, want, "{} from_f32({x:?} = {:#010x}): {got:#x}, not {want:#x}", spec.name, x.to_bits());
    let (got, want) = (T::from_f32_saturating(x).to_bits(), oracle::encode(spec, parts, true));
    assert_eq!(got, want, "{} saturating({x:?} = {:#010x}): {got:#x}, not {want:#x}", spec.name, x.to_bits());
}

#[test]
fn every_251st_f32_pattern() {
    for bits in (0..=u32::MAX).step_by(STRIDE) {
        check_f32::<E4M3>(oracle::E4M3, f32::from_bits(bits));
        check_f32::<E5M2>(oracle::E5M2, f32::from_bits(bits));
    }
}

#[test]
fn edges_by_both_oracles_and_the_runtime_tag() {
    for x in edges() {
        check_f32::<E4M3>(oracle::E4M3, x);
        check_f32::<E5M2>(oracle::E5M2, x);
        for_both(|spec, encoding| {
            let parts = oracle::parts_f32(x.to_bits());
            for saturating in [false, true] {
                let want = oracle::encode_by_search(spec, x.into(), saturating);
                assert_eq!(oracle::encode(spec, parts, saturating), want, "the oracles differ at {x:?}");
            }
            assert_eq!(encoding.from_f32(x), oracle::encode(spec, parts, false));
            assert_eq!(encoding.from_f32_saturating(x), oracle::encode(spec, parts, true));
            for r in [0, 1, 0x7FFF_FFFF, 0x8000_0000, u32::MAX] {
                assert_eq!(
                    encoding.from_f32_stochastic(x, r),
                    oracle::encode_stochastic(spec, x, r),
                    "{x:?} {r}"
                );
            }
        });
    }
}

#[test]
fn all_f16_and_bf16_patterns() {
    for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 97 } else { 1 }) {
        let (x, y) = (f16::from_bits(bits), bf16::from_bits(bits));
        let (px, py) = (oracle::parts_f16(bits), oracle::parts_bf16(bits));
        let (a, b) = (oracle::E4M3, oracle::E5M2);
        assert_eq!(E4M3::from_f16(x).to_bits(), oracle::encode(a, px, false), "f16 {bits:#06x}");
        assert_eq!(E4M3::from_f16_saturating(x).to_bits(), oracle::encode(a, px, true), "f16 {bits:#06x}");
        assert_eq!(E5M2::from_f16(x).to_bits(), oracle::encode(b, px, false), "f16 {bits:#06x}");
        assert_eq!(E5M2::from_f16_saturating(x).to_bits(), oracle::encode(b, px, true), "f16 {bits:#06x}");
        assert_eq!(E4M3::from_bf16(y).to_bits(), oracle::encode(a, py, false), "bf16 {bits:#06x}");
        assert_eq!(E4M3::from_bf16_saturating(y).to_bits(), oracle::encode(a, py, true), "bf16 {bits:#06x}");
        assert_eq!(E5M2::from_bf16(y).to_bits(), oracle::encode(b, py, false), "bf16 {bits:#06x}");
        assert_eq!(E5M2::from_bf16_saturating(y).to_bits(), oracle::encode(b, py, true), "bf16 {bits:#06x}");
        let r = u32::from(bits) << 16;
        assert_eq!(
            E4M3::from_f16_stochastic(x, r).to_bits(),
            E4M3::from_f32_stochastic(half::f16::to_f32(x), r).to_bits()
        );
        assert_eq!(
            E5M2::from_bf16_stochastic(y, r).to_bits(),
            E5M2::from_f32_stochastic(half::bf16::to_f32(y), r).to_bits()
        );
    }
}

#[test]
fn f64_is_rounded_once() {
    let tiny_above_tie = (1.0 + f64::EPSILON) / 1024.0;
    assert_eq!(E4M3::from_f64(tiny_above_tie).to_bits(), 0x01);
    assert_eq!(E4M3::from_f32(tiny_above_tie as f32).to_bits(), 0x00, "by way of f32 it would be lost");
    for x in edges().into_iter().map(f64::from).flat_map(|x| [x.next_down(), x, x.next_up()]) {
        let parts = oracle::parts_f64(x.to_bits());
        for_both(|spec, encoding| {
            let got = match encoding {
                Encoding::E4M3 => (E4M3::from_f64(x).to_bits(), E4M3::from_f64_saturating(x).to_bits()),
                Encoding::E5M2 => (E5M2::from_f64(x).to_bits(), E5M2::from_f64_saturating(x).to_bits()),
                Encoding::E2M1 => unreachable!("tests/e2m1.rs has its tests"),
            };
            let want = (oracle::encode(spec, parts, false), oracle::encode(spec, parts, true));
            assert_eq!(got, want, "{} of {x:e} = {:#x}", spec.name, x.to_bits());
        });
    }
}

/// The patterns next to infinity, and infinity itself, by every rounding.
#[test]
fn the_first_nan_is_one_and_infinity_is_none() {
    fn check<T: Fp8>(max: u8, overflow: u8, stochastic: fn(f64, u32) -> T) {
        for nan in
            [0x7FF0_0000_0000_0001, 0xFFF0_0000_0000_0001, 0x7FFF_FFFF_FFFF_FFFF_u64].map(f64::from_bits)
        {
            let codes = [
                T::from_f64(nan),
                T::from_f64_saturating(nan),
                stochastic(nan, 0),
                stochastic(nan, u32::MAX),
            ];
            assert_eq!(codes.map(T::to_bits), [0x7F; 4], "{:#x}", nan.to_bits());
        }
        for nan in [0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF_u32].map(f32::from_bits) {
            let codes = [T::from_f32(nan), T::from_f32_saturating(nan)];
            assert_eq!(codes.map(T::to_bits), [0x7F; 2], "{:#x}", nan.to_bits());
            assert_eq!([0, u32::MAX].map(|r| T::from_f32_stochastic(nan, r).to_bits()), [0x7F; 2]);
        }
        for r in [0, u32::MAX] {
            assert_eq!(stochastic(f64::INFINITY, r).to_bits(), max);
            assert_eq!(T::from_f32_stochastic(f32::NEG_INFINITY, r).to_bits(), max | 0x80);
        }
        assert_eq!(T::from_f64(f64::NEG_INFINITY).to_bits(), overflow | 0x80);
        assert_eq!(T::from_f32_saturating(f32::INFINITY).to_bits(), max);
    }
    check::<E4M3>(0x7E, 0x7F, E4M3::from_f64_stochastic);
    check::<E5M2>(0x7B, 0x7C, E5M2::from_f64_stochastic);
}

#[test]
fn decode_and_round_trip() {
    fn check<T: Fp8>(spec: Spec) {
        for code in 0..=255_u8 {
            let x = T::from_bits(code);
            let want = oracle::decode(spec, code);
            assert_eq!(x.to_bits(), code);
            assert_eq!(x.is_nan(), want.is_nan(), "{code:#x}");
            assert_eq!(x.is_finite(), want.is_finite(), "{code:#x}");
            assert_eq!(T::ENCODING.is_nan(code), want.is_nan());
            assert_eq!(T::ENCODING.is_finite(code), want.is_finite());
            if want.is_nan() {
                assert_eq!(x.to_f32().to_bits(), 0x7FFF_FFFF, "{code:#x}");
                assert_eq!(x.to_f64().to_bits(), 0x7FFF_FFFF_FFFF_FFFF, "{code:#x}");
                assert_eq!((x.to_f16().to_bits(), x.to_bf16().to_bits()), (0x7FFF, 0x7FFF), "{code:#x}");
                assert_eq!(T::from_f32(x.to_f32()).to_bits(), 0x7F);
                continue;
            }
            assert_eq!(x.to_f64().to_bits(), want.to_bits(), "{code:#x}");
            assert_eq!(f64::from(x.to_f32()).to_bits(), want.to_bits(), "{code:#x}");
            assert_eq!(f64::from(x.to_f16()).to_bits(), want.to_bits(), "{code:#x}");
            assert_eq!(f64::from(x.to_bf16()).to_bits(), want.to_bits(), "{code:#x}");
            assert_eq!(T::ENCODING.to_f32(code).to_bits(), x.to_f32().to_bits());
            assert_eq!(T::from_f32(x.to_f32()).to_bits(), code);
            assert_eq!(T::from_f64(x.to_f64()).to_bits(), code);
            assert_eq!(T::from_f16(x.to_f16()).to_bits(), code);
            assert_eq!(T::from_bf16(x.to_bf16()).to_bits(), code);
            if x.is_finite() {
                assert_eq!(T::from_f32_saturating(x.to_f32()).to_bits(), code);
                for r in [0, 0x8000_0000, u32::MAX] {
                    assert_eq!(T::from_f32_stochastic(x.to_f32(), r).to_bits(), code, "a value moved");
                }
            }
        }
    }
    check::<E4M3>(oracle::E4M3);
    check::<E5M2>(oracle::E5M2);
}

#[test]
fn conversions_are_const() {
    const A: E4M3 = E4M3::from_f32_saturating(1e9);
    const B: f32 = E5M2::from_f64(0.3).to_f32();
    const C: u16 = E4M3::MIN_POSITIVE_SUBNORMAL.to_f16().to_bits();
    assert_eq!((A.to_bits(), B, C), (0x7E, 0.3125, 0x1800));
}

/// The mean over all `r` on a grid is the value itself, to the grid's resolution.
#[test]
fn stochastic_rounding_is_unbiased() {
    const BITS: u32 = if cfg!(miri) { 8 } else { 12 };
    const STEPS: u32 = 1 << BITS;
    for x in [3.3_f32, 0.0011, -0.017, 401.0, 5e-4, -1.9e-3] {
        let mean = |round: fn(f32, u32) -> f32| {
            (0..STEPS).map(|i| f64::from(round(x, i << (32 - BITS) | 1 << (31 - BITS)))).sum::<f64>()
                / f64::from(STEPS)
        };
        for (name, mean, ulp) in [
            ("E4M3", mean(|x, r| E4M3::from_f32_stochastic(x, r).to_f32()), 2_f32.powi(-3)),
            ("E5M2", mean(|x, r| E5M2::from_f32_stochastic(x, r).to_f32()), 2_f32.powi(-2)),
        ] {
            let tolerance = f64::from(x.abs().max(0.016) * ulp / STEPS as f32);
            assert!((mean - f64::from(x)).abs() <= tolerance, "{name}: mean of {x} is {mean}");
        }
    }
}

fn any_f32() -> impl Strategy<Value = f32> {
    prop_oneof![any::<u32>().prop_map(f32::from_bits), -500_f32..500.0, -0.02_f32..0.02, -7e4_f32..7e4]
}

fn check_properties<T: Fp8>(x: f32, y: f32, r: u32) -> Result<(), TestCaseError> {
    if x.is_nan() || y.is_nan() {
        return Ok(());
    }
    let (lower, upper) = if x <= y { (x, y) } else { (y, x) };
    prop_assert!(
        T::from_f32_saturating(lower) <= T::from_f32_saturating(upper),
        "order of {lower} and {upper}"
    );
    let code = T::from_f32_saturating(x).to_bits();
    prop_assert_eq!(T::from_f32_saturating(-x).to_bits(), code ^ 0x80);
    prop_assert_eq!(T::from_f32(-x).to_bits(), T::from_f32(x).to_bits() ^ 0x80);

    let down = T::from_f32_stochastic(x, 0);
    let up = T::from_f32_stochastic(x, u32::MAX);
    let any = T::from_f32_stochastic(x, r).to_bits();
    prop_assert!(any == down.to_bits() || any == up.to_bits());
    prop_assert!(up.to_bits() - down.to_bits() <= 1, "the two candidates are neighbours");
    prop_assert!(
        down.to_f32().abs() <= x.abs() && (x.abs() > T::MAX || up.to_f32().abs() >= x.abs() || up == down)
    );
    prop_assert!(up.is_finite());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    #[test]
    fn order_symmetry_and_neighbours(x in any_f32(), y in any_f32(), r: u32) {
        check_properties::<E4M3>(x, y, r)?;
        check_properties::<E5M2>(x, y, r)?;
    }

    #[test]
    fn stochastic_rounding_equals_its_definition(x in any_f32(), r: u32) {
        prop_assert_eq!(E4M3::from_f32_stochastic(x, r).to_bits(), oracle::encode_stochastic(oracle::E4M3, x, r));
        prop_assert_eq!(E5M2::from_f32_stochastic(x, r).to_bits(), oracle::encode_stochastic(oracle::E5M2, x, r));
        prop_assert_eq!(E4M3::from_f64_stochastic(x.into(), r).to_bits(), E4M3::from_f32_stochastic(x, r).to_bits());
        prop_assert_eq!(E5M2::from_f64_stochastic(x.into(), r).to_bits(), E5M2::from_f32_stochastic(x, r).to_bits());
    }

    #[test]
    fn any_f64(bits: u64) {
        let (x, parts) = (f64::from_bits(bits), oracle::parts_f64(bits));
        prop_assert_eq!(E4M3::from_f64(x).to_bits(), oracle::encode(oracle::E4M3, parts, false));
        prop_assert_eq!(E5M2::from_f64_saturating(x).to_bits(), oracle::encode(oracle::E5M2, parts, true));
    }

    #[test]
    fn f64_near_the_range(x in -7e4_f64..7e4, shrink in 0_i32..30) {
        let x = x * 2_f64.powi(-shrink);
        let parts = oracle::parts_f64(x.to_bits());
        prop_assert_eq!(E4M3::from_f64_saturating(x).to_bits(), oracle::encode(oracle::E4M3, parts, true));
        prop_assert_eq!(E5M2::from_f64(x).to_bits(), oracle::encode(oracle::E5M2, parts, false));
        prop_assert_eq!(oracle::encode_by_search(oracle::E4M3, x, true), oracle::encode(oracle::E4M3, parts, true));
    }
}
