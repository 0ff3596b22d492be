//! Storing moments in bf16 and FP8, in f64: neighbours are searched in a list of all values.

use super::philox::philox_128;

/// The values of E4M3 from 0 to 448, in order; the place of each is its code.
fn e4m3() -> Vec<f64> {
    let value = |code: i32| match (code / 8, f64::from(code % 8)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    (0..127).map(value).collect()
}

/// The value of a code.
pub(crate) fn decoded(code: u8) -> f64 {
    let value = e4m3()[usize::from(code & 0x7F)];
    if code < 0x80 { value } else { -value }
}

/// The smallest power of two, from 2⁻¹²⁶ on, of which 448 are at least `amax`.
fn scale_inv(amax: f64) -> f64 {
    (-126..120).map(|e| 2f64.powi(e)).find(|scale| amax <= 448.0 * scale).unwrap_or(2f64.powi(119))
}

/// The place below `x`, which is not negative, and how far above it x is on the way to the next, by `measure`.
fn place(x: f64, measure: impl Fn(f64) -> f64) -> (usize, f64) {
    let values = e4m3();
    let below = values.iter().rposition(|&value| measure(value) <= x).unwrap_or(0);
    let Some(&above) = values.get(below + 1) else { return (below, 0.0) };
    let [a, b] = [values[below], above].map(measure);
    (below, (x - a) / (b - a))
}

/// The random number of an element of a block, for m (0), v (1) or the parameter (2).
pub(crate) fn random(seed: u64, step: u64, block: u64, element: u64, stream: u64) -> u32 {
    let low = block * 32 + element / 4 + (stream << 62);
    philox_128(u128::from(low) + (u128::from(step) << 64), seed)[(element % 4) as usize]
}

/// The scale and the codes of a block of the first moment.
pub(crate) fn first(block: &[f64], random: impl Fn(u64) -> u32) -> (f64, Vec<u8>) {
    let scale = scale_inv(block.iter().fold(0.0, |amax, m| m.abs().max(amax)));
    let code = |(i, m): (u64, &f64)| {
        let (place, part) = place(m.abs() / scale, |value| value);
        let up = part + f64::from(random(i)) / 2f64.powi(32) >= 1.0;
        (place + usize::from(up)) as u8 | if m.is_sign_negative() { 0x80 } else { 0 }
    };
    (scale, (0..).zip(block).map(code).collect())
}

/// The scale and the codes of a block of the second moment.
pub(crate) fn second(block: &[f64], random: impl Fn(u64) -> u32) -> (f64, Vec<u8>) {
    let scale = scale_inv(block.iter().fold(0.0, |amax, v| v.sqrt().max(amax)));
    let code = |(i, &v): (u64, &f64)| {
        let (place, part) = place(v / scale / scale, |value| value * value);
        let up = f64::from(random(i) >> 8) / 2f64.powi(24) < part;
        let code = (place + usize::from(up)) as u8;
        if v > 0.0 { code.max(1) } else { code }
    };
    (scale, (0..).zip(block).map(code).collect())
}

/// A value in bf16, rounded stochastically: of the numbers with 8 significant bits.
pub(crate) fn bf16(value: f64, random: u32) -> f64 {
    if value == 0.0 {
        return value;
    }
    let ulp = 2f64.powf((value.abs().log2().floor()).max(-126.0) - 7.0);
    let (below, part) = ((value.abs() / ulp).floor(), (value.abs() / ulp).fract());
    let up = part + f64::from(random >> 16) / 2f64.powi(16) >= 1.0;
    ((below + f64::from(u8::from(up))) * ulp).copysign(value)
}
