//! `norm` with scales for rows, blocks and MX blocks.
//!
//! The expected results are those of the norm in f32 on the same device, quantized: each device sums rows in an order of its own.

use super::case::{Outcome, cases};
use super::data::{ENCODINGS, FLOATS, specials, tensor};
use super::quantize_blocks::{
    RAGGED, TILE, needle_in_each_row_and_column, needle_in_each_warp, results, rules, rules_for_warps, uneven,
};
use super::reference::same_results;
use fp8_kernels::ops::{Norm, NormOptions};
use fp8_kernels::{BlockRule, DType, Device, Encoding, Slot, Tensor, ops};

cases![norms: Dtypes, special_values: Formats, needles];

const NORMS: [Norm; 2] = [Norm::LayerNorm, Norm::RmsNorm];

/// The arguments of a norm.
struct Input {
    x: Tensor,
    gamma: Tensor,
    beta: Option<Tensor>,
    options: NormOptions,
}

impl Input {
    /// Codes, factors, amax and counters of the norm are those of its f32 values.
    fn check(&self, device: &Device, encoding: Encoding, rule: BlockRule, columnwise: bool) -> Outcome {
        let Self { x, gamma, options, .. } = self;
        let beta = self.beta.as_ref();
        let wide = ops::cast(x, DType::F32)?;
        let (values, _) = ops::norm(&wide, gamma, beta, options, &Slot::off(encoding))?;
        let values = values.dequantize(DType::F32)?;
        let got = results(device, encoding, rule, columnwise, |slot| {
            ops::norm(x, gamma, beta, options, slot).map(|(codes, _)| codes)
        })?;
        let want = results(device, encoding, rule, columnwise, |slot| ops::quantize(&values, slot))?;
        let what = format!("{} {} {} {encoding} {rule:?}", options.normalization, x.dtype(), x.shape());
        same_results(&what, got, want)
    }
}

fn norms(device: &Device, dtype: DType) -> Outcome {
    for (i, norm) in NORMS.into_iter().enumerate() {
        for (j, shape) in [[5, 129], [130, 72], [96, 264], [256, 128]].into_iter().enumerate() {
            let parameter =
                |seed: u64, dtype: DType| uneven([1, shape[1]], dtype, seed, device)?.reshape([shape[1]]);
            let input = Input {
                x: uneven(shape, dtype, i as u64, device)?,
                gamma: parameter(7, FLOATS[(i + j) % 3])?,
                beta: if norm == Norm::LayerNorm { Some(parameter(8, FLOATS[(j + 1) % 3])?) } else { None },
                options: NormOptions {
                    normalization: norm,
                    zero_centered_gamma: j % 2 == 1,
                    ..NormOptions::default()
                },
            };
            for (k, rule) in rules().into_iter().enumerate().skip((i + j) % 2).step_by(2) {
                input.check(device, ENCODINGS[k / 2 % 2], rule, k % 5 != 4)?;
            }
        }
    }
    for (cols, rule) in RAGGED.zip(rules()) {
        let x = uneven([5, cols], dtype, 1, device)?;
        let gamma = uneven([1, cols], dtype, 7, device)?.reshape([cols])?;
        Input { x, gamma, beta: None, options: NormOptions::default() }.check(
            device,
            Encoding::E4M3,
            rule,
            true,
        )?;
    }
    Ok(())
}

/// Values that are exactly ±γ, whose blocks have the amaxes and the values where rounding, saturating and counting change.
fn special_values(device: &Device, encoding: Encoding) -> Outcome {
    let (rows, cols) = (3, 3 * TILE);
    let specials = specials();
    let gamma = (0..cols).map(|col| match (col / 32, col % 32) {
        (0, _) => 448.0,
        (1, _) => 1.0,
        (2, lane) => [0.0, -0.0][lane % 2],
        (3, lane) => [3.3, 2e-3, f32::NAN, 1e-6][lane % 4],
        (4, _) => f32::MAX,
        (5, _) => 57344.0,
        (6, _) => f32::MIN_POSITIVE,
        (7, lane) => f32::from_bits(1 << (lane % 23)),
        // Beside an infinity the scale is 1.
        (8, 0) => f32::INFINITY,
        (8, lane) => specials[specials.len() - 33 + lane],
        (9, lane) => [464.0, 0.0][(lane + lane / 8) % 2],
        (10, lane) => [f32::powi(2.0, -10), f32::powi(2.0, -17)][lane / 8 % 2],
        _ => f32::NAN,
    });
    let gamma = tensor(gamma.collect(), [cols], DType::F32, device)?;
    let signs = (0..rows * cols).map(|i| if (i / cols + i).is_multiple_of(2) { 1.0 } else { -1.0 });
    let signs: Vec<f32> = signs.collect();
    for (i, rule) in rules().into_iter().enumerate() {
        let x = tensor(signs.clone(), [rows, cols], FLOATS[i % 3], device)?;
        let options = NormOptions { normalization: NORMS[i / 3 % 2], eps: 1e-30, ..NormOptions::default() };
        Input { x, gamma: gamma.clone(), beta: None, options }.check(device, encoding, rule, true)?;
    }
    Ok(())
}

/// Each row's, column's and block's largest value in a place of its own, and the tile's in each warp in turn.
fn needles(device: &Device) -> Outcome {
    let gamma: Vec<f32> = (0..TILE).map(|col| 1.0 + 0.5 * (col % 7) as f32).collect();
    let input = |values: Vec<f32>, norm: Norm, device: &Device| -> fp8_kernels::Result<Input> {
        Ok(Input {
            x: tensor(values, [TILE, TILE], DType::F32, device)?,
            gamma: tensor(gamma.clone(), [TILE], DType::F32, device)?,
            beta: None,
            options: NormOptions { normalization: norm, ..NormOptions::default() },
        })
    };
    for (i, rule) in rules().into_iter().enumerate() {
        let input = input(needle_in_each_row_and_column(), NORMS[i % 2], device)?;
        input.check(device, Encoding::E4M3, rule, true)?;
    }
    for (values, rule) in needle_in_each_warp(&rules_for_warps()) {
        input(values, Norm::RmsNorm, device)?.check(device, Encoding::E4M3, rule, true)?;
    }
    Ok(())
}
