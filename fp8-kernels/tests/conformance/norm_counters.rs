//! The counts of norms, at the borders of each.

use super::case::{Outcome, cases};
use super::compare::equal;
use super::counters::{SHAPES, filled, wanted};
use super::data::{exact, normal, tensor};
use fp8_kernels::ops::{Norm, NormOptions};
use fp8_kernels::{Cell, Counters, DType, Device, Encoding, Slot, Tensor, TransposePolicy, ops};

cases![borders: DtypesAndFormats, nan_of_whole_rows_is_counted_once_an_element: Dtypes];

/// A norm with γ = 0 returns β, which holds the borders.
fn borders(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule) = (Cell::new(1.0, device)?, exact(encoding));
    let options = NormOptions { normalization: Norm::LayerNorm, ..NormOptions::default() };
    for (shape, columnwise) in SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let [rows, cols] = shape;
        let (x, gamma) = (normal(shape, dtype, 3, device)?, Tensor::zeros([cols], dtype, device)?);
        let beta = filled([1, cols], dtype, device)?.reshape([cols])?;
        let counters = Counters::new(device)?;
        let slot = Slot { counters: Some(&counters), columnwise, ..Slot::fixed(encoding, &cell, &rule) };
        ops::norm(&x, &gamma, Some(&beta), &options, &slot)?;
        let want = wanted(&beta.to_f32_vec()?.repeat(rows), encoding, 1.0);
        equal(&format!("{shape:?}, columnwise {columnwise}"), counters.read()?, want)?;
    }
    Ok(())
}

/// A NaN makes its row NaN; what a kernel computes beyond the row's end is not counted.
fn nan_of_whole_rows_is_counted_once_an_element(device: &Device, dtype: DType) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule) = (Cell::new(1.0, device)?, exact(Encoding::E4M3));
    for (norm, [rows, cols]) in
        [Norm::LayerNorm, Norm::RmsNorm].into_iter().flat_map(|norm| SHAPES.map(|shape| (norm, shape)))
    {
        for (columnwise, bad) in [(false, f32::NAN), (true, f32::NAN), (true, f32::INFINITY)] {
            let mut values = vec![1.0; rows * cols];
            values[rows / 2 * cols] = bad;
            let (x, gamma) =
                (tensor(values, [rows, cols], dtype, device)?, Tensor::full(1.0, [cols], dtype, device)?);
            let counters = Counters::new(device)?;
            let slot =
                Slot { counters: Some(&counters), columnwise, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
            let (y, _) = ops::norm(
                &x,
                &gamma,
                None,
                &NormOptions { normalization: norm, ..NormOptions::default() },
                &slot,
            )?;
            let codes = y.as_fp8().ok_or("want FP8")?.codes()?;
            let want = codes.iter().filter(|&&code| code == 0x7F).count() as u64;
            let what = format!("{norm} [{rows}, {cols}], {bad}, columnwise {columnwise}");
            // RMSNorm divides by infinity: all but the infinity itself becomes 0.
            let all = !(norm == Norm::RmsNorm && bad.is_infinite());
            equal(&format!("{what}: codes"), want, if all { cols as u64 } else { 1 })?;
            equal(&what, counters.read()?.nan, want)?;
        }
    }
    Ok(())
}
