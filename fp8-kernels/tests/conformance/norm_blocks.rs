//! `norm` with scales for rows, blocks and MX blocks.
//!
//! The expected results are those of the norm in f32 on the same device, quantized: each device sums rows in an order of its own.

use super::case::{Outcome, cases};
use super::data::{ENCODINGS, FLOATS, extremes, tensor};
use super::quantize_blocks::{
    TILE, needle_in_each_row_and_column, needle_in_each_warp, results, rules, uneven,
};
use super::reference::same_results;
use fp8_kernels::ops::{Norm, NormOptions};
use fp8_kernels::{BlockRule, DType, Device, Encoding, Slot, Tensor, ops};

cases![norms: Dtypes, special_values: Formats, needles];

const NORMS: [Norm; 2] = [Norm::LayerNorm, Norm::RmsNorm];

/// What is normalized.
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
        let what = format!("{} {} {} {encoding} {rule:?}", options.norm, x.dtype(), x.shape());
        same_results(&what, got, want)
    }
}

fn norms(device: &Device, dtype: DType) -> Outcome {
    for (i, norm) in NORMS.into_iter().enumerate() {
        for (j, shape) in [[5, 129], [130, 72], [40, 264], [256, 128]].into_iter().enumerate() {
            let parameter =
                |seed: u64, dtype: DType| uneven([1, shape[1]], dtype, seed, device)?.reshape([shape[1]]);
            let input = Input {
                x: uneven(shape, dtype, i as u64, device)?,
                gamma: parameter(7, FLOATS[(i + j) % 3])?,
                beta: if norm == Norm::LayerNorm { Some(parameter(8, FLOATS[(j + 1) % 3])?) } else { None },
                options: NormOptions { norm, zero_centered_gamma: j % 2 == 1, ..NormOptions::default() },
            };
            for (k, rule) in rules().into_iter().enumerate().skip((i + j) % 2).step_by(2) {
                input.check(device, ENCODINGS[k / 2 % 2], rule, k % 5 != 4)?;
            }
        }
    }
    Ok(())
}

/// Zeros, subnormals, the largest, infinities and NaN in columns of their own, beside others and in blocks of their own.
fn special_values(device: &Device, encoding: Encoding) -> Outcome {
    let (extremes, cols) = (extremes(), 136);
    let gamma = (0..cols).map(|col| match col {
        0..32 => 1.0 + col as f32,
        32..64 => [0.0, -0.0, f32::MIN_POSITIVE, -1e-40][col % 4],
        64..96 => [464.0, 1e-3, -480.0, 7e4, 1.0][col % 5],
        96..128 => extremes[(col - 96) % extremes.len()],
        _ => f32::NAN,
    });
    let gamma = tensor(gamma.collect(), [cols], DType::F32, device)?;
    for (i, rule) in rules().into_iter().enumerate() {
        let norm = NORMS[i % 2];
        let x = uneven([40, cols], FLOATS[i % 3], 1, device)?;
        let options = NormOptions { norm, ..NormOptions::default() };
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
            options: NormOptions { norm, ..NormOptions::default() },
        })
    };
    for (i, rule) in rules().into_iter().enumerate() {
        let input = input(needle_in_each_row_and_column(), NORMS[i % 2], device)?;
        input.check(device, Encoding::E4M3, rule, true)?;
    }
    for ([row, col], rule) in needle_in_each_warp() {
        // All other rows are zero, and remain so.
        let mut values = vec![0.0; TILE * TILE];
        values[row * TILE + col] = 30.0;
        input(values, Norm::RmsNorm, device)?.check(device, Encoding::E4M3, rule, true)?;
    }
    Ok(())
}
