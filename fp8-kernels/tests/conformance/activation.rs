use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{ENCODINGS, FLOATS, PIECE, Random, exact, f64s, normal, specials, tensor, tolerance};
use super::reference::{Got, same_as_cpu};
use super::threads::same_bits;
use crate::oracle::{activation as oracle, fp8};
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, Operand, REST, Scale, ScaleRule, Slot, Tensor, TransposePolicy,
    UNSET, ops,
};
use ops::Activation;

cases![
    values: ActivationsAndDtypes,
    derivatives: ActivationsAndDtypes,
    derivatives_at_the_ends,
    bits_are_the_cpus: ActivationsAndDtypes,
    first_scales_are_the_cpus: Activations,
    special_values: Activations,
    tails_in_each_place: Activations,
    one_value_everywhere: Activations,
    codes_at_the_edges_of_counts,
    transposes_of_tall_results: Activations,
    needles: Activations,
    codes_are_those_of_the_f32_result: Activations,
    backward_codes_are_those_of_the_f32_gradient: Activations,
    long_and_tall: Dtypes,
    current_scaling_reads_the_f32_result,
    nan_stays_nan,
    same_for_any_threads,
    names,
    refuses,
];

/// Even columns: gated activations halve them.
const SHAPES: [[usize; 2]; 11] =
    [[0, 16], [3, 0], [1, 2], [2, 16], [5, 20], [5, 22], [5, 28], [17, 34], [7, 254], [97, 202], [129, 130]];
/// More than a piece of the CPU's, and so tall that a simulated device's blocks take two tiles, the last of them one.
const LONG_AND_TALL: [[usize; 2]; 2] = [[1, PIECE + 2], [97 * 128, 2]];

/// f's values for the rows of `h`, by the oracle.
fn wanted(h: &Tensor, activation: Activation) -> fp8_kernels::Result<Vec<f64>> {
    let (name, cols, values) = (activation.name(), h.shape().last_dim(), f64s(h)?);
    if !activation.is_gated() {
        return Ok(values.into_iter().map(|x| oracle::value(name, x)).collect());
    }
    let gate = |row: &[f64]| {
        let (a, b) = row.split_at(cols / 2);
        a.iter().zip(b).map(|(&a, b)| oracle::value(name, a) * b).collect::<Vec<_>>()
    };
    Ok(values.chunks(cols.max(1)).flat_map(gate).collect())
}

fn values(device: &Device, activation: Activation, dtype: DType) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let h = ops::scale(&normal(shape, dtype, seed as u64, device)?, 3.0)?;
        let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?;
        let got = y.as_high().ok_or("got FP8, want high precision")?;
        equal("dtype", got.dtype(), dtype)?;
        let last = got.shape().last_dim();
        equal("last dimension", last, if activation.is_gated() { shape[1] / 2 } else { shape[1] })?;
        close(&format!("{shape:?}"), &got.to_f32_vec()?, &wanted(&h, activation)?, last, tolerance(dtype))?;
    }
    Ok(())
}

fn long_and_tall(device: &Device, dtype: DType) -> Outcome {
    // How far a loop goes depends on the shape, and on being gated, not on the type.
    let some: &[_] = match dtype {
        DType::F32 => &[Activation::Relu, Activation::Swiglu],
        _ => &[Activation::Relu],
    };
    for (&activation, shape) in some.iter().flat_map(|a| LONG_AND_TALL.map(|s| (a, s))) {
        let h = normal(shape, dtype, 1, device)?;
        let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(dtype)?;
        let last = y.shape().last_dim();
        let what = format!("{activation} {shape:?}");
        close(&what, &y.to_f32_vec()?, &wanted(&h, activation)?, last, tolerance(dtype))?;
        let (dy, slot) = (normal(*y.shape(), dtype, 2, device)?, Slot::off(Encoding::E5M2));
        let (_, db) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
        let wide = ops::activation_backward(&dy, &ops::cast(&h, DType::F32)?, activation)?;
        same(&what, &db.to_f32_vec()?, &ops::column_sums(&wide)?.to_f32_vec()?, shape[1])?;
    }
    Ok(())
}

/// Values, gradients, codes and amaxes; sums have another order.
fn bits_are_the_cpus(device: &Device, activation: Activation, dtype: DType) -> Outcome {
    let gated = if activation.is_gated() { 2 } else { 1 };
    // Tails of one column; rows that are whole vectors of the transpose.
    for (seed, shape) in [[3, 14], [40, 65 * gated], [144, 16]].into_iter().enumerate() {
        same_as_cpu(&format!("{shape:?}"), device, |device| {
            let h = ops::scale(&normal(shape, dtype, seed as u64, device)?, 4.0)?;
            let dy = normal([shape[0], shape[1] / gated], FLOATS[seed % 3], 5, device)?;
            let (off, encoding) = (Slot::off(Encoding::E4M3), ENCODINGS[seed % 2]);
            let y = ops::activation(&h, activation, &off)?.dequantize(dtype)?;
            let dh = ops::activation_backward(&dy, &h, activation)?;
            let (cell, amax, rule) = (
                Cell::new(if seed == 0 { 1e-3 } else { 370.0 }, device)?,
                Cell::new(REST, device)?,
                exact(encoding),
            );
            let counters = Counters::new(device)?;
            let slot = Slot {
                amax: Some(&amax),
                counters: Some(&counters),
                columnwise: true,
                ..Slot::fixed(encoding, &cell, &rule)
            };
            let (codes, _) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
            let mut results = vec![Got::Tensor(y), Got::Tensor(dh), Got::Numbers(vec![amax.read()?])];
            results.extend(codes.as_fp8().cloned().map(Got::from));
            let codes = ops::activation(&h, activation, &slot)?;
            results.extend(codes.as_fp8().cloned().map(Got::from));
            let counts = counters.read()?;
            let counts =
                [counts.saturated, counts.underflowed, counts.elements, counts.nan].map(|count| count as f32);
            results.push(Got::Numbers([[amax.read()?].as_slice(), &counts].concat()));
            Ok(results)
        })?;
    }
    Ok(())
}

/// Scales that come from the result itself: of a slot that is not set yet, and of current scaling.
fn first_scales_are_the_cpus(device: &Device, activation: Activation) -> Outcome {
    let gated = if activation.is_gated() { 2 } else { 1 };
    let current = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    for [rows, cols] in [[3, 14], [130, 66]] {
        same_as_cpu(&format!("[{rows}, {cols}]"), device, |device| {
            let h = normal([rows, cols * gated], DType::BF16, 1, device)?;
            let dy = normal([rows, cols], DType::BF16, 2, device)?;
            let rule = exact(Encoding::E4M3);
            let (cell, amax) = (Cell::new(UNSET, device)?, Cell::new(REST, device)?);
            let unset = Scale::Cell { cell: &cell, first: &rule, keep: true };
            let mut results = Vec::new();
            for scale in [unset, unset, Scale::FromTensor(&current)] {
                let slot = Slot { scale, amax: Some(&amax), ..Slot::off(Encoding::E4M3) };
                let y = ops::activation(&h, activation, &slot)?;
                results.extend(y.as_fp8().cloned().map(Got::from));
                let (dh, _) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
                results.extend(dh.as_fp8().cloned().map(Got::from));
                results.push(Got::Numbers(vec![cell.read()?, amax.read()?]));
                cell.write(UNSET)?;
                // Then the gradient first, so that it is its amax that counts.
                let (dh, _) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
                results.extend(dh.as_fp8().cloned().map(Got::from));
                results.push(Got::Numbers(vec![cell.read()?]));
            }
            Ok(results)
        })?;
    }
    Ok(())
}

fn special_values(device: &Device, activation: Activation) -> Outcome {
    let mut values: Vec<f32> = specials();
    values.extend([
        -200.0, -128.0, -90.0, -88.7, -88.5, -87.3, -51.6, -20.0, -10.05, 10.05, 20.0, 51.6, 87.3, 90.0,
        128.0, 200.0,
    ]);

    let len = values.len();
    let gated = if activation.is_gated() { 2 } else { 1 };
    same_as_cpu("special values", device, |device| {
        // The other half are ones, or the same in another order.
        let mut both = values.clone();
        both.extend(values.iter().rev());
        let h = Tensor::from_vec(both, [2 / gated, len * gated], device)?;
        let dy = Tensor::full(1.5, [2 / gated, len], DType::F32, device)?;
        let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(DType::F32)?;
        let dh = ops::activation_backward(&dy, &h, activation)?;
        // Which NaN it is is left open.
        let quiet = |x: Tensor| -> fp8_kernels::Result<Got> {
            let values = x.to_f32_vec()?.into_iter();
            Ok(Got::Numbers(values.map(|v| if v.is_nan() { f32::NAN } else { v }).collect()))
        };
        Ok(vec![quiet(y)?, quiet(dh)?])
    })
}

/// One of eight values is where the sigmoid is subnormal, or nearly 1.
fn tails_in_each_place(device: &Device, activation: Activation) -> Outcome {
    let gated = if activation.is_gated() { 2 } else { 1 };
    let end: f32 = match activation {
        Activation::Gelu | Activation::Geglu => 10.03,
        Activation::Qgelu | Activation::Qgeglu => 51.5,
        _ => 87.5,
    };
    for far in [-end, end] {
        same_as_cpu(&format!("{far}"), device, |device| {
            let [rows, width] = [8, 16 * gated];
            let value = |i: usize| if i / width == i % 8 { far } else { (i % 7) as f32 - 3.0 };
            let h = Tensor::from_vec((0..rows * width).map(value).collect(), [rows, width], device)?;
            let dy = normal([rows, width / gated], DType::F32, 1, device)?;
            let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(DType::F32)?;
            Ok(vec![Got::Tensor(y), Got::Tensor(ops::activation_backward(&dy, &h, activation)?)])
        })?;
    }
    Ok(())
}

/// A value at which a function bends, in every place that a kernel has.
fn one_value_everywhere(device: &Device, activation: Activation) -> Outcome {
    let gated = if activation.is_gated() { 2 } else { 1 };
    for value in [0.0, -0.0, 3.0, -130.0, 130.0] {
        same_as_cpu(&format!("{value}"), device, |device| {
            let h = Tensor::full(value, [5, 9 * gated], DType::F32, device)?;
            let dy = Tensor::full(-1.5, [5, 9], DType::F32, device)?;
            let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(DType::F32)?;
            Ok(vec![Got::Tensor(y), Got::Tensor(ops::activation_backward(&dy, &h, activation)?)])
        })?;
    }
    Ok(())
}

/// Results at an edge of what is counted, in every place that a kernel has.
fn codes_at_the_edges_of_counts(device: &Device) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (rule, above) = (exact(Encoding::E4M3), f32::from_bits(3.5f32.to_bits() + 1));
    let values = [3.5, -3.5, above, -above, f32::INFINITY, 0.0, -0.0, 1e-9, -1e-9, f32::NAN];
    let shapes = [[130, 72], [130, 66]].into_iter().flat_map(|shape| values.map(|value| (shape, value)));
    for ((([rows, cols], value), activation), gated) in
        shapes.flat_map(|s| [((s, Activation::Relu), 1), ((s, Activation::Reglu), 2)])
    {
        same_as_cpu(&format!("{activation}: {value} in [{rows}, {cols}]"), device, |device| {
            // 3.5 becomes the largest code.
            let cell = Cell::new(128.0, device)?;
            let ones = Tensor::full(1.0, [rows, cols * gated], DType::F32, device)?;
            let part = |i: usize| if i % (cols * gated) < cols { value } else { 1.0 };
            let h = (0..rows * cols * gated).map(part).collect();
            let h = Tensor::from_vec(h, [rows, cols * gated], device)?;
            let dy = Tensor::full(value, [rows, cols], DType::F32, device)?;
            let mut results = Vec::new();
            for is_backward in [false, true] {
                let (amax, counters) = (Cell::new(REST, device)?, Counters::new(device)?);
                let (amax_cell, counts) = (Some(&amax), Some(&counters));
                let slot = Slot::fixed(Encoding::E4M3, &cell, &rule);
                let slot = Slot { amax: amax_cell, counters: counts, columnwise: true, ..slot };
                let codes = if is_backward {
                    ops::activation_backward_quantize_dbias(&dy, &ones, activation, &slot)?.0
                } else {
                    ops::activation(&h, activation, &slot)?
                };
                results.extend(codes.as_fp8().cloned().map(Got::from));
                let counts = counters.read()?;
                let counts =
                    [counts.saturated, counts.underflowed, counts.elements, counts.nan].map(|n| n as f32);
                results.push(Got::Numbers([[amax.read()?].as_slice(), &counts].concat()));
            }
            Ok(results)
        })?;
    }
    Ok(())
}

/// Blocks that take one tile after the other, with the codes' transposes.
fn transposes_of_tall_results(device: &Device, activation: Activation) -> Outcome {
    if ![Activation::Relu, Activation::Reglu].contains(&activation) {
        return Ok(());
    }
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (rows, gated) = (98 * 128 + 5, if activation.is_gated() { 2 } else { 1 });
    same_as_cpu("tall", device, |device| {
        let h = normal([rows, gated], DType::BF16, 1, device)?;
        let dy = normal([rows, 1], DType::BF16, 2, device)?;
        let (cell, rule) = (Cell::new(64.0, device)?, exact(Encoding::E4M3));
        let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
        let y = ops::activation(&h, activation, &slot)?;
        let (dh, _) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
        Ok([y, dh].iter().filter_map(|codes| codes.as_fp8().cloned()).map(Got::from).collect())
    })
}

fn needles(device: &Device, activation: Activation) -> Outcome {
    let gated = if activation.is_gated() { 2 } else { 1 };
    let (cell, rule) = (Cell::new(2.0, device)?, exact(Encoding::E4M3));
    for [rows, cols] in [[130, 66], [9, 8]] {
        let len = rows * cols * gated;
        for place in (0..len).step_by(1021).chain([cols - 1, len - 1]) {
            let mut values = vec![1.0; len];
            values[place] = 1e4;
            let h = Tensor::from_vec(values, [rows, cols * gated], device)?;
            let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(DType::F32)?;
            let amax = Cell::new(REST, device)?;
            let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
            let what = format!("a needle at {place} of [{rows}, {cols}]");
            check(&what, &ops::activation(&h, activation, &slot)?, &y, Encoding::E4M3, 2.0)?;
            same(&what, &[amax.read()?], &[fp8::quantize(&y.to_f32_vec()?, Encoding::E4M3, 2.0).amax], 1)?;
            // And one gradient.
            let (mut gradient, ones) = (vec![1.0; rows * cols], vec![1.0; len]);
            gradient[place % (rows * cols)] = -1e4;
            let dy = Tensor::from_vec(gradient, [rows, cols], device)?;
            let h = Tensor::from_vec(ones, [rows, cols * gated], device)?;
            let dh = ops::activation_backward(&dy, &h, activation)?.to_f32_vec()?;
            amax.write(REST)?;
            ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
            let largest = dh.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
            same(&format!("{what} of the gradient"), &[amax.read()?], &[largest], 1)?;
        }
    }
    Ok(())
}

/// Inputs off the kink of relu.
fn smooth(shape: [usize; 2], dtype: DType, seed: u64, device: &Device) -> fp8_kernels::Result<Tensor> {
    let mut random = Random::new(seed);
    let off_zero = |v: f32| v + 0.01f32.copysign(v);
    tensor((0..shape[0] * shape[1]).map(|_| off_zero(2.5 * random.normal())).collect(), shape, dtype, device)
}

fn derivatives(device: &Device, activation: Activation, dtype: DType) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let h = smooth(shape, dtype, seed as u64, device)?;
        let (name, cols) = (activation.name(), shape[1]);
        let out = if activation.is_gated() { cols / 2 } else { cols };
        let dy = normal([shape[0], out], FLOATS[seed % 3], 7, device)?;
        let got = ops::activation_backward(&dy, &h, activation)?;
        let (inputs, gradients) = (f64s(&h)?, f64s(&dy)?);
        let want: Vec<f64> = if activation.is_gated() {
            let gate = |(row, dy): (&[f64], &[f64])| {
                let (a, b) = row.split_at(out);
                let da = a.iter().zip(b).zip(dy).map(|((&a, b), dy)| oracle::slope(name, a) * dy * b);
                let db = a.iter().zip(dy).map(|(&a, dy)| oracle::value(name, a) * dy);
                da.chain(db).collect::<Vec<_>>()
            };
            inputs.chunks(cols.max(1)).zip(gradients.chunks(out.max(1))).flat_map(gate).collect()
        } else {
            inputs.iter().zip(&gradients).map(|(&x, dy)| oracle::slope(name, x) * dy).collect()
        };
        equal("dtype", got.dtype(), dtype)?;
        let what = format!("{shape:?}");
        close(&what, &got.to_f32_vec()?, &want, cols, tolerance(dtype))?;
        // The fused form gives the same values where its slot is off.
        let off = Slot::off(Encoding::E5M2);
        let (fused, db) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &off)?;
        let fused = fused.dequantize(dtype)?;
        same(&what, &fused.to_f32_vec()?, &got.to_f32_vec()?, cols)?;
        let column = |col: usize| want.iter().skip(col).step_by(cols).sum();
        let sums: Vec<f64> = (0..cols).map(column).collect();
        close(&format!("{what}: db"), &db.to_f32_vec()?, &sums, cols, [1e-5, 3e-3])?;
    }
    Ok(())
}

fn derivatives_at_the_ends(device: &Device) -> Outcome {
    let ends = vec![f32::NEG_INFINITY, f32::MIN, -1e19, -200.0, 0.0, 200.0, 1e19, f32::MAX, f32::INFINITY];
    let len = ends.len();
    let h = Tensor::from_vec(ends, [1, len], device)?;
    let dy = Tensor::full(1.0, [1, len], DType::F32, device)?;
    let half = [0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0];
    let mut step = half;
    step[4] = 0.0;
    for (activation, want) in [
        (Activation::Gelu, half),
        (Activation::Silu, half),
        (Activation::Qgelu, half),
        (Activation::Relu, step),
    ] {
        let got = ops::activation_backward(&dy, &h, activation)?.to_f32_vec()?;
        close(&activation.to_string(), &got, &want, len, [0.0, 0.0])?;
    }
    Ok(())
}

fn codes_are_those_of_the_f32_result(device: &Device, activation: Activation) -> Outcome {
    for (i, shape) in SHAPES.into_iter().enumerate() {
        let (dtype, encoding) = (FLOATS[i % 3], ENCODINGS[i % 2]);
        let h = normal(shape, dtype, 11, device)?;
        let exact_input = ops::cast(&h, DType::F32)?;
        let values =
            ops::activation(&exact_input, activation, &Slot::off(encoding))?.dequantize(DType::F32)?;
        let (cell, amax, rule) = (Cell::new(100.0, device)?, Cell::new(REST, device)?, exact(encoding));
        let slot = Slot { amax: Some(&amax), ..Slot::fixed(encoding, &cell, &rule) };
        let got = ops::activation(&h, activation, &slot)?;
        check(&format!("{dtype} {shape:?}"), &got, &values, encoding, 100.0)?;
        if h.numel() > 0 {
            let want = fp8::quantize(&values.to_f32_vec()?, encoding, 100.0).amax;
            same("amax", &[amax.read()?], &[want], 1)?;
        }
    }
    Ok(())
}

fn backward_codes_are_those_of_the_f32_gradient(device: &Device, activation: Activation) -> Outcome {
    for shape in SHAPES {
        let (h, out) = (normal(shape, DType::BF16, 12, device)?, if activation.is_gated() { 2 } else { 1 });
        let dy = normal([shape[0], shape[1] / out], DType::BF16, 13, device)?;
        let wide = ops::activation_backward(&dy, &ops::cast(&h, DType::F32)?, activation)?;
        let (cell, rule) = (Cell::new(64.0, device)?, exact(Encoding::E5M2));
        let slot = Slot::fixed(Encoding::E5M2, &cell, &rule);
        let (got, db) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
        check(&format!("{shape:?}"), &got, &wide, Encoding::E5M2, 64.0)?;
        same("db", &db.to_f32_vec()?, &ops::column_sums(&wide)?.to_f32_vec()?, shape[1])?;
    }
    Ok(())
}

fn check(what: &str, got: &Operand, values: &Tensor, encoding: Encoding, scale: f32) -> Outcome {
    let got = got.as_fp8().ok_or("got high precision, want FP8")?;
    equal(&format!("{what}: shape"), *got.shape(), *values.shape())?;
    let want = fp8::quantize(&values.to_f32_vec()?, encoding, scale);
    same(what, &got.codes()?, &want.codes, values.shape().last_dim())
}

fn current_scaling_reads_the_f32_result(device: &Device) -> Outcome {
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let h = normal([300, 202], DType::BF16, 14, device)?;
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
    for activation in [Activation::Gelu, Activation::Swiglu] {
        let got = ops::activation(&h, activation, &slot)?;
        let wide = ops::activation(&ops::cast(&h, DType::F32)?, activation, &Slot::off(Encoding::E4M3))?;
        let values = wide.dequantize(DType::F32)?;
        let amax = fp8::quantize(&values.to_f32_vec()?, Encoding::E4M3, 1.0).amax;
        check(activation.name(), &got, &values, Encoding::E4M3, 448.0 / amax)?;
    }
    Ok(())
}

fn nan_stays_nan(device: &Device) -> Outcome {
    let finite = |v: &f32| v.is_finite();
    for activation in Activation::ALL {
        let h = Tensor::full(f32::NAN, [1, 4], DType::F32, device)?;
        let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(DType::F32)?;
        equal(activation.name(), y.to_f32_vec()?.iter().all(|v| v.is_nan()), true)?;
        // And nothing finite becomes one, apart from a square or a product that overflows.
        let values: Vec<f32> = specials().into_iter().filter(|v| finite(v) && v.abs() < 1e15).collect();
        let len = values.len();
        let h = Tensor::from_vec(values, [1, len], device)?;
        let y = ops::activation(&h, activation, &Slot::off(Encoding::E4M3))?.dequantize(DType::F32)?;
        equal(activation.name(), y.to_f32_vec()?.iter().all(finite), true)?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(64.0, device)?, exact(Encoding::E5M2));
    let slot = Slot::fixed(Encoding::E5M2, &cell, &rule);
    let (h, dy) = (normal([600, 130], DType::F32, 1, device)?, normal([600, 65], DType::F32, 2, device)?);
    same_bits("swiglu", || {
        let (dh, db) = ops::activation_backward_quantize_dbias(&dy, &h, Activation::Swiglu, &slot)?;
        let y = ops::activation(&h, Activation::Swiglu, &slot)?;
        Ok(vec![dh.dequantize(DType::F32)?, db, y.dequantize(DType::F32)?])
    })
}

fn names(_: &Device) -> Outcome {
    for activation in Activation::ALL {
        equal("round trip", activation.to_string().parse::<Activation>()?, activation)?;
    }
    refused("gelo".parse::<Activation>(), "activation: name = gelo: expected one of gelu, relu, silu, qgelu")
}

fn refuses(device: &Device) -> Outcome {
    let off = Slot::off(Encoding::E4M3);
    let x = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, device);
    refused(
        ops::activation(&x([2, 5])?, Activation::Swiglu, &off),
        "activation: shape [2, 5]: swiglu takes two halves: expected an even last dimension, got 5",
    )?;
    refused(
        ops::activation_backward(&x([2, 6])?, &x([2, 6])?, Activation::Geglu),
        "activation_backward: dy and the output: got [2, 6] and [2, 3]",
    )?;
    let ids = Tensor::zeros([2, 6], DType::I32, device)?;
    refused(ops::activation(&ids, Activation::Gelu, &off), "activation: h has dtype i32")
}
