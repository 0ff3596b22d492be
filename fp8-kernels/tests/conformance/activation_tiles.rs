//! Activations of bf16 in whole tiles, for which there are kernels of their own.

use super::case::{Outcome, cases};
use super::compare::{quiet, same};
use super::data::{ENCODINGS, exact, normal, special_rows, specials, tensor};
use super::reference::{Got, same_as_cpu, same_results};
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, REST, Result, Scale, ScaleRule, Slot, Tensor, TransposePolicy,
    UNSET, ops,
};
use ops::Activation;

cases![
    bits_are_the_cpus: Activations,
    codes_are_those_of_kernels_that_count: Activations,
    scales_of_the_result_are_the_cpus: Activations,
    special_values: Activations,
    tails_in_each_place: Activations,
    one_value_everywhere: Activations,
    needles: Activations,
    needles_beside_nan: Activations,
    long_strips: Activations,
];

/// Rows and columns of a tile.
const TILE: [usize; 2] = [128, 64];

/// The functions with such kernels, and for the comparison one without.
fn is_tried(activation: Activation) -> bool {
    use Activation::{Geglu, Gelu, Qgelu, Swiglu};
    matches!(activation, Gelu | Geglu | Swiglu | Qgelu)
}

/// Columns of h for each of the output.
fn halves(activation: Activation) -> usize {
    if activation.is_gated() { 2 } else { 1 }
}

/// h and dy for an output of these rows and columns.
fn inputs(
    activation: Activation,
    [rows, cols]: [usize; 2],
    seed: u64,
    device: &Device,
) -> Result<[Tensor; 2]> {
    let h = normal([rows, cols * halves(activation)], DType::BF16, seed, device)?;
    Ok([ops::scale(&h, 4.0)?, normal([rows, cols], DType::BF16, seed + 100, device)?])
}

/// Codes of both directions, with the transposes, the amaxes and the sums of the gradient.
fn quantized(
    [h, dy]: &[Tensor; 2],
    activation: Activation,
    slot: &Slot<'_>,
    device: &Device,
) -> Result<(Vec<Got>, Tensor)> {
    let amaxes = [Cell::new(REST, device)?, Cell::new(REST, device)?];
    let [forward, backward] = [&amaxes[0], &amaxes[1]].map(|amax| Slot { amax: Some(amax), ..*slot });
    let y = ops::activation(h, activation, &forward)?;
    let (dh, db) = ops::activation_backward_quantize_dbias(dy, h, activation, &backward)?;
    let mut got: Vec<Got> =
        [y, dh].iter().filter_map(|codes| codes.as_fp8().cloned()).map(Got::from).collect();
    got.push(Got::Numbers(vec![amaxes[0].read()?, amaxes[1].read()?]));
    Ok((got, db))
}

fn bits_are_the_cpus(device: &Device, activation: Activation) -> Outcome {
    let policies = [TransposePolicy::WithCast, TransposePolicy::Never];
    // The last two are not whole, in one direction each.
    for (i, shape) in [TILE, [256, 192], [384, 64], [128, 72], [136, 64]].into_iter().enumerate() {
        if i > 0 && !is_tried(activation) {
            return Ok(());
        }
        let device = device.clone().with_transpose_policy(policies[i % 2]);
        for encoding in ENCODINGS {
            let what = format!("{encoding:?} {shape:?}");
            same_as_cpu(&what, &device, |device| {
                let inputs = inputs(activation, shape, i as u64, device)?;
                let (cell, rule) = (Cell::new([30.0, 1e-3, 370.0][i % 3], device)?, exact(encoding));
                let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
                let (mut got, db) = quantized(&inputs, activation, &slot, device)?;
                let [h, dy] = &inputs;
                got.push(Got::Tensor(ops::activate(h, activation)?));
                got.push(Got::Tensor(ops::activation_backward(dy, h, activation)?));
                let off = Slot::off(encoding);
                let (dh, sums) = ops::activation_backward_quantize_dbias(dy, h, activation, &off)?;
                got.push(Got::Tensor(dh.dequantize(DType::BF16)?));
                // The sums are those of the unrounded gradient.
                let wide = ops::activation_backward(dy, &ops::cast(h, DType::F32)?, activation)?;
                let want = ops::column_sums(&wide)?.to_f32_vec()?;
                let are_equal = [db, sums].iter().all(|db| db.to_f32_vec().is_ok_and(|db| db == want));
                got.push(Got::Numbers(vec![f32::from(u8::from(are_equal))]));
                Ok(got)
            })?;
        }
    }
    Ok(())
}

/// Counting changes no other bit; it takes the kernels for any shape.
fn codes_are_those_of_kernels_that_count(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    for (encoding, shape) in [(Encoding::E4M3, [256, 64]), (Encoding::E5M2, [128, 128])] {
        let inputs = inputs(activation, shape, 3, device)?;
        let (cell, rule, counters) = (Cell::new(64.0, device)?, exact(encoding), Counters::new(device)?);
        let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
        let (got, db) = quantized(&inputs, activation, &slot, device)?;
        let counting = Slot { counters: Some(&counters), ..slot };
        let (want, want_db) = quantized(&inputs, activation, &counting, device)?;
        same_results(&format!("{encoding:?}"), got, want)?;
        same("db", &db.to_f32_vec()?, &want_db.to_f32_vec()?, shape[1])?;
    }
    Ok(())
}

/// Slots that are not set, and current scaling: the amax comes first, then codes.
fn scales_of_the_result_are_the_cpus(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let current = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    same_as_cpu("scales", device, |device| {
        let inputs = inputs(activation, [256, 64], 5, device)?;
        let rule = exact(Encoding::E4M3);
        let cell = Cell::new(UNSET, device)?;
        let unset = Scale::Cell { cell: &cell, first: &rule, keep: true };
        let mut got = Vec::new();
        // The second time the cell is set, and keeps its scale.
        for scale in [unset, unset, Scale::FromTensor(&current)] {
            got.extend(
                quantized(&inputs, activation, &Slot { scale, ..Slot::off(Encoding::E4M3) }, device)?.0,
            );
            got.push(Got::Numbers(vec![cell.read()?]));
        }
        // The gradient first.
        for encoding in ENCODINGS {
            cell.write(UNSET)?;
            let slot = Slot { scale: unset, ..Slot::off(encoding) };
            let [h, dy] = &inputs;
            let (dh, _) = ops::activation_backward_quantize_dbias(dy, h, activation, &slot)?;
            got.extend(dh.as_fp8().cloned().map(Got::from));
            got.push(Got::Numbers(vec![cell.read()?]));
        }
        Ok(got)
    })
}

/// Infinities, NaN, zeros of both signs, subnormals, and where functions end, in every column.
fn special_values(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let mut values = specials();
    values.extend([-200.0, -88.0, -87.5, -87.0, -10.0, -10.0625, -9.9375, 10.0, 10.0625, 87.5, 88.0, 200.0]);
    for encoding in ENCODINGS {
        same_as_cpu(&format!("{encoding:?}"), device, |device| {
            let [rows, cols] = TILE;
            // Other rows of the gradient meet other rows of the input.
            let draw = |cols: usize, seed: usize| {
                let drawn = special_rows(&values, cols, seed as u64).into_iter().cycle();
                let drawn = drawn.skip(5 * seed * cols).take(rows * cols).collect();
                tensor(drawn, [rows, cols], DType::BF16, device)
            };
            let (h, dy) = (draw(cols * halves(activation), 1)?, draw(cols, 2)?);
            let (cell, rule) = (Cell::new(2.0, device)?, exact(encoding));
            let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            let inputs = [h, dy];
            let (mut got, _) = quantized(&inputs, activation, &slot, device)?;
            let [h, dy] = &inputs;
            // Which NaN it is is left open.
            for x in [ops::activate(h, activation)?, ops::activation_backward(dy, h, activation)?] {
                got.push(Got::Numbers(quiet(&x.to_f32_vec()?)));
            }
            Ok(got)
        })?;
    }
    Ok(())
}

/// One of a thread's eight values is where the sigmoid is subnormal or nearly 1. Codes show it when the scale is large.
fn tails_in_each_place(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let end: f32 = if matches!(activation, Activation::Gelu | Activation::Geglu) { 10.0625 } else { 87.5 };
    for (encoding, far) in ENCODINGS.into_iter().flat_map(|encoding| [(encoding, -end), (encoding, end)]) {
        same_as_cpu(&format!("{encoding:?}, {far}"), device, |device| {
            let [rows, cols] = TILE;
            let width = cols * halves(activation);
            // Every second vector has one, in the place that its row says.
            let is_far = |row: usize, col: usize| col % 8 == row % 8 && (col / 8 + row / 8).is_multiple_of(2);
            let h = (0..rows * width).map(|i| match is_far(i / width, i % width) {
                true => far,
                false => (i % 7) as f32 - 3.0,
            });
            let h = tensor(h.collect(), [rows, width], DType::BF16, device)?;
            let inputs = [h, normal(TILE, DType::BF16, 1, device)?];
            let (cell, rule) = (Cell::new(1e36, device)?, exact(encoding));
            let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            let (mut got, _) = quantized(&inputs, activation, &slot, device)?;
            let [h, dy] = &inputs;
            got.push(Got::Tensor(ops::activate(h, activation)?));
            got.push(Got::Tensor(ops::activation_backward(dy, h, activation)?));
            Ok(got)
        })?;
    }
    Ok(())
}

/// A value in every place that a kernel has.
fn one_value_everywhere(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, -130.0, 130.0, 3.0] {
        same_as_cpu(&format!("{value}"), device, |device| {
            let h = Tensor::full(value, [TILE[0], TILE[1] * halves(activation)], DType::BF16, device)?;
            let dy = Tensor::full(-1.5, TILE, DType::BF16, device)?;
            let (cell, rule) = (Cell::new(2.0, device)?, exact(Encoding::E5M2));
            let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E5M2, &cell, &rule) };
            let inputs = [h, dy];
            let (mut got, _) = quantized(&inputs, activation, &slot, device)?;
            let e4m3 = Slot { encoding: Encoding::E4M3, ..slot };
            got.extend(quantized(&inputs, activation, &e4m3, device)?.0);
            let [h, dy] = &inputs;
            for x in [ops::activate(h, activation)?, ops::activation_backward(dy, h, activation)?] {
                got.push(Got::Numbers(quiet(&x.to_f32_vec()?)));
            }
            Ok(got)
        })?;
    }
    Ok(())
}

/// A large value in one place decides the amax, whichever thread has it.
fn needles(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let [rows, cols] = [256, 64];
    for encoding in ENCODINGS {
        let (cell, rule) = (Cell::new(2.0, device)?, exact(encoding));
        for place in (0..rows * cols).step_by(509).chain([0, rows * cols - 1]) {
            let mut h = vec![1.0; rows * cols * halves(activation)];
            let mut dy = vec![1.0; rows * cols];
            let (row, col) = (place / cols, place % cols);
            h[row * cols * halves(activation) + col] = 1e4;
            dy[place] = -1e4;
            let large = tensor(h.clone(), [rows, cols * halves(activation)], DType::BF16, device)?;
            // The gradient of the gate, if there is one, is the larger half for every second needle.
            let gate = if place / 8 % 2 == 0 { 1.0 } else { 0.5 };
            let width = cols * halves(activation);
            let gates = (0..rows * width).map(|i| if i % width < cols { 1.0 } else { gate }).collect();
            let gates = tensor(gates, [rows, width], DType::BF16, device)?;
            let dy = tensor(dy, [rows, cols], DType::BF16, device)?;
            let amaxes = [Cell::new(REST, device)?, Cell::new(REST, device)?];
            let slot = |amax| Slot { amax: Some(amax), ..Slot::fixed(encoding, &cell, &rule) };
            ops::activation(&large, activation, &slot(&amaxes[0]))?;
            ops::activation_backward_quantize_dbias(&dy, &gates, activation, &slot(&amaxes[1]))?;
            let wide = ops::cast(&gates, DType::F32)?;
            let largest = |x: &Tensor| -> Result<f32> {
                Ok(x.to_f32_vec()?.into_iter().fold(0.0f32, |largest, v| largest.max(v.abs())))
            };
            let y = ops::activate(&ops::cast(&large, DType::F32)?, activation)?;
            let dh = ops::activation_backward(&dy, &wide, activation)?;
            let want = [largest(&y)?, largest(&dh)?];
            same(&format!("{encoding:?}, {place}"), &[amaxes[0].read()?, amaxes[1].read()?], &want, 2)?;
        }
    }
    Ok(())
}

/// NaN among a thread's eight values keeps none of the others from the amax.
fn needles_beside_nan(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) {
        return Ok(());
    }
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let [rows, cols] = TILE;
    // The gradient of a gate is the larger half where its other factor is 300.
    let needles = (0..16).map(|i| (i / 2, [300.0, 1.0][i % 2]));
    for ((place, factor), encoding) in needles.flat_map(|needle| ENCODINGS.map(|encoding| (needle, encoding)))
    {
        same_as_cpu(&format!("{encoding:?}, {place}, {factor}"), device, |device| {
            let of = |needle: f32, cols: usize| {
                let mut values = vec![1.0; rows * cols];
                values[8 + place] = needle;
                values[8 + (place + 3) % 8] = f32::NAN;
                tensor(values, [rows, cols], DType::BF16, device)
            };
            let inputs = [of(factor, cols * halves(activation))?, of(-300.0, cols)?];
            let (cell, rule) = (Cell::new(2.0, device)?, exact(encoding));
            let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            Ok(quantized(&inputs, activation, &slot, device)?.0)
        })?;
    }
    Ok(())
}

/// So tall that the blocks of a simulated device take two tiles, the last of them one.
fn long_strips(device: &Device, activation: Activation) -> Outcome {
    if !is_tried(activation) || activation == Activation::Qgelu {
        return Ok(());
    }
    let shape = [97 * TILE[0], TILE[1]];
    let inputs_on = |device: &Device| inputs(activation, shape, 9, device);
    let [h, dy] = inputs_on(device)?;
    let wide = ops::activation_backward(&dy, &ops::cast(&h, DType::F32)?, activation)?;
    let sums = ops::column_sums(&wide)?.to_f32_vec()?;
    let cols = h.shape().last_dim();
    // The formats share what is tried here.
    for (encoding, policy) in ENCODINGS.into_iter().zip([TransposePolicy::WithCast, TransposePolicy::Never]) {
        let what = format!("{encoding:?}, {policy:?}");
        let run = |device: &Device| {
            let (cell, rule) = (Cell::new(64.0, device)?, exact(encoding));
            let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            quantized(&inputs_on(device)?, activation, &slot, device)
        };
        let (device, cpu) = (device.clone().with_transpose_policy(policy), Device::cpu());
        let ((got, db), (want, _)) = (run(&device)?, run(&cpu.with_transpose_policy(policy))?);
        same_results(&what, got, want)?;
        same(&what, &db.to_f32_vec()?, &sums, cols)?;
    }
    // In high precision, with the sums and without.
    let off = Slot::off(Encoding::E4M3);
    let (_, db) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &off)?;
    same("db", &db.to_f32_vec()?, &sums, cols)?;
    same_as_cpu("high precision", device, |device| {
        let [h, dy] = inputs_on(device)?;
        let dh = ops::activation_backward(&dy, &h, activation)?;
        Ok(vec![Got::Tensor(ops::activate(&h, activation)?), Got::Tensor(dh)])
    })
}
