//! Rounding of probabilities, and of the scores' gradients, to what FP8 codes hold.

use super::super::codec;
use super::heads::{Block, KEYS, QUERIES};
use crate::{Encoding, Result};

/// The scale of probabilities relative to a row's largest score, which are at most 1.
const SCALE: f32 = 256.0;

/// Rounds `rows` rows of probabilities, at most 1, to E4M3 with the scale [`SCALE`].
pub(super) fn round_probabilities(block: &mut Block, rows: usize) -> Result<()> {
    let values = &mut block[..rows * KEYS];
    round(values, SCALE, Encoding::E4M3)?;
    values.iter_mut().for_each(|v| *v *= 1.0 / SCALE);
    Ok(())
}

/// Rounds each row of a block with a power of two of its own, then multiplies all by `factor`.
pub(super) fn round_rows(
    block: &mut Block,
    [rows, cols]: [usize; 2],
    encoding: Encoding,
    factor: f32,
) -> Result<()> {
    let mut inverses = [0.0; QUERIES];
    for (row, inverse) in block.chunks_exact_mut(KEYS).take(rows).zip(&mut inverses) {
        let amax = row[..cols].iter().fold(0.0f32, |amax, v| amax.max(v.abs()));
        let scale = power_of_two(amax, encoding);
        row[..cols].iter_mut().for_each(|v| *v *= scale);
        *inverse = factor / scale;
    }
    round(&mut block[..rows * KEYS], 1.0, encoding)?;
    for (row, inverse) in block.chunks_exact_mut(KEYS).take(rows).zip(&inverses) {
        row[..cols].iter_mut().for_each(|v| *v *= inverse);
    }
    Ok(())
}

/// Rounds each column of a block with a power of two of its own, the rows of the transpose, then multiplies all by `factor`.
pub(super) fn round_columns(
    block: &mut Block,
    [rows, cols]: [usize; 2],
    encoding: Encoding,
    factor: f32,
) -> Result<()> {
    let mut scales = [0.0f32; KEYS];
    for row in block.chunks_exact(KEYS).take(rows) {
        scales.iter_mut().zip(&row[..cols]).for_each(|(amax, v)| *amax = amax.max(v.abs()));
    }
    scales.iter_mut().for_each(|scale| *scale = power_of_two(*scale, encoding));
    let inverses = scales.map(|scale| factor / scale);
    let multiply = |block: &mut Block, factors: &[f32; KEYS]| {
        for row in block.chunks_exact_mut(KEYS).take(rows) {
            row[..cols].iter_mut().zip(factors).for_each(|(v, factor)| *v *= factor);
        }
    };
    multiply(block, &scales);
    round(&mut block[..rows * KEYS], 1.0, encoding)?;
    multiply(block, &inverses);
    Ok(())
}

/// The values of the codes of `values · scale`, without the factor `1 / scale`.
fn round(values: &mut [f32], scale: f32, encoding: Encoding) -> Result<()> {
    let mut codes = [0; QUERIES * KEYS];
    let codes = &mut codes[..values.len()];
    codec::encode(values, scale, encoding, codes)?;
    codec::decode(codes, encoding, values)
}

/// The power of two that brings `amax` below the largest code, into the last binade that is whole: [128, 256) in E4M3,
/// [2¹⁴, 2¹⁵) in E5M2. It and its inverse are normal numbers.
fn power_of_two(amax: f32, encoding: Encoding) -> f32 {
    let top = match encoding {
        Encoding::E4M3 => 7,
        Encoding::E5M2 => 14,
        // Scores are never in it: the slots are refused.
        Encoding::E2M1 => 0,
    };
    let exponent = (amax.to_bits() >> 23).max(top + 1);
    f32::from_bits((254 + top - exponent) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_bring_the_largest_value_near_the_top() {
        for (encoding, top) in [(Encoding::E4M3, 128.0), (Encoding::E5M2, 16384.0)] {
            for amax in [1e-30f32, 3e-5, 0.999, 1.0, 1.001, 7.0, 3e30, f32::MAX] {
                let scaled = amax * power_of_two(amax, encoding);
                assert!((top..2.0 * top).contains(&scaled), "{encoding} {amax}: {scaled}");
            }
            for amax in [0.0, 1e-45, f32::INFINITY, f32::NAN] {
                let scale = power_of_two(amax, encoding);
                assert!(scale.is_normal() && (1.0 / scale).is_normal(), "{encoding} {amax}: {scale}");
            }
        }
    }

    #[test]
    fn rows_and_columns_have_scales_of_their_own() {
        // Columns that differ by 2^40: one scale for all would lose the small ones.
        let size = |column: usize| 2f32.powi(-(column as i32 * 40));
        let values = [1.0f32, 1.06, -0.47];
        let mut block: Block = [0.0; QUERIES * KEYS];
        for (row, value) in values.iter().enumerate() {
            (0..2).for_each(|column| block[row * KEYS + column] = value * size(column));
        }
        let mut by_rows = block;
        round_columns(&mut block, [3, 2], Encoding::E4M3, 1.0).unwrap();
        for (row, rounded) in [1.0, 1.0, -0.46875].iter().enumerate() {
            assert_eq!(
                [0, 1].map(|column| block[row * KEYS + column]),
                [0, 1].map(|column| rounded * size(column))
            );
        }
        round_rows(&mut by_rows, [3, 2], Encoding::E4M3, 1.0).unwrap();
        assert_eq!([0, 1].map(|column| by_rows[2 * KEYS + column]), [-0.46875, 0.0]);
    }
}
