//! Floats of 16 bits as f32 and back.

pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (bits >> 15, bits >> 10 & 0x1f, u32::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction as f32 * 2.0_f32.powi(-24),
        31 => f32::from_bits(0x7f80_0000 | fraction << 13),
        _ => f32::from_bits((u32::from(exponent) + 112) << 23 | fraction << 13),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// Rounds to nearest, ties away from zero: the values decide no branch here.
pub(super) fn f32_to_f16(value: f32) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    let bits = if magnitude.is_nan() {
        0x7fff
    } else if magnitude >= 65520.0 {
        0x7c00
    } else if magnitude < 2.0_f32.powi(-14) {
        (magnitude * 2.0_f32.powi(24)).round() as u16
    } else {
        ((magnitude.to_bits() + 0x1000) >> 13).wrapping_sub(112 << 10) as u16
    };
    sign | bits
}

pub(super) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

pub(super) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() { 0x7fff } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_floats_convert_both_ways() {
        for (bits, value) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 5.960_464_5e-8),
            (0x7c00, f32::INFINITY),
        ] {
            assert_eq!((f16_to_f32(bits), f32_to_f16(value)), (value, bits));
        }
        assert!(f16_to_f32(0x7e00).is_nan() && f16_to_f32(f32_to_f16(f32::NAN)).is_nan());
        for (bits, value) in [(0x3f80, 1.0), (0xc000, -2.0), (0x3fc0, 1.5), (0x7f80, f32::INFINITY)] {
            assert_eq!((bf16_to_f32(bits), f32_to_bf16(value)), (value, bits));
        }
        assert_eq!(f32_to_bf16(f32::NAN), 0x7fff);
    }
}
