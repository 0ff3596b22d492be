//! The figures of Transformer Engine's pages "Introduction" and "FP8 Current Scaling": the bits of 0.3952 in each format.

use fp8_format::{E4M3, E5M2, Fp8};
use half::{bf16, f16};

/// Bits as the figures print them: sign, exponent and mantissa in one row.
fn bits(row: &str) -> u32 {
    row.split(' ').fold(0, |bits, digit| 2 * bits + u32::from(digit == "1"))
}

/// The value of `bits` from its fields: `(−1)^sign · 1.mantissa · 2^(exponent − bias)`, of a normal number.
fn value(bits: u32, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let sign = if bits >> (exponent_bits + mantissa_bits) == 0 { 1.0 } else { -1.0 };
    let exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let bias = (1 << (exponent_bits - 1)) - 1;
    sign * (1.0 + mantissa) * 2_f64.powi(exponent as i32 - bias)
}

/// Whether no neighbour of `bits` is nearer to 0.3952.
fn is_closest(bits: u32, exponent_bits: u32, mantissa_bits: u32) -> bool {
    let distance = |bits| (value(bits, exponent_bits, mantissa_bits) - 0.3952).abs();
    distance(bits) < distance(bits - 1) && distance(bits) < distance(bits + 1)
}

const F32: &str = "0 0 1 1 1 1 1 0 1 1 0 0 1 0 1 0 0 1 0 1 0 1 1 1 1 0 1 0 1 0 0 0";
const BF16: &str = "0 0 1 1 1 1 1 0 1 1 0 0 1 0 1 0";
const F16: &str = "0 0 1 1 0 1 1 0 0 1 0 1 0 0 1 1";
const E4M3_BITS: &str = "0 0 1 0 1 1 0 1";
const E5M2_BITS: &str = "0 0 1 1 0 1 1 0";

#[test]
fn the_closest_representations_of_0_3952() {
    assert_eq!(0.3952_f32.to_bits(), bits(F32));
    assert_eq!(u32::from(bf16::from_f32(0.3952).to_bits()), bits(BF16));
    assert_eq!(u32::from(f16::from_f32(0.3952).to_bits()), bits(F16));
    assert_eq!(bf16::from_f32(0.3952).to_f32(), 0.394_531_25);
    assert_eq!(f16::from_f32(0.3952).to_f32(), 0.395_263_67);

    assert_eq!(u32::from(E4M3::from_f32(0.3952).to_bits()), bits(E4M3_BITS));
    assert_eq!(u32::from(E5M2::from_f32(0.3952).to_bits()), bits(E5M2_BITS));
    assert_eq!(E4M3::from_f32(0.3952).to_f32(), 0.40625);
    assert_eq!(E5M2::from_f32(0.3952).to_f32(), 0.375);

    // The fields' widths: sign, exponent, mantissa.
    for (row, exponent_bits, mantissa_bits) in
        [(F32, 8, 23), (BF16, 8, 7), (F16, 5, 10), (E4M3_BITS, 4, 3), (E5M2_BITS, 5, 2)]
    {
        assert_eq!(row.split(' ').count() as u32, 1 + exponent_bits + mantissa_bits);
        assert!(is_closest(bits(row), exponent_bits, mantissa_bits), "{row}");
    }
}

#[test]
fn each_source_type_rounds_0_3952_to_the_same_codes() {
    fn check<T: Fp8>(expected: &str) {
        let expected = bits(expected);
        let codes = [
            T::from_f64(0.3952),
            T::from_f32(0.3952),
            T::from_f32_saturating(0.3952),
            T::from_f16(f16::from_f32(0.3952)),
            T::from_bf16(bf16::from_f32(0.3952)),
        ];
        for code in codes {
            assert_eq!(u32::from(code.to_bits()), expected);
        }
    }
    check::<E4M3>(E4M3_BITS);
    check::<E5M2>(E5M2_BITS);
}

/// The introduction cuts the mantissa off: its FP16 is the pattern below the closest one.
#[test]
fn the_introductions_f16_is_the_pattern_below_the_closest() {
    let introduction = bits("0 0 1 1 0 1 1 0 0 1 0 1 0 0 1 0");
    assert_eq!(introduction, bits(F16) - 1);
    assert_eq!(f16::from_bits(introduction as u16).to_f32(), 0.395_019_53); // "≈ 0.3950"
    assert!(!is_closest(introduction, 5, 10));
}
