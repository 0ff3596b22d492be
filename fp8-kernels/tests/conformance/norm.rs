use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{FLOATS, Random, exact, f64s, needle_places, normal, tensor, tolerance};
use super::threads::same_bits;
use crate::oracle::{fp8, norm as oracle};
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, REST, Scale, ScaleRule, Slot, Tensor, TransposePolicy, UNSET,
    ops,
};
use ops::{Norm, NormOptions, NormStats};

cases![
    statistics_and_values: Dtypes,
    gradients: Dtypes,
    needles,
    gradients_of_needles,
    a_residual_is_added,
    transposes_come_with_the_codes: Dtypes,
    a_large_mean_costs_no_precision,
    codes_are_those_of_the_f32_result: DtypesAndFormats,
    first_scales_come_from_the_f32_result: Dtypes,
    one_value_everywhere: Formats,
    gamma_around_zero,
    rows_without_columns,
    same_for_any_threads,
    names,
    refuses,
];

pub(super) const NORMS: [Norm; 2] = [Norm::LayerNorm, Norm::RmsNorm];
const SHAPES: [[usize; 2]; 12] = [
    [0, 16],
    [1, 1],
    [1, 15],
    [3, 16],
    [5, 17],
    [31, 33],
    [7, 127],
    [63, 65],
    [600, 64],
    [9000, 2],
    [2, 16_411],
    [2, 8192],
];

pub(super) fn options(norm: Norm) -> NormOptions {
    NormOptions { normalization: norm, ..NormOptions::default() }
}

fn statistics_and_values(device: &Device, dtype: DType) -> Outcome {
    for norm in NORMS {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let [rows, cols] = shape;
            let x = normal(shape, dtype, seed as u64, device)?;
            let gamma = normal([cols], FLOATS[seed % 3], 50, device)?;
            let centered = norm == Norm::LayerNorm;
            let beta = normal([cols], DType::F32, 51, device)?;
            let beta = (centered && seed % 2 == 0).then_some(&beta);
            let (y, stats) = ops::norm(&x, &gamma, beta, &options(norm), &Slot::off(Encoding::E4M3))?;
            let (values, gamma) = (f64s(&x)?, f64s(&gamma)?);
            let beta = beta.map(f64s).transpose()?;
            let eps = f64::from(1e-5f32);
            let forward = |row| oracle::forward(row, &gamma, beta.as_deref(), eps, centered);
            let want: Vec<f64> = values.chunks(cols).flat_map(forward).collect();
            let what = format!("{norm} {dtype} {shape:?}");
            let got = y.as_high().ok_or("got FP8, want high precision")?;
            equal(&what, got.dtype(), dtype)?;
            // Two columns may lie close together: rsigma then enlarges the rounding of their mean.
            let [rtol, atol] = tolerance(dtype);
            let near = [rtol.max(5e-6), if cols == 2 { 5e-5 } else { atol }];
            close(&what, &got.to_f32_vec()?, &want, cols, near)?;
            let wanted = values.chunks(cols).map(|row| oracle::statistics(row, eps, centered));
            let (means, rsigmas): (Vec<f64>, Vec<f64>) = wanted.unzip();
            close(&format!("{what}: rsigma"), &stats.rsigma.to_f32_vec()?, &rsigmas, rows, [5e-5, 0.0])?;
            equal("a mean", stats.mean.is_some(), centered)?;
            if let Some(mean) = &stats.mean {
                close(&format!("{what}: mean"), &mean.to_f32_vec()?, &means, rows, [5e-5, 1e-6])?;
            }
        }
    }
    Ok(())
}

fn gradients(device: &Device, dtype: DType) -> Outcome {
    for norm in NORMS {
        // The oracle takes columns squared per row.
        for (i, shape) in SHAPES.into_iter().take(10).chain([[3, 1033], [3, 1040]]).enumerate() {
            let [rows, cols] = shape;
            let x = normal(shape, dtype, 3, device)?;
            let (dy, gamma) =
                (normal(shape, FLOATS[i % 3], 4, device)?, normal([cols], FLOATS[(i + 1) % 3], 5, device)?);
            let options = options(norm);
            let (_, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
            let (dx, dgamma, dbeta) = ops::norm_backward(&dy, &x, &gamma, &stats, &options)?;
            let (mut wanted_dx, mut wanted_dgamma, mut wanted_dbeta) =
                (Vec::new(), vec![0.0; cols], vec![0.0; cols]);
            let (x_values, dy_values, gamma) = (f64s(&x)?, f64s(&dy)?, f64s(&gamma)?);
            let centered = norm == Norm::LayerNorm;
            for (x, dy) in x_values.chunks(cols).zip(dy_values.chunks(cols)) {
                let [dx, dg, db] = oracle::backward(dy, x, &gamma, f64::from(options.eps), centered);
                wanted_dx.extend(dx);
                wanted_dgamma.iter_mut().zip(dg).for_each(|(sum, v)| *sum += v);
                wanted_dbeta.iter_mut().zip(db).for_each(|(sum, v)| *sum += v);
            }
            let what = format!("{norm} {dtype} {shape:?}");
            equal("dtypes", (dx.dtype(), dgamma.dtype()), (dtype, DType::F32))?;
            // Two columns are one up to a sign: their gradient cancels, and what is left is a large rsigma's error.
            let atol = if cols <= 2 { 5e-2 } else { 5e-4 };
            close(
                &format!("{what}: dx"),
                &dx.to_f32_vec()?,
                &wanted_dx,
                cols,
                [tolerance(dtype)[0].max(5e-4), atol],
            )?;
            let near = [5e-4, 5e-4 * (rows as f64).sqrt().max(1.0)];
            close(&format!("{what}: dgamma"), &dgamma.to_f32_vec()?, &wanted_dgamma, cols, near)?;
            equal("a dbeta", dbeta.is_some(), centered)?;
            if let Some(dbeta) = dbeta {
                close(&format!("{what}: dbeta"), &dbeta.to_f32_vec()?, &wanted_dbeta, cols, near)?;
            }
        }
    }
    Ok(())
}

fn a_large_mean_costs_no_precision(device: &Device) -> Outcome {
    let noise = super::data::Random::new(1).normals(1024);
    let x = tensor(noise.iter().map(|v| v + 1000.0).collect(), [1, 1024], DType::F32, device)?;
    let gamma = Tensor::full(1.0, [1024], DType::F32, device)?;
    let (_, stats) = ops::norm(&x, &gamma, None, &NormOptions::default(), &Slot::off(Encoding::E4M3))?;
    let (_, want) = oracle::statistics(&f64s(&x)?, 1e-5, true);
    close("rsigma", &stats.rsigma.to_f32_vec()?, &[want], 1, [5e-5, 0.0])
}

fn codes_are_those_of_the_f32_result(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    for norm in NORMS {
        for shape in SHAPES {
            let x = normal(shape, dtype, 9, device)?;
            let gamma = normal([shape[1]], DType::BF16, 10, device)?;
            let beta = (norm == Norm::LayerNorm).then_some(&gamma);
            let wide = ops::cast(&x, DType::F32)?;
            let (values, want_stats) = ops::norm(&wide, &gamma, beta, &options(norm), &Slot::off(encoding))?;
            let values = values.dequantize(DType::F32)?.to_f32_vec()?;
            let (cell, amax, rule) = (Cell::new(300.0, device)?, Cell::new(REST, device)?, exact(encoding));
            let counters = Counters::new(device)?;
            let slot =
                Slot { amax: Some(&amax), counters: Some(&counters), ..Slot::fixed(encoding, &cell, &rule) };
            let (got, stats) = ops::norm(&x, &gamma, beta, &options(norm), &slot)?;
            let want = fp8::quantize(&values, encoding, 300.0);
            let what = format!("{norm} {dtype} {shape:?}");
            let counts = counters.read()?;
            let counts = [counts.saturated, counts.underflowed, counts.elements, counts.nan];
            equal(&what, counts, [want.saturated, want.underflowed, values.len() as u64, want.nan])?;
            let got = got.as_fp8().ok_or("got high precision, want FP8")?;
            same(&what, &got.codes()?, &want.codes, shape[1])?;
            same(&what, &[got.scale_inv().item()?], &[1.0 / 300.0], 1)?;
            // In high precision the result is rounded once.
            let (high, _) = ops::norm(&x, &gamma, beta, &options(norm), &Slot::off(encoding))?;
            let rounded = tensor(values.clone(), shape, dtype, device)?.to_f32_vec()?;
            same(&what, &high.dequantize(dtype)?.to_f32_vec()?, &rounded, shape[1])?;
            same(&what, &stats.rsigma.to_f32_vec()?, &want_stats.rsigma.to_f32_vec()?, 1)?;
            same(&what, &[amax.read()?], &[if values.is_empty() { REST } else { want.amax }], 1)?;
        }
    }
    Ok(())
}

/// The first scale of a slot that is not set yet, and current scaling, on every path: by rows, by tiles, columns that are not
/// whole vectors.
fn first_scales_come_from_the_f32_result(device: &Device, dtype: DType) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (first, current) =
        (exact(Encoding::E4M3), ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false });
    for shape in [[3, 16], [5, 17], [130, 72], [2, 1032], [2, 1033]] {
        let x = normal(shape, dtype, 9, device)?;
        let gamma = normal([shape[1]], DType::F32, 10, device)?;
        let wide = ops::cast(&x, DType::F32)?;
        let off = Slot::off(Encoding::E4M3);
        let (values, _) = ops::norm(&wide, &gamma, None, &options(Norm::LayerNorm), &off)?;
        let values = values.dequantize(DType::F32)?.to_f32_vec()?;
        let largest = fp8::quantize(&values, Encoding::E4M3, 1.0).amax;
        for columnwise in [false, true] {
            let cell = Cell::new(UNSET, device)?;
            let unset = Scale::Cell { cell: &cell, first: &first, keep: true };
            for scale in [unset, Scale::FromTensor(&current)] {
                let slot = Slot { scale, columnwise, ..off };
                let (y, _) = ops::norm(&x, &gamma, None, &options(Norm::LayerNorm), &slot)?;
                let y = y.as_fp8().ok_or("got high precision, want FP8")?;
                let what = format!("{shape:?} columnwise {columnwise}");
                let want = fp8::quantize(&values, Encoding::E4M3, 448.0 / largest);
                same(&what, &y.codes()?, &want.codes, shape[1])?;
            }
            same("the cell, provisional", &[cell.read()?], &[-448.0 / largest], 1)?;
        }
    }
    Ok(())
}

/// One value that all others of its row feel.
fn needles(device: &Device) -> Outcome {
    for (norm, cols) in NORMS.into_iter().flat_map(|n| [64, 65, 1000, 1024, 1025, 2056].map(|c| (n, c))) {
        let (noise, gamma) = (Random::new(2).normals(cols), Tensor::full(1.0, [cols], DType::F32, device)?);
        for place in needle_places(cols).into_iter().step_by(cols.div_ceil(100)) {
            let mut values = [noise.as_slice(); 3].concat();
            values[cols + place] = 300.0;
            let x = tensor(values, [3, cols], DType::F32, device)?;
            let (y, stats) = ops::norm(&x, &gamma, None, &options(norm), &Slot::off(Encoding::E4M3))?;
            let centered = norm == Norm::LayerNorm;
            let rows = f64s(&x)?;
            let ones = vec![1.0; cols];
            let forward = |row| oracle::forward(row, &ones, None, f64::from(1e-5f32), centered);
            let want: Vec<f64> = rows.chunks(cols).flat_map(forward).collect();
            let what = format!("{norm}: a needle at {place} of {cols}");
            close(&what, &y.dequantize(DType::F32)?.to_f32_vec()?, &want, cols, [5e-6, 1e-5])?;
            let wanted: Vec<f64> =
                rows.chunks(cols).map(|row| oracle::statistics(row, 1e-5, centered).1).collect();
            close(&what, &stats.rsigma.to_f32_vec()?, &wanted, 1, [5e-5, 0.0])?;
        }
    }
    Ok(())
}

/// A gradient of one element: its column's dγ and dβ are that element's, all others 0.
fn gradients_of_needles(device: &Device) -> Outcome {
    let norm = Norm::LayerNorm;
    for [rows, cols] in [[70, 24], [70, 25], [9, 1104], [300, 8], [2, 8200]] {
        let x = normal([rows, cols], DType::F32, 3, device)?;
        let gamma = Tensor::full(1.0, [cols], DType::F32, device)?;
        let (_, stats) = ops::norm(&x, &gamma, None, &options(norm), &Slot::off(Encoding::E4M3))?;
        let [values, means, rsigmas] = [
            x.to_f32_vec()?,
            stats.mean.as_ref().ok_or("no mean")?.to_f32_vec()?,
            stats.rsigma.to_f32_vec()?,
        ];
        let len = rows * cols;
        let count = if len > 5000 { 9 } else { 24 };
        for place in (0..len).step_by((len / count) | 1).chain([cols - 1, len - 1]) {
            let mut gradient = vec![0.0; len];
            gradient[place] = 2.0;
            let dy = tensor(gradient, [rows, cols], DType::F32, device)?;
            let (_, dgamma, dbeta) = ops::norm_backward(&dy, &x, &gamma, &stats, &options(norm))?;
            let (row, col) = (place / cols, place % cols);
            let (mut want, mut shift) = (vec![0.0; cols], vec![0.0; cols]);
            want[col] = f64::from(2.0 * (values[place] - means[row]) * rsigmas[row]);
            shift[col] = 2.0;
            let what = format!("a needle at {place} of [{rows}, {cols}]");
            close(&what, &dgamma.to_f32_vec()?, &want, cols, [1e-6, 0.0])?;
            same(&what, &dbeta.ok_or("no dbeta")?.to_f32_vec()?, &shift, cols)?;
        }
    }
    Ok(())
}

fn a_residual_is_added(device: &Device) -> Outcome {
    for (i, shape) in [[3, 16], [70, 25], [9, 1104], [2, 1500]].into_iter().enumerate() {
        for norm in NORMS {
            let (x, dy) = (normal(shape, DType::F32, 1, device)?, normal(shape, DType::F32, 2, device)?);
            let (gamma, residual) =
                (normal([shape[1]], DType::F32, 3, device)?, normal(shape, FLOATS[i % 3], 4, device)?);
            let (_, stats) = ops::norm(&x, &gamma, None, &options(norm), &Slot::off(Encoding::E4M3))?;
            let (plain, ..) = ops::norm_backward(&dy, &x, &gamma, &stats, &options(norm))?;
            let (got, dgamma, _) =
                ops::norm_backward_add(&dy, &x, &gamma, &stats, &options(norm), &residual)?;
            let want = ops::add(&plain, &ops::cast(&residual, DType::F32)?)?;
            same(&format!("{norm} {shape:?}"), &got.to_f32_vec()?, &want.to_f32_vec()?, shape[1])?;
            equal("dgamma", dgamma.numel(), shape[1])?;
        }
    }
    Ok(())
}

fn transposes_come_with_the_codes(device: &Device, dtype: DType) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    for norm in NORMS {
        for (i, shape) in SHAPES.into_iter().chain([[128, 64], [130, 136], [17, 1100]]).enumerate() {
            // One of the norms at each shape, another for another type.
            if (i + dtype as usize + norm as usize).is_multiple_of(2) {
                continue;
            }
            let [rows, cols] = shape;
            let x = normal(shape, dtype, 9, device)?;
            let gamma = normal([cols], FLOATS[i % 3], 10, device)?;
            let beta = normal([cols], FLOATS[(i + 1) % 3], 11, device)?;
            let beta = (norm == Norm::LayerNorm && i % 5 != 0).then_some(&beta);
            let options = NormOptions { zero_centered_gamma: i % 2 == 1, ..options(norm) };
            let (cell, rule) = (Cell::new(50.0, device)?, exact(Encoding::E4M3));
            let run = |columnwise| -> Result<_, libtest_mimic::Failed> {
                let (amax, counters) = (Cell::new(REST, device)?, Counters::new(device)?);
                let slot = Slot {
                    amax: Some(&amax),
                    counters: Some(&counters),
                    columnwise,
                    ..Slot::fixed(Encoding::E4M3, &cell, &rule)
                };
                let (y, stats) = ops::norm(&x, &gamma, beta, &options, &slot)?;
                let y = y.as_fp8().ok_or("got high precision, want FP8")?.clone();
                Ok((y, stats.rsigma.to_f32_vec()?, amax.read()?, counters.read()?))
            };
            let ((got, rsigma, amax, counts), (want, rsigma_wanted, amax_wanted, counts_wanted)) =
                (run(true)?, run(false)?);
            let what = format!("{norm} {shape:?}");
            let codes = want.codes()?;
            same(&what, &got.codes()?, &codes, cols)?;
            let turned = got.columnwise().ok_or("no transpose was made with the codes")?.to_vec::<u8>()?;
            same(&what, &turned, &fp8::transpose(&codes, rows, cols), rows)?;
            same(&what, &rsigma, &rsigma_wanted, 1)?;
            equal(&what, (amax.to_bits(), counts), (amax_wanted.to_bits(), counts_wanted))?;
        }
    }
    Ok(())
}

/// A result at an edge of what is counted, in every place that a kernel has: β alone, as γ is 0.
fn one_value_everywhere(device: &Device, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule, max) = (Cell::new(1.0, device)?, exact(encoding), encoding.max());
    for [rows, cols] in [[5, 33], [9, 264], [2, 1033], [2, 8192]] {
        let x = normal([rows, cols], DType::F32, 1, device)?;
        let gamma = Tensor::zeros([cols], DType::F32, device)?;
        let values = [max, -max, 1.125 * max, f32::INFINITY, 0.0, 5e-7, f32::NAN];
        for (value, columnwise) in values.into_iter().flat_map(|value| [(value, false), (value, true)]) {
            let beta = Tensor::full(value, [cols], DType::F32, device)?;
            let (amax, counters) = (Cell::new(REST, device)?, Counters::new(device)?);
            let (amax_cell, counts) = (Some(&amax), Some(&counters));
            let slot =
                Slot { amax: amax_cell, counters: counts, columnwise, ..Slot::fixed(encoding, &cell, &rule) };
            let (y, _) = ops::norm(&x, &gamma, Some(&beta), &options(Norm::LayerNorm), &slot)?;
            let want = fp8::quantize(&vec![value; rows * cols], encoding, 1.0);
            let what = format!("{value} in [{rows}, {cols}], columnwise {columnwise}");
            same(&what, &y.as_fp8().ok_or("got high precision, want FP8")?.codes()?, &want.codes, cols)?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
            let counts = counters.read()?;
            let wanted = [want.saturated, want.underflowed, (rows * cols) as u64, want.nan];
            equal(&what, [counts.saturated, counts.underflowed, counts.elements, counts.nan], wanted)?;
        }
        // And a largest value that stands in one place.
        for (place, columnwise) in (0..16).map(|k| (k * 293 % cols, k % 2 == 1)) {
            let mut values = vec![1.0; cols];
            values[place] = -3.0;
            let beta = tensor(values, [cols], DType::F32, device)?;
            let amax = Cell::new(REST, device)?;
            let slot = Slot { amax: Some(&amax), columnwise, ..Slot::fixed(encoding, &cell, &rule) };
            ops::norm(&x, &gamma, Some(&beta), &options(Norm::LayerNorm), &slot)?;
            let what = format!("-3 at {place} of {cols}, columnwise {columnwise}");
            same(&what, &[amax.read()?], &[3.0], 1)?;
        }
    }
    Ok(())
}

fn gamma_around_zero(device: &Device) -> Outcome {
    for (shape, i) in
        [[5, 33], [5, 40], [2, 1033], [2, 1032]].into_iter().flat_map(|s| (0..9).map(move |i| (s, i)))
    {
        // All pairs of types of x and γ.
        let (norm, cols) = (NORMS[i % 2], shape[1]);
        let x = normal(shape, FLOATS[i / 3], 1, device)?;
        let dy = normal(shape, FLOATS[(i + i / 3) % 3], 3, device)?;
        let gamma = normal([cols], FLOATS[i % 3], 2, device)?;
        let shifted =
            tensor(gamma.to_f32_vec()?.iter().map(|g| g + 1.0).collect(), [cols], DType::F32, device)?;
        let plain = options(norm);
        let centered = NormOptions { zero_centered_gamma: true, ..plain };
        let off = Slot::off(Encoding::E4M3);
        let (want, stats) = ops::norm(&x, &shifted, None, &plain, &off)?;
        let (got, _) = ops::norm(&x, &gamma, None, &centered, &off)?;
        let read = |y: fp8_kernels::Operand| y.dequantize(DType::F32)?.to_f32_vec();
        same(norm.name(), &read(got)?, &read(want)?, cols)?;
        let (got, _, _) = ops::norm_backward(&dy, &x, &gamma, &stats, &centered)?;
        let (want, _, _) = ops::norm_backward(&dy, &x, &shifted, &stats, &plain)?;
        same(norm.name(), &got.to_f32_vec()?, &want.to_f32_vec()?, cols)?;
    }
    Ok(())
}

fn rows_without_columns(device: &Device) -> Outcome {
    let (x, gamma) = (Tensor::zeros([3, 0], DType::F32, device)?, Tensor::zeros([0], DType::F32, device)?);
    for norm in NORMS {
        let (_, stats) = ops::norm(&x, &gamma, None, &options(norm), &Slot::off(Encoding::E4M3))?;
        equal("rows", stats.rsigma.numel(), 3)?;
        let (dx, dgamma, dbeta) = ops::norm_backward(&x, &x, &gamma, &stats, &options(norm))?;
        equal("sizes", [dx.numel(), dgamma.numel()], [0, 0])?;
        equal("a dbeta", dbeta.is_some(), norm == Norm::LayerNorm)?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let shapes = [[600, 65], [4500, 2], [3, 20_000]];
    for (norm, shape) in [Norm::LayerNorm, Norm::RmsNorm, Norm::LayerNorm].into_iter().zip(shapes) {
        let (x, dy) = (normal(shape, DType::F32, 3, device)?, normal(shape, DType::F32, 4, device)?);
        let gamma = normal([shape[1]], DType::F32, 5, device)?;
        same_bits(&format!("{norm} {shape:?}"), || {
            let options = options(norm);
            let (y, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
            let (dx, dgamma, dbeta) = ops::norm_backward(&dy, &x, &gamma, &stats, &options)?;
            let mut all = vec![y.dequantize(DType::F32)?, stats.rsigma, dx, dgamma];
            all.extend(dbeta);
            Ok(all)
        })?;
    }
    Ok(())
}

fn names(_: &Device) -> Outcome {
    for norm in NORMS {
        equal("round trip", norm.to_string().parse::<Norm>()?, norm)?;
    }
    refused("rms".parse::<Norm>(), "norm: name = rms: expected LayerNorm or RMSNorm")
}

fn refuses(device: &Device) -> Outcome {
    let off = Slot::off(Encoding::E4M3);
    let zeros = |len: usize| Tensor::zeros([len], DType::F32, device);
    let x = Tensor::zeros([2, 4], DType::F32, device)?;
    let layer = NormOptions::default();
    refused(
        ops::norm(&x, &zeros(3)?, None, &layer, &off),
        "norm: gamma and the last dimension: got [3] and [4]: a norm has one parameter per column",
    )?;
    refused(
        ops::norm(&x, &zeros(4)?, Some(&zeros(5)?), &layer, &off),
        "norm: beta and the last dimension: got [5]",
    )?;
    let rms = options(Norm::RmsNorm);
    refused(
        ops::norm(&x, &zeros(4)?, Some(&zeros(4)?), &rms, &off),
        "norm: beta = [4]: RMSNorm has none: pass no beta, or use LayerNorm",
    )?;
    for eps in [0.0, -1e-5, f32::NAN, f32::INFINITY] {
        let options = NormOptions { eps, ..layer };
        let wording = format!("norm: eps = {eps}: expected a finite value greater than 0");
        refused(ops::norm(&x, &zeros(4)?, None, &options, &off), &wording)?;
    }
    let stats = NormStats { mean: None, rsigma: zeros(2)? };
    refused(
        ops::norm_backward(&x, &x, &zeros(4)?, &stats, &layer),
        "norm_backward: stats.mean = absent: these statistics are not LayerNorm's",
    )?;
    let stats = NormStats { mean: None, rsigma: zeros(3)? };
    refused(
        ops::norm_backward(&x, &x, &zeros(4)?, &stats, &rms),
        "norm_backward: rsigma and the rows of x: got [3] and [2]",
    )
}
