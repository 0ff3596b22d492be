//! E8M0 against a search in f64, for every code and for patterns of each wider type.

use fp8_format::{E8M0, Error};
use half::{bf16, f16};

/// Patterns between two that are taken; Miri is slow.
const STRIDE: usize = if cfg!(miri) { 1_048_573 } else { 257 };

/// The value of a code that is a number.
fn value(code: u8) -> f64 {
    2_f64.powi(i32::from(code) - 127)
}

/// The code of the largest value up to `x` and that of the least from `x` on, by search; `None` where there is none.
fn search(x: f64) -> [Option<u8>; 2] {
    let below = (0..=254).rev().find(|code| value(*code) <= x);
    let above = (0..=254).find(|code| value(*code) >= x);
    [below, above]
}

/// Returns the expected codes of `floor`, `ceil` and their saturating forms for a number that is not negative.
fn expected(x: f64) -> [u8; 4] {
    let [below, above] = search(x);
    // Below the range both give the least value. Twice the largest value is out of range for `floor`, too.
    let floor = below.unwrap_or(0);
    let floor_or_nan = if x >= 2.0 * value(254) { 255 } else { floor };
    [floor_or_nan, above.unwrap_or(255), floor, above.unwrap_or(254)]
}

fn of_f32(x: f32) -> [u8; 4] {
    [
        E8M0::from_f32_floor(x),
        E8M0::from_f32_ceil(x),
        E8M0::from_f32_floor_saturating(x),
        E8M0::from_f32_ceil_saturating(x),
    ]
    .map(E8M0::to_bits)
}

fn of_f64(x: f64) -> [u8; 4] {
    [
        E8M0::from_f64_floor(x),
        E8M0::from_f64_ceil(x),
        E8M0::from_f64_floor_saturating(x),
        E8M0::from_f64_ceil_saturating(x),
    ]
    .map(E8M0::to_bits)
}

/// Patterns next to every power of two, and some in between.
fn patterns() -> impl Iterator<Item = u32> {
    let edges = (0..=255_u32).flat_map(|exponent| {
        let bits = exponent << 23;
        [
            bits.wrapping_sub(1) & 0x7FFF_FFFF,
            bits,
            bits | 1,
            bits | 0x40_0000,
            bits | 0x3F_FFFF,
            bits | 0x40_0001,
        ]
    });
    edges.chain((0..=0x7FFF_FFFF).step_by(STRIDE * 64 + 1))
}

#[test]
fn powers_of_two_around_f32() {
    for bits in patterns() {
        let x = f32::from_bits(bits);
        let want = if x.is_nan() { [255; 4] } else { expected(x.into()) };
        assert_eq!(of_f32(x), want, "{x:e} = {bits:#010x}");
        assert_eq!(of_f64(x.into()), want, "{x:e} as f64");
        if x != 0.0 {
            assert_eq!(of_f32(-x), [255; 4], "-{x:e}");
            assert_eq!(of_f64((-x).into()), [255; 4], "-{x:e} as f64");
        }
    }
    assert_eq!((of_f32(-0.0), of_f64(-0.0)), ([0; 4], [0; 4]));
}

#[test]
fn powers_of_two_around_f64() {
    let normal = (-1022..1024).map(|exponent| 2_f64.powi(exponent));
    let edges = (1..52).map(|place| f64::from_bits(1 << place)).chain(normal);
    let some = edges.flat_map(|x| [x.next_down(), x, x.next_up(), 1.5 * x]);
    for x in some.step_by(if cfg!(miri) { 97 } else { 1 }).chain([0.0, 5e-324, f64::MAX, f64::INFINITY]) {
        assert_eq!(of_f64(x), expected(x), "{x:e}");
        assert_eq!(of_f64(-x), if x == 0.0 { [0; 4] } else { [255; 4] }, "-{x:e}");
    }
    assert_eq!(of_f64(f64::NAN), [255; 4]);
    // A double between two f32 is rounded once.
    assert_eq!(E8M0::from_f64_ceil(1.0_f64.next_up()).to_f32(), 2.0);
    assert_eq!(E8M0::from_f32_ceil(1.0_f64.next_up() as f32).to_f32(), 1.0, "by way of f32 it would be lost");
}

#[test]
fn halves_are_rounded_as_their_values() {
    for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 97 } else { 1 }) {
        let (x, y) = (f16::from_bits(bits), bf16::from_bits(bits));
        let got = [
            E8M0::from_f16_floor(x),
            E8M0::from_f16_ceil(x),
            E8M0::from_f16_floor_saturating(x),
            E8M0::from_f16_ceil_saturating(x),
        ];
        assert_eq!(got.map(E8M0::to_bits), of_f64(x.to_f64()), "f16 {bits:#06x}");
        let got = [
            E8M0::from_bf16_floor(y),
            E8M0::from_bf16_ceil(y),
            E8M0::from_bf16_floor_saturating(y),
            E8M0::from_bf16_ceil_saturating(y),
        ];
        assert_eq!(got.map(E8M0::to_bits), of_f64(y.to_f64()), "bf16 {bits:#06x}");
    }
}

#[test]
fn every_code() {
    for code in 0..=254_u8 {
        let (x, v) = (E8M0::from_bits(code), value(code));
        assert_eq!((x.to_bits(), x.is_nan()), (code, false));
        assert_eq!(x.to_f64(), v);
        assert_eq!((f64::from(x.to_f32()), f64::from(x.scale_inv()), f64::from(x.to_bf16())), (v, v, v));
        assert_eq!((f64::from(x), f64::from(f32::from(x)), f64::from(bf16::from(x))), (v, v, v));
        assert_eq!(f64::from(x.scale()), 1.0 / v);
        assert_eq!(x.to_f16().to_bits(), f16::from_f64(v).to_bits(), "{code}: to nearest, as half does it");
        assert_eq!(x.exponent(), Some(i32::from(code) - 127));
        assert_eq!(of_f32(x.to_f32()), [code; 4]);
        assert_eq!(x.to_string().parse::<E8M0>().unwrap(), x, "{x}");
        assert_eq!(format!("{x:?} {x:x} {x:e}"), format!("{:?} {code:x} {:e}", x.to_f32(), x.to_f32()));
    }
    let nan = E8M0::from_bits(255);
    assert!(nan.is_nan() && nan.to_f64().is_nan() && nan.exponent().is_none());
    assert_eq!((nan.to_f32().to_bits(), nan.scale().to_bits()), (0x7FFF_FFFF, 0x7FFF_FFFF));
    assert_eq!((nan.to_f16().to_bits(), nan.to_bf16().to_bits()), (0x7FFF, 0x7FFF));
    assert!("NaN".parse::<E8M0>().unwrap().is_nan());
}

#[test]
fn constants_and_order() {
    assert_eq!((E8M0::MIN.to_f64(), E8M0::MAX.to_f64()), (2_f64.powi(-127), 2_f64.powi(127)));
    assert_eq!((E8M0::ONE.to_f32(), E8M0::default().to_f32()), (1.0, 1.0));
    assert_eq!((E8M0::BIAS, E8M0::RADIX, E8M0::MIN.to_bits()), (127, 2, 0));
    assert!(E8M0::NAN.is_nan() && E8M0::NAN != E8M0::NAN);
    for a in 0..=255_u8 {
        for b in 0..=255_u8 {
            let (x, y) = (E8M0::from_bits(a), E8M0::from_bits(b));
            assert_eq!(x.partial_cmp(&y), x.to_f64().partial_cmp(&y.to_f64()), "{a} {b}");
            assert_eq!(x == y, x.to_f64() == y.to_f64(), "{a} {b}");
            assert_eq!(x.total_cmp(&y), a.cmp(&b));
        }
    }
}

#[test]
fn conversions_are_const() {
    const UP: E8M0 = E8M0::from_f32_ceil(0.3);
    const SCALE: f32 = E8M0::from_f64_floor_saturating(1e300).scale();
    assert_eq!((UP.to_bits(), SCALE.to_bits()), (126, 0x0040_0000));
}

#[test]
fn text_that_is_no_power_of_two() {
    for text in ["3", "0", "-1", "inf", "1e-40", "", "two"] {
        let error = text.parse::<E8M0>().unwrap_err();
        assert_eq!(error, Error::ParseE8M0 { len: text.len() });
        assert_eq!(
            error.to_string(),
            format!(
                "parse E8M0: text of {} bytes: expected a power of two from 5.877472e-39 (2^-127) to 1.7014118e38 \
                 (2^127), such as 0.25, or NaN",
                text.len()
            )
        );
    }
    assert_eq!("0.125".parse::<E8M0>().unwrap().to_bits(), 124);
}

#[cfg(feature = "bytemuck")]
#[test]
fn slices_are_bytes() {
    let codes: &[E8M0] = bytemuck::cast_slice(&[127_u8, 0]);
    assert_eq!(codes, [E8M0::ONE, E8M0::MIN]);
}

#[cfg(feature = "serde")]
#[test]
fn codes_are_stored_as_their_bits() {
    assert_eq!(serde_json::to_string(&E8M0::MAX).unwrap(), "254");
    assert!(serde_json::from_str::<E8M0>("255").unwrap().is_nan());
}

#[cfg(feature = "zerocopy")]
#[test]
fn bytes_are_codes() {
    use zerocopy::{FromBytes, IntoBytes};
    assert_eq!(E8M0::read_from_bytes(&[130]).unwrap().to_f32(), 8.0);
    assert_eq!(E8M0::ONE.as_bytes(), [127]);
}
