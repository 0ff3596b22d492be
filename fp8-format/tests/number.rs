//! The types as numbers: constants, classification, order, arithmetic, text.

use core::cmp::Ordering;
use core::num::FpCategory;
use fp8_format::{E4M3, E5M2, Encoding, Error};

/// Second operands between two that are tried; Miri is slow.
const STRIDE: usize = if cfg!(miri) { 51 } else { 1 };

macro_rules! for_each {
    ($fp8:ident in E4M3, E5M2 $body:block) => {{
        use fp8_format::E4M3 as $fp8;
        $body
    }
    {
        use fp8_format::E5M2 as $fp8;
        $body
    }};
}

#[test]
fn constants() {
    assert_eq!(E4M3::MAX.to_f32(), 448.0);
    assert_eq!(E4M3::MIN.to_f32(), -448.0);
    assert_eq!(E4M3::MIN_POSITIVE.to_f32(), 1.0 / 64.0);
    assert_eq!(E4M3::MIN_POSITIVE_SUBNORMAL.to_f32(), 1.0 / 512.0);
    assert_eq!(E4M3::MAX_SUBNORMAL.to_f32(), 7.0 / 512.0);
    assert_eq!(E4M3::EPSILON.to_f32(), 0.125);
    assert_eq!(E5M2::MAX.to_f32(), 57344.0);
    assert_eq!(E5M2::MIN.to_f32(), -57344.0);
    assert_eq!(E5M2::MIN_POSITIVE.to_f32(), 2_f32.powi(-14));
    assert_eq!(E5M2::MIN_POSITIVE_SUBNORMAL.to_f32(), 2_f32.powi(-16));
    assert_eq!(E5M2::MAX_SUBNORMAL.to_f32(), 3.0 * 2_f32.powi(-16));
    assert_eq!(E5M2::EPSILON.to_f32(), 0.25);
    assert_eq!(E5M2::INFINITY.to_f32(), f32::INFINITY);
    assert_eq!(E5M2::NEG_INFINITY.to_f32(), f32::NEG_INFINITY);
    for_each!(T in E4M3, E5M2 {
        assert_eq!((T::ONE.to_f32(), T::NEG_ONE.to_f32()), (1.0, -1.0));
        assert_eq!(T::from_bits(T::ONE.to_bits() + 1) - T::ONE, T::EPSILON);
        assert!(T::NAN.is_nan() && T::NAN.to_bits() == 0x7F);
        assert!(T::ZERO.is_zero() && T::NEG_ZERO.is_zero() && T::NEG_ZERO.is_sign_negative());
        assert_eq!(T::default().to_bits(), 0);
        assert_eq!(T::EPSILON.to_f32(), 2_f32.powi(1 - T::MANTISSA_DIGITS as i32));
        assert_eq!(T::MIN_POSITIVE.to_f32(), 2_f32.powi(T::MIN_EXP - 1));
        assert!(T::MAX.to_f32() < 2_f32.powi(T::MAX_EXP) && T::MAX.to_f32() >= 2_f32.powi(T::MAX_EXP - 1));
        assert!(10_f32.powi(T::MAX_10_EXP) <= T::MAX.to_f32() && 10_f32.powi(T::MAX_10_EXP + 1) > T::MAX.to_f32());
        assert!(10_f32.powi(T::MIN_10_EXP) >= T::MIN_POSITIVE.to_f32());
        assert!(10_f32.powi(T::MIN_10_EXP - 1) < T::MIN_POSITIVE.to_f32());
        assert_eq!((T::RADIX, T::DIGITS), (2, 0));
    });
    assert_eq!(E4M3::PI.to_f32(), 3.25);
    assert_eq!(E5M2::LN_10.to_f32(), 2.5);
}

#[test]
fn classification_equals_that_of_the_value() {
    for_each!(T in E4M3, E5M2 {
        for code in 0..=255_u8 {
            let (x, v) = (T::from_bits(code), T::from_bits(code).to_f32());
            let tiny = v != 0.0 && v.abs() < T::MIN_POSITIVE.to_f32();
            let want = if tiny { FpCategory::Subnormal } else { v.classify() };
            assert_eq!(x.classify(), want, "{code:#x}");
            assert_eq!(x.is_nan(), want == FpCategory::Nan);
            assert_eq!(x.is_infinite(), want == FpCategory::Infinite);
            assert_eq!(x.is_finite(), v.is_finite());
            assert_eq!(x.is_normal(), want == FpCategory::Normal);
            assert_eq!(x.is_subnormal(), want == FpCategory::Subnormal);
            assert_eq!(x.is_zero(), want == FpCategory::Zero);
            assert_eq!(x.is_sign_negative(), code >= 0x80);
            assert_eq!(x.is_sign_positive(), code < 0x80);
            assert_eq!(x.abs().to_bits(), code & 0x7F);
            assert_eq!((-x).to_bits(), code ^ 0x80);
            assert_eq!((-&x).to_bits(), code ^ 0x80);
            if x.is_nan() {
                assert_eq!(x.signum().to_bits(), code);
            } else {
                assert_eq!(x.signum().to_f32(), v.signum());
            }
            assert_eq!(x.copysign(T::NEG_ONE).to_bits(), code | 0x80);
        }
    });
    assert_eq!((0..=255).filter(|c| E4M3::from_bits(*c).is_nan()).collect::<Vec<_>>(), [0x7F, 0xFF]);
    let nans: Vec<u8> = (0..=255).filter(|c| E5M2::from_bits(*c).is_nan()).collect();
    assert_eq!(nans, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]);
}

#[test]
fn order_and_arithmetic_of_all_pairs() {
    for_each!(T in E4M3, E5M2 {
        for a in (0..=255).map(T::from_bits) {
            for b in (0..=255).step_by(STRIDE).map(T::from_bits) {
                let (x, y) = (a.to_f32(), b.to_f32());
                assert_eq!(a.partial_cmp(&b), x.partial_cmp(&y));
                assert_eq!(a == b, x == y);
                let (max, min) = (a.max(b).to_f32(), a.min(b).to_f32());
                if !x.is_nan() || !y.is_nan() {
                    assert_eq!((max, min), (x.max(y), x.min(y)), "{a:?} {b:?}");
                }
                if !a.is_nan() && !b.is_nan() {
                    assert_eq!(a.total_cmp(&b), x.total_cmp(&y));
                } else if a.is_nan() && !b.is_nan() {
                    let above = a.is_sign_positive();
                    assert_eq!(a.total_cmp(&b), if above { Ordering::Greater } else { Ordering::Less });
                } else {
                    assert_eq!(a.total_cmp(&b), b.total_cmp(&a).reverse());
                }
                // Correctly rounded: f64 holds every sum and product exactly, quotients closely enough.
                let wide = (f64::from(x), f64::from(y));
                let same = |got: T, want: f64| {
                    let want = T::from_f64(want);
                    assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{a:?} {b:?}");
                };
                same(a + b, wide.0 + wide.1);
                same(a - b, wide.0 - wide.1);
                same(a * b, wide.0 * wide.1);
                same(a / b, wide.0 / wide.1);
                same(a % b, wide.0 % wide.1);
                same(core::ops::Add::add(&a, b), wide.0 + wide.1);
                same(core::ops::Sub::sub(a, &b), wide.0 - wide.1);
                same(core::ops::Mul::mul(&a, &b), wide.0 * wide.1);
                let (mut c, mut d) = (a, a);
                c += b;
                d /= &b;
                same(c, wide.0 + wide.1);
                same(d, wide.0 / wide.1);
            }
        }
    });
}

#[test]
fn clamp_never_panics() {
    let [low, high] = [E4M3::NEG_ONE, E4M3::ONE];
    assert_eq!(E4M3::MAX.clamp(low, high), high);
    assert_eq!(E4M3::MIN.clamp(low, high), low);
    assert_eq!(E4M3::EPSILON.clamp(low, high), E4M3::EPSILON);
    assert!(E4M3::NAN.clamp(low, high).is_nan());
    assert_eq!(E4M3::EPSILON.clamp(high, low), low);
    assert_eq!(E4M3::EPSILON.clamp(E4M3::NAN, E4M3::NAN), E4M3::EPSILON);
}

#[test]
fn sums_and_products_round_once() {
    let odd = [E4M3::from_f32(17.0); 4]; // 17 is stored as 16, the even neighbour
    assert_eq!(odd.iter().sum::<E4M3>().to_f32(), 64.0);
    assert!([E4M3::MAX; 2].iter().sum::<E4M3>().is_nan());
    let twos = [E5M2::from_f32(1.25); 3];
    assert_eq!(twos.iter().product::<E5M2>().to_f32(), 2.0); // 1.953125
    assert_eq!(twos.into_iter().product::<E5M2>(), E5M2::from_f32(1.953_125));
    let ones = [E4M3::ONE; 17];
    assert_eq!(ones.into_iter().sum::<E4M3>().to_f32(), 16.0); // 17 is a tie: to even
}

#[test]
fn text_round_trips() {
    for_each!(T in E4M3, E5M2 {
        for x in (0..=255).map(T::from_bits) {
            for text in [format!("{x}"), format!("{x:?}"), format!("{x:e}"), format!("{x:E}")] {
                let back: T = text.parse().unwrap();
                assert!(back.to_bits() == x.to_bits() || x.is_nan() && back.to_bits() == 0x7F, "{text}");
            }
            assert_eq!(u8::from_str_radix(&format!("{x:x}"), 16).unwrap(), x.to_bits());
            assert_eq!(u8::from_str_radix(&format!("{x:o}"), 8).unwrap(), x.to_bits());
            assert_eq!(format!("{x:#010b} {x:02X}"), format!("{:#010b} {:02X}", x.to_bits(), x.to_bits()));
        }
    });
    assert_eq!(
        format!("{} {:?} {:>7.2}|", E4M3::from_f32(0.3), E4M3::MAX, E5M2::from_f32(1.1)),
        "0.3125 448.0    1.00|"
    );
}

#[test]
fn parsing_rounds_once_and_explains_errors() {
    assert_eq!("0.0009765625000000001".parse::<E4M3>().unwrap().to_bits(), 0x00); // nearest f64 is the tie
    assert_eq!("0.0009765625000000004".parse::<E4M3>().unwrap().to_bits(), 0x01); // f32 would lose this
    assert!("1e9".parse::<E4M3>().unwrap().is_nan());
    assert_eq!("1e9".parse::<E5M2>().unwrap(), E5M2::INFINITY);
    let e = "1,5".parse::<E4M3>().unwrap_err();
    assert_eq!(
        e.to_string(),
        "parse E4M3: invalid float literal: expected a decimal number such as -1.75 or 3e-2, inf or NaN"
    );
    assert!(std::error::Error::source(&e).is_some());
    assert_eq!(format!("{e:?}"), e.to_string()); // what `fn main() -> Result<()>` prints
    assert!(matches!("".parse::<E5M2>(), Err(Error::Parse { encoding: Encoding::E5M2, .. })));
}

#[test]
fn encoding_names() {
    let all = [Encoding::E4M3, Encoding::E5M2, Encoding::E2M1];
    assert_eq!(all.map(Encoding::max), [448.0, 57344.0, 6.0]);
    for encoding in all {
        assert_eq!(encoding.to_string().parse(), Ok(encoding));
        assert_eq!(encoding.name().to_lowercase().parse(), Ok(encoding));
        assert_eq!(encoding.to_f32(encoding.max_bits()), encoding.max());
    }
    assert_eq!(format!("{:>6}", Encoding::E4M3), "  E4M3");
    assert_eq!(
        "e4m3fn".parse::<Encoding>().unwrap_err().to_string(),
        "parse Encoding: unknown name (6 bytes): expected E4M3, E5M2 or E2M1, in either case"
    );
}

#[test]
fn lossless_conversions() {
    assert_eq!(f32::from(E4M3::MIN_POSITIVE_SUBNORMAL), 1.0 / 512.0);
    assert_eq!(f64::from(E5M2::MAX), 57344.0);
    assert_eq!(half::f16::from(E4M3::ONE), half::f16::ONE);
    assert_eq!(half::bf16::from(E5M2::NEG_ONE), half::bf16::NEG_ONE);
}

/// `From` where no value is lost, and nowhere else: a type with the forbidden one has two `some`, and this does not compile.
macro_rules! lossless {
    ($($fp8:ident: to $($wide:ty)*, not from $($source:ty)*;)*) => {$(
        $(const _: fn($fp8) -> $wide = <$wide as From<$fp8>>::from;)*
        $(const _: () = {
            trait Ambiguous<A> {
                fn some() {}
            }
            impl<T> Ambiguous<()> for T {}
            impl<T: From<$source>> Ambiguous<u8> for T {}
            let _: fn() = <$fp8 as Ambiguous<_>>::some;
        };)*
    )*};
}

lossless! {
    E4M3: to f32 f64 half::f16 half::bf16, not from f32 f64 half::f16 half::bf16 u8 i8 bool E5M2;
    E5M2: to f32 f64 half::f16 half::bf16, not from f32 f64 half::f16 half::bf16 u8 i8 bool E4M3;
}

#[test]
fn from_gives_the_exact_value_of_every_code() {
    for_each!(T in E4M3, E5M2 {
        for code in 0..=255_u8 {
            let x = T::from_bits(code);
            let wide = [f64::from(x), f32::from(x).into(), half::f16::from(x).into(), half::bf16::from(x).into()];
            assert!(wide.iter().all(|v| *v == x.to_f64() || v.is_nan() && x.is_nan()), "{code:#x}: {wide:?}");
        }
    });
}
