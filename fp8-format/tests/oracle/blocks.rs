//! Quantization by blocks, as plainly as possible: each block is a `Vec` of its values, and all arithmetic is in f64.
//!
//! f64 holds the product of two f32, and a quotient of two f32 that is rounded to f64 and then to f32 is rounded correctly.

use super::{Spec, decode, encode, parts_f32};
use fp8_format::Blocks;

/// The rule of the scales.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    F32 { power_2_scales: bool, epsilon: f32, scale_max: f32 },
    Mx { is_ceil: bool },
}

/// All results, floats as their bits.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Results {
    pub(crate) codes: Vec<u8>,
    pub(crate) scale: Vec<u32>,
    pub(crate) scale_inv: Vec<u32>,
    pub(crate) e8m0: Vec<u8>,
    pub(crate) amax: Vec<u32>,
    /// The dequantized codes, with NaN canonical.
    pub(crate) values: Vec<u32>,
}

/// The factors of a block: before the cast, after it, and the byte if there is one.
fn factors(spec: Spec, rule: Rule, amax: f32) -> (f32, f32, u8) {
    let most = decode(spec, spec.max as u8);
    match rule {
        Rule::F32 { power_2_scales, epsilon, scale_max } => {
            let amax = f64::from(amax.max(epsilon));
            let mut scale = if amax == 0.0 || amax.is_infinite() { 1.0 } else { (most / amax) as f32 };
            if scale.is_infinite() {
                scale = scale_max;
            }
            if power_2_scales {
                let below = (-126..128).rev().map(|e| 2_f64.powi(e)).find(|power| *power <= scale.into());
                scale = below.map_or(0.0, |power| power as f32);
            }
            (scale, (1.0 / f64::from(scale)) as f32, 0)
        }
        Rule::Mx { is_ceil } => {
            let byte = if amax.is_infinite() {
                254
            } else if is_ceil {
                let inverse = (1.0 / most) as f32;
                let product = f64::from((f64::from(amax) * f64::from(inverse)) as f32);
                (0..254).find(|e| 2_f64.powi(e - 127) >= product).unwrap_or(254)
            } else {
                let emax = if spec.mantissa == 3 { 8 } else { 15 };
                let below = (-149..128).rev().find(|e| 2_f64.powi(*e) <= amax.into());
                below.map_or(0, |e| (e - emax + 127).clamp(0, 254))
            };
            (2_f64.powi(127 - byte) as f32, 2_f64.powi(byte - 127) as f32, byte as u8)
        }
    }
}

/// Codes, scales and values of a row-major matrix.
pub(crate) fn quantize(
    spec: Spec,
    rule: Rule,
    blocks: Blocks,
    x: &[f32],
    rows: usize,
    cols: usize,
) -> Results {
    let [height, width] = match blocks {
        Blocks::Row => [1, cols.max(1)],
        Blocks::B1x128 => [1, 128],
        Blocks::B128x128 => [128, 128],
        Blocks::Mx32 => [1, 32],
        Blocks::B1x16 | Blocks::B16x16 => blocks.size(cols),
    };
    let mut results = Results { codes: vec![0; x.len()], values: vec![0; x.len()], ..Results::default() };
    let lefts = if blocks == Blocks::Row { vec![0] } else { (0..cols).step_by(width).collect() };
    for top in (0..rows).step_by(height) {
        for left in &lefts {
            let places: Vec<usize> = (top..rows.min(top + height))
                .flat_map(|r| (*left..cols.min(left + width)).map(move |c| r * cols + c))
                .collect();
            let block: Vec<f32> = places.iter().map(|i| x[*i]).collect();
            let amax = block.iter().filter(|v| !v.is_nan()).fold(0.0, |amax: f32, v| amax.max(v.abs()));
            let (scale, scale_inv, byte) = factors(spec, rule, amax);
            for (i, v) in places.into_iter().zip(block) {
                let product = (f64::from(v) * f64::from(scale)) as f32;
                let code = encode(spec, parts_f32(product.to_bits()), true);
                let value = (decode(spec, code) * f64::from(scale_inv)) as f32;
                results.codes[i] = code;
                results.values[i] = if value.is_nan() { 0x7FFF_FFFF } else { value.to_bits() };
            }
            results.amax.push(amax.to_bits());
            match rule {
                Rule::F32 { .. } => {
                    results.scale.push(scale.to_bits());
                    results.scale_inv.push(scale_inv.to_bits());
                }
                Rule::Mx { .. } => results.e8m0.push(byte),
            }
        }
    }
    results
}

/// The transpose of a row-major matrix.
pub(crate) fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}
