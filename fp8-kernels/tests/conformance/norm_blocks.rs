//! `norm` with scales for rows, blocks and MX blocks.

use super::case::{Outcome, cases};
use super::quantize_blocks::{rules, same_fp8, uneven};
use fp8_kernels::ops::{Norm, NormOptions};
use fp8_kernels::{DType, Device, Encoding, Scale, Slot, ops};

cases![norms: Dtypes];

/// As the norm in f32 on the same device, quantized: sums of rows have an order of each device's own.
fn norms(device: &Device, dtype: DType) -> Outcome {
    for (i, norm) in [Norm::LayerNorm, Norm::RmsNorm].into_iter().enumerate() {
        for (j, shape) in [[5, 129], [130, 72], [40, 264]].into_iter().enumerate() {
            let x = uneven(shape, dtype, i as u64, device)?;
            let gamma = uneven([1, shape[1]], DType::BF16, 7, device)?.reshape([shape[1]])?;
            let beta = (norm == Norm::LayerNorm).then_some(&gamma);
            let options = NormOptions { norm, zero_centered_gamma: j == 1, ..NormOptions::default() };
            let wide = ops::cast(&x, DType::F32)?;
            let (values, _) = ops::norm(&wide, &gamma, beta, &options, &Slot::off(Encoding::E4M3))?;
            let values = values.dequantize(DType::F32)?;
            for rule in rules().into_iter().skip((i + j) % 2).step_by(2) {
                let slot = Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(Encoding::E4M3) };
                let (got, _) = ops::norm(&x, &gamma, beta, &options, &slot)?;
                same_fp8(
                    &format!("{norm} {dtype} {shape:?} {rule:?}"),
                    &got,
                    &ops::quantize(&values, &slot)?,
                )?;
            }
        }
    }
    Ok(())
}
