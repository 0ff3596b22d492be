use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{self, AROUND_2_16, FLOATS, SHAPES, exact, f64s, needle_places, normal, specials, tensor};
use super::reference::{Got, same_as_cpu};
use super::threads::same_bits;
use crate::oracle::fp8;
use fp8_kernels::{
    Cell, CounterValues, Counters, CustomPolicy, DType, Device, Encoding, Fp8Tensor, Operand, REST, Result,
    Scale, ScalePolicy, ScaleRule, Slot, Tensor, TransposePolicy, UNSET, bf16, f16, ops,
};
use std::sync::Arc;

cases![
    codes_amaxes_and_counters: DtypesAndFormats,
    special_values: DtypesAndFormats,
    every_half_precision_value: Formats,
    one_value_everywhere: DtypesAndFormats,
    first_scales_by_every_rule,
    needles: DtypesAndFormats,
    needles_around_2_16: DtypesAndFormats,
    needles_in_tiles: DtypesAndFormats,
    needles_in_rounds: Dtypes,
    amax_is_merged,
    nothing_recorded_without_elements,
    nan_alone_has_amax_zero,
    off_hands_through_and_records,
    a_provisional_scale_is_a_magnitude,
    first_step_takes_the_tensors_own_scale,
    a_meaningless_first_amax_leaves_the_slot_unset,
    evaluation_of_an_unset_slot_stores_nothing,
    current_scaling,
    an_amax_given,
    transpose_policies_give_the_same_bits: Dtypes,
    dequantizes: Formats,
    dequantizes_in_rounds,
    dequantizing_to_what_is_no_float_is_refused,
    dbias_sums_the_unquantized: Dtypes,
    same_for_any_threads,
    refuses,
];

pub(super) fn fp8(operand: Operand) -> Result<Fp8Tensor, String> {
    operand.as_fp8().cloned().ok_or_else(|| "got high precision, want FP8".to_owned())
}

fn codes_amaxes_and_counters(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    // Behind those: vectors alone, the last in each of the loads that are under way together.
    let whole = [1028, 2052, 3076, 2056, 4104, 6152, 8192].map(|len| [1, len]);
    for (seed, shape) in SHAPES.into_iter().chain(whole).enumerate() {
        let x = normal(shape, dtype, seed as u64, device)?;
        check(&x, encoding, [1.0, 0.37, 300.0, 2e-4][seed % 4])?;
    }
    Ok(())
}

fn special_values(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let values = specials();
    let x = tensor(values.clone(), [2, values.len() / 2], dtype, device)?;
    for scale in [1.0, 1.5, 0.125, 448.0, f32::MIN_POSITIVE, f32::MAX] {
        check(&x, encoding, scale)?;
    }
    Ok(())
}

fn every_half_precision_value(device: &Device, encoding: Encoding) -> Outcome {
    let values = || 0..=u16::MAX;
    let inputs = [
        Tensor::from_vec(values().map(bf16::from_bits).collect(), [256, 256], device)?,
        Tensor::from_vec(values().map(f16::from_bits).collect(), [256, 256], device)?,
    ];
    for x in &inputs {
        for scale in [1.0, 0.7, 57.3] {
            check(x, encoding, scale)?;
        }
    }
    Ok(())
}

/// A value at an edge of what is counted, in every place that a kernel has.
fn one_value_everywhere(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule, max) = (Cell::new(1.0, device)?, exact(encoding), encoding.max());
    for value in [max, -max, 1.125 * max, f32::INFINITY, 0.0, -0.0, 5e-7, f32::NAN] {
        let x = Tensor::full(value, [1, 8192 + 13], dtype, device)?;
        check(&x, encoding, 1.0)?;
        for [rows, cols] in [[130, 72], [130, 66]] {
            let x = Tensor::full(value, [rows, cols], dtype, device)?;
            let want = fp8::quantize(&x.to_f32_vec()?, encoding, 1.0);
            for together in [false, true] {
                let (amax, counters) = (Cell::new(REST, device)?, Counters::new(device)?);
                let (amax_cell, counts) = (Some(&amax), Some(&counters));
                let slot = Slot {
                    amax: amax_cell,
                    counters: counts,
                    columnwise: true,
                    ..Slot::fixed(encoding, &cell, &rule)
                };
                let codes = if together {
                    ops::quantize_many(&[(&x, slot)])?.pop().ok_or("nothing came back")?
                } else {
                    ops::quantize(&x, &slot)?
                };
                let what = format!("{value} in [{rows}, {cols}], together: {together}");
                same(&what, &fp8(codes)?.codes()?, &want.codes, cols)?;
                same(&what, &[amax.read()?], &[want.amax], 1)?;
                let CounterValues { saturated, underflowed, elements, nan } = counters.read()?;
                let wanted = [want.saturated, want.underflowed, (rows * cols) as u64, want.nan];
                equal(&what, [saturated, underflowed, elements, nan], wanted)?;
            }
        }
    }
    Ok(())
}

/// The scale that a rule makes of an amax, to the ends of its range.
fn first_scales_by_every_rule(device: &Device) -> Outcome {
    let largest = [f32::from_bits(1), 1e-41, f32::MIN_POSITIVE, 1e-30, 1.0, 3.3, 448.0, 1e30, 2e38, f32::MAX];
    let others = [0.0, f32::INFINITY, f32::NAN];
    for rule in data::rules() {
        for value in largest.into_iter().chain(others) {
            same_as_cpu(&format!("{rule:?} for {value}"), device, |device| {
                let x = Tensor::full(value, [3], DType::F32, device)?;
                let cell = Cell::new(UNSET, device)?;
                let mut results = Vec::new();
                for scale in [Scale::FromTensor(&rule), Scale::Cell { cell: &cell, first: &rule, keep: true }]
                {
                    let codes = ops::quantize(&x, &Slot { scale, ..Slot::off(Encoding::E4M3) })?;
                    results.extend(codes.as_fp8().cloned().map(Got::from));
                }
                results.push(Got::Numbers(vec![cell.read()?]));
                Ok(results)
            })?;
        }
    }
    Ok(())
}

/// Everything about one tensor, against the oracle.
fn check(x: &Tensor, encoding: Encoding, scale: f32) -> Outcome {
    let device = x.device();
    let (cell, amax, counters, rule) =
        (Cell::new(scale, device)?, Cell::new(REST, device)?, Counters::new(device)?, exact(encoding));
    let slot = Slot { amax: Some(&amax), counters: Some(&counters), ..Slot::fixed(encoding, &cell, &rule) };
    let got = fp8(ops::quantize(x, &slot)?)?;
    let want = fp8::quantize(&x.to_f32_vec()?, encoding, scale);
    let what = format!("{} {} {encoding} scale {scale}", x.dtype(), x.shape());
    same(&what, &got.codes()?, &want.codes, x.shape().last_dim())?;
    equal(&format!("{what}: shape"), *got.shape(), *x.shape())?;
    same(&format!("{what}: scale_inv"), &[got.scale_inv().item()?], &[1.0 / scale], 1)?;
    let amax_wanted = if x.numel() == 0 { REST } else { want.amax };
    same(&format!("{what}: amax"), &[amax.read()?], &[amax_wanted], 1)?;
    let CounterValues { saturated, underflowed, elements, nan } = counters.read()?;
    let counts = [saturated, underflowed, elements, nan];
    let counts_wanted = [want.saturated, want.underflowed, x.numel() as u64, want.nan];
    equal(&format!("{what}: saturated, underflowed, elements, NaN"), counts, counts_wanted)
}

fn needles(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let (cell, rule) = (Cell::new(2.0, device)?, exact(encoding));
    for len in [1, 7, 8, 9, 255, 257, 8191, 8193, 2 * 8192 + 5] {
        let noise = data::Random::new(len as u64).normals(len);
        for place in needle_places(len) {
            let mut values = noise.clone();
            values[place] = -1e4;
            let x = tensor(values, [1, len], dtype, device)?;
            let amax = Cell::new(REST, device)?;
            let slot = Slot { amax: Some(&amax), ..Slot::fixed(encoding, &cell, &rule) };
            let got = fp8(ops::quantize(&x, &slot)?)?.codes()?;
            let want = fp8::quantize(&x.to_f32_vec()?, encoding, 2.0);
            let what = format!("a needle at {place} of {len}");
            same(&what, &got, &want.codes, len)?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
        }
    }
    Ok(())
}

/// In the blocks behind those of [`needles`], and the ends; each place for some of the types.
fn needles_around_2_16(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let (cell, rule, turn) =
        (Cell::new(2.0, device)?, exact(encoding), 2 * dtype as usize + encoding as usize);
    for len in AROUND_2_16 {
        let mut values = vec![-0.5; len];
        for place in
            needle_places(len).into_iter().filter(|&place| place > 2 * 8192).skip(turn % 3).step_by(3)
        {
            values[place] = 1e4;
            let x = tensor(values.clone(), [1, len], dtype, device)?;
            values[place] = -0.5;
            let amax = Cell::new(REST, device)?;
            let slot = Slot { amax: Some(&amax), ..Slot::fixed(encoding, &cell, &rule) };
            let codes = fp8(ops::quantize(&x, &slot)?)?.codes()?;
            let want = fp8::quantize(&x.to_f32_vec()?, encoding, 2.0);
            let what = format!("a needle at {place} of {len}");
            same(&what, &codes, &want.codes, len)?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
        }
    }
    Ok(())
}

/// More elements than a simulated device's grid takes at once: the largest in each round, and in each load of it.
fn needles_in_rounds(device: &Device, dtype: DType) -> Outcome {
    let (cell, rule, len) = (Cell::new(2.0, device)?, exact(Encoding::E4M3), (3 << 17) + 5);
    for place in [0, 1025, 2050, 3075, 140_000, 200_077, 280_003, 393_220] {
        let mut values = vec![0.5; len];
        values[place] = -40.0;
        let x = tensor(values, [1, len], dtype, device)?;
        let amax = Cell::new(REST, device)?;
        let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
        let codes = fp8(ops::quantize(&x, &slot)?)?.codes()?;
        let what = format!("a needle at {place}");
        same(&what, &[amax.read()?], &[40.0], 1)?;
        same(&what, &codes, &fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, 2.0).codes, len)?;
    }
    Ok(())
}

fn needles_in_tiles(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule) = (Cell::new(2.0, device)?, exact(encoding));
    for [rows, cols] in [[130, 66], [128, 64], [144, 72]] {
        let len = rows * cols;
        let noise = data::Random::new(len as u64).normals(len);
        // Coprime to the extents: all rows and columns of a thread's part, and all threads of a warp, have their turn.
        for place in (0..len).step_by(271).chain([cols - 1, len - cols, len - 1]) {
            let mut values = noise.clone();
            values[place] = 1e4;
            let x = tensor(values, [rows, cols], dtype, device)?;
            let amax = Cell::new(REST, device)?;
            let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            let (got, db) = ops::quantize_dbias(&x, &slot)?;
            let (got, values) = (fp8(got)?, x.to_f32_vec()?);
            let want = fp8::quantize(&values, encoding, 2.0);
            let what = format!("a needle at {place} of [{rows}, {cols}]");
            same(&what, &got.codes()?, &want.codes, cols)?;
            let turned = got.columnwise().ok_or("no transpose was made with the cast")?;
            same(&what, &turned.to_vec::<u8>()?, &fp8::transpose(&want.codes, rows, cols), rows)?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
            let column =
                |col: usize| values.iter().skip(col).step_by(cols).map(|&v| f64::from(v)).sum::<f64>();
            let sums: Vec<f64> = (0..cols).map(column).collect();
            close(&format!("{what}: db"), &db.to_f32_vec()?, &sums, cols, [1.3e-6, 1e-2])?;
        }
    }
    Ok(())
}

fn amax_is_merged(device: &Device) -> Outcome {
    let (cell, amax, rule) = (Cell::new(1.0, device)?, Cell::new(REST, device)?, exact(Encoding::E4M3));
    let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
    for (value, merged) in
        [(-2.0, 2.0), (1.0, 2.0), (3.0, 3.0), (f32::NEG_INFINITY, f32::INFINITY), (4.0, f32::INFINITY)]
    {
        ops::quantize(&Tensor::full(value, [2, 3], DType::F32, device)?, &slot)?;
        equal(&format!("amax after {value}"), amax.read()?, merged)?;
    }
    equal("scale", cell.read()?, 1.0)
}

fn nothing_recorded_without_elements(device: &Device) -> Outcome {
    let (cell, amax, rule) = (Cell::new(4.0, device)?, Cell::new(REST, device)?, exact(Encoding::E4M3));
    let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
    for shape in [[0, 16], [16, 0]] {
        let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let q = fp8(ops::quantize(&Tensor::zeros(shape, DType::BF16, &device)?, &slot)?)?;
        equal("amax", amax.read()?, REST)?;
        equal("scale_inv", q.scale_inv().item()?, 0.25)?;
    }
    Ok(())
}

fn nan_alone_has_amax_zero(device: &Device) -> Outcome {
    let (cell, amax, rule) = (Cell::new(4.0, device)?, Cell::new(REST, device)?, exact(Encoding::E5M2));
    let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E5M2, &cell, &rule) };
    let q = fp8(ops::quantize(&Tensor::full(f32::NAN, [3], DType::F32, device)?, &slot)?)?;
    same("codes", &q.codes()?, &[0x7F; 3], 3)?;
    same("amax", &[amax.read()?], &[0.0], 1)
}

fn off_hands_through_and_records(device: &Device) -> Outcome {
    let x = normal([3, 5], DType::BF16, 1, device)?;
    let amax = Cell::new(REST, device)?;
    let y = ops::quantize(&x, &Slot { amax: Some(&amax), ..Slot::off(Encoding::E4M3) })?;
    let y = y.as_high().ok_or("got FP8, want high precision")?;
    same("values", &y.to_vec::<bf16>()?, &x.to_vec::<bf16>()?, 5)?;
    equal("amax", amax.read()?, fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, 1.0).amax)
}

fn a_provisional_scale_is_a_magnitude(device: &Device) -> Outcome {
    let rule = exact(Encoding::E4M3);
    let x = normal([4, 4], DType::F32, 2, device)?;
    let run = |scale| ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &Cell::new(scale, device)?, &rule));
    let (positive, negative) = (fp8(run(4.0)?)?, fp8(run(-4.0)?)?);
    same("codes", &negative.codes()?, &positive.codes()?, 4)?;
    equal("scale_inv", negative.scale_inv().item()?, 0.25)
}

fn first_step_takes_the_tensors_own_scale(device: &Device) -> Outcome {
    for (margin, scale) in [(0, 128.0), (2, 32.0)] {
        let rule = ScaleRule::Delayed { fp8_max: 448.0, margin, policy: ScalePolicy::Exact };
        let (cell, amax) = (Cell::new(UNSET, device)?, Cell::new(REST, device)?);
        let place = Scale::Cell { cell: &cell, first: &rule, keep: true };
        let slot = Slot { scale: place, amax: Some(&amax), ..Slot::off(Encoding::E4M3) };
        let x = Tensor::from_vec(vec![1.0f32, -3.5, f32::NAN, 0.5], [2, 2], device)?;
        let q = fp8(ops::quantize(&x, &slot)?)?;
        equal("the scale, provisional", cell.read()?, -scale)?;
        equal("scale_inv", q.scale_inv().item()?, 1.0 / scale)?;
        equal("amax", amax.read()?, 3.5)?;
        same("codes", &q.codes()?, &fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, scale).codes, 2)?;
        // A second tensor of the same scope takes the scale of the first.
        let q = fp8(ops::quantize(&Tensor::full(7.0, [1], DType::F32, device)?, &slot)?)?;
        equal("scale_inv of the second", q.scale_inv().item()?, 1.0 / scale)?;
        equal("the scale after the second", cell.read()?, -scale)?;
        equal("amax of both", amax.read()?, 7.0)?;
    }
    Ok(())
}

fn a_meaningless_first_amax_leaves_the_slot_unset(device: &Device) -> Outcome {
    let rule = exact(Encoding::E5M2);
    for value in [0.0, f32::INFINITY, f32::NAN] {
        let cell = Cell::new(UNSET, device)?;
        let scale = Scale::Cell { cell: &cell, first: &rule, keep: true };
        // What is not written anew is not 1 by chance.
        let three = Tensor::full(3.0, [2, 2], DType::F32, device)?;
        let own = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E5M2) };
        drop(ops::quantize(&three, &own)?);
        let x = Tensor::full(value, [2, 2], DType::F32, device)?;
        let q = fp8(ops::quantize(&x, &Slot { scale, ..Slot::off(Encoding::E5M2) })?)?;
        equal(&format!("{value}: scale_inv"), q.scale_inv().item()?, 1.0)?;
        equal(&format!("{value}: the cell"), cell.read()?, UNSET)?;
    }
    Ok(())
}

fn evaluation_of_an_unset_slot_stores_nothing(device: &Device) -> Outcome {
    let (rule, cell) = (exact(Encoding::E4M3), Cell::new(UNSET, device)?);
    let x = Tensor::full(3.5, [4], DType::BF16, device)?;
    let q = fp8(ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &cell, &rule))?)?;
    equal("scale_inv", q.scale_inv().item()?, 1.0 / 128.0)?;
    equal("the cell", cell.read()?, UNSET)
}

fn current_scaling(device: &Device) -> Outcome {
    let x = tensor(vec![0.3, -1.75, 0.0, f32::NAN], [4], DType::F32, device)?;
    for (epsilon, power_2_scales, scale) in
        [(0.0, false, 256.0), (3.0, false, 448.0 / 3.0), (3.0, true, 128.0)]
    {
        let rule = ScaleRule::Current { fp8_max: 448.0, epsilon, power_2_scales };
        let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
        let q = fp8(ops::quantize(&x, &slot)?)?;
        same("scale_inv", &[q.scale_inv().item()?], &[1.0 / scale], 1)?;
        same("codes", &q.codes()?, &fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, scale).codes, 4)?;
    }
    Ok(())
}

fn an_amax_given(device: &Device) -> Outcome {
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromAmax { amax: 7.0, rule: &rule }, ..Slot::off(Encoding::E4M3) };
    let q = fp8(ops::quantize(&Tensor::full(1.0, [3], DType::F16, device)?, &slot)?)?;
    equal("scale_inv", q.scale_inv().item()?, 1.0 / 64.0)?;
    equal("value", q.dequantize(DType::F32)?.to_vec::<f32>()?, vec![1.0; 3])
}

fn transpose_policies_give_the_same_bits(device: &Device, dtype: DType) -> Outcome {
    use TransposePolicy::{Never, OnDemand, WithCast};
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E4M3));
    let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        // The transposes after the cast are the same for all types.
        let is_large = shape[0] * shape[1] > data::PIECE;
        let policies =
            if is_large && dtype != DType::BF16 { &[WithCast][..] } else { &[WithCast, OnDemand, Never] };
        for &policy in policies {
            let x = normal(shape, dtype, seed as u64, &device.clone().with_transpose_policy(policy))?;
            let q = fp8(ops::quantize(&x, &slot)?)?;
            let [rows, cols] = shape;
            let want = fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, 3.0).codes;
            let what = format!("{policy:?} {shape:?}");
            equal(&format!("{what}: made with the cast"), q.columnwise().is_some(), policy == WithCast)?;
            // What backward keeps of a tensor does not depend on its size.
            let kept = [("all", q.clone()), ("backward's", q.for_backward())];
            for (kept, q) in kept.into_iter().take(if is_large { 1 } else { 2 }) {
                same(&format!("{what}, {kept}"), &q.codes()?, &want, cols)?;
                let turned = q.transposed()?;
                equal(&format!("{what}: shape"), turned.matrix(), [cols, rows])?;
                same(
                    &format!("{what}, {kept}, transposed"),
                    &turned.codes()?,
                    &fp8::transpose(&want, rows, cols),
                    rows,
                )?;
            }
        }
    }
    Ok(())
}

fn dequantizes(device: &Device, encoding: Encoding) -> Outcome {
    let codes: Vec<u8> = (0..=255).chain(0..5).collect();
    for factor in [1.0f32, 0.3, 1e-3] {
        let tensor = Tensor::from_vec(codes.clone(), [9, 29], device)?;
        let q = Fp8Tensor::from_codes(tensor, [9, 29], encoding, Tensor::scalar(factor, device)?)?;
        let values: Vec<f32> = codes.iter().map(|&code| encoding.to_f32(code) * factor).collect();
        for dtype in FLOATS {
            let want = data::tensor(values.clone(), [9, 29], dtype, device)?.to_f32_vec()?;
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            let got = q.dequantize(dtype)?.to_f32_vec()?;
            close(&format!("{encoding} · {factor} in {dtype}"), &got, &want, 29, [0.0, 0.0])?;
        }
    }
    Ok(())
}

/// Room for bytes would hold a quarter of what f32 takes.
fn dequantizing_to_what_is_no_float_is_refused(device: &Device) -> Outcome {
    let codes = Tensor::from_vec(vec![0x38u8; 56], [7, 8], device)?;
    let x = Fp8Tensor::from_codes(codes, [7, 8], Encoding::E4M3, Tensor::scalar(1.0, device)?)?;
    for (dtype, name) in [(DType::I32, "i32"), (DType::U8, "u8")] {
        let wording = format!("dequantize: the output has dtype {name}: expected f32, bf16 or f16");
        refused(x.dequantize(dtype), &wording)?;
        refused(x.clone().with_columnwise()?.for_backward().dequantize(dtype), &wording)?;
    }
    equal("the device goes on", x.dequantize(DType::F32)?.to_vec::<f32>()?, vec![1.0; 56])
}

fn dbias_sums_the_unquantized(device: &Device, dtype: DType) -> Outcome {
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E5M2));
    // The last: so many whole tiles that a simulated device's blocks take two, but one of them.
    for (seed, shape) in SHAPES.into_iter().chain([[97 * 128, 1]]).enumerate() {
        let dy = normal(shape, dtype, seed as u64, device)?;
        let (q, db) = ops::quantize_dbias(&dy, &Slot::fixed(Encoding::E5M2, &cell, &rule))?;
        let values = f64s(&dy)?;
        let column = |col: usize| values.iter().skip(col).step_by(shape[1]).sum::<f64>();
        let want: Vec<f64> = (0..shape[1]).map(column).collect();
        close(&format!("db of {shape:?}"), &db.to_f32_vec()?, &want, shape[1], [1.3e-6, 1e-3])?;
        let codes = fp8::quantize(&dy.to_f32_vec()?, Encoding::E5M2, 3.0).codes;
        same(&format!("codes of {shape:?}"), &fp8(q)?.codes()?, &codes, shape[1])?;
    }
    Ok(())
}

/// More elements than a simulated device's grid takes at once.
fn dequantizes_in_rounds(device: &Device) -> Outcome {
    for len in [(1 << 17) + 43, 1 << 17, (1 << 18) + 8] {
        let codes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
        let tensor = Tensor::from_vec(codes.clone(), [1, len], device)?;
        let q = Fp8Tensor::from_codes(tensor, [1, len], Encoding::E4M3, Tensor::scalar(0.5, device)?)?;
        let want: Vec<f32> = codes.iter().map(|&code| Encoding::E4M3.to_f32(code) * 0.5).collect();
        let quiet = |v: &f32| if v.is_nan() { f32::NAN } else { *v };
        let got: Vec<f32> = q.dequantize(DType::F32)?.to_f32_vec()?.iter().map(quiet).collect();
        same(&format!("{len} codes"), &got, &want.iter().map(quiet).collect::<Vec<_>>(), len)?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E5M2));
    for shape in [[1200, 65], [70_001, 1], [3, 40_000]] {
        let dy = normal(shape, DType::F32, 3, device)?;
        same_bits(&format!("quantize_dbias {shape:?}"), || {
            let (q, db) = ops::quantize_dbias(&dy, &Slot::fixed(Encoding::E5M2, &cell, &rule))?;
            Ok(vec![db, q.dequantize(DType::F32)?])
        })?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(1.0, device)?, exact(Encoding::E4M3));
    let ids = Tensor::from_vec(vec![1i32, 2], [2], device)?;
    refused(
        ops::quantize(&ids, &Slot::fixed(Encoding::E4M3, &cell, &rule)),
        "quantize: x has dtype i32: expected f32, bf16 or f16",
    )?;
    let function = Arc::new(|_: f32, _: f32, _: f32| 0.0);
    let policy = ScalePolicy::Custom(CustomPolicy { name: "nil".into(), function });
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy };
    let x = Tensor::full(2.0, [2], DType::F32, device)?;
    let unset = Cell::new(UNSET, device)?;
    refused(
        ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &unset, &rule)),
        "scale policy `nil` returned 0 for amax 2",
    )
}
