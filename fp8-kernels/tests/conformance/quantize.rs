use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{self, ENCODINGS, FLOATS, PIECE, SHAPES, exact, f64s, normal, specials, tensor};
use super::threads::same_bits;
use crate::oracle::fp8;
use fp8_kernels::{
    Cell, CounterValues, Counters, CustomPolicy, DType, Device, Encoding, Fp8Tensor, Operand, REST, Result,
    Scale, ScalePolicy, ScaleRule, Slot, Tensor, TransposePolicy, UNSET, bf16, f16, ops,
};
use std::sync::Arc;

cases![
    codes_amaxes_and_counters,
    special_values,
    every_half_precision_value,
    needles,
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
    transpose_policies_give_the_same_bits,
    dequantizes,
    dbias_sums_the_unquantized,
    same_for_any_threads,
    refuses,
];

fn fp8(operand: Operand) -> Result<Fp8Tensor, String> {
    operand.as_fp8().cloned().ok_or_else(|| "got high precision, want FP8".to_owned())
}

fn codes_amaxes_and_counters(device: &Device) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for (dtype, encoding) in FLOATS.into_iter().flat_map(|d| ENCODINGS.map(|e| (d, e))) {
            let x = normal(shape, dtype, seed as u64, device)?;
            check(&x, encoding, [1.0, 0.37, 300.0, 2e-4][seed % 4])?;
        }
    }
    Ok(())
}

fn special_values(device: &Device) -> Outcome {
    let values = specials();
    for (dtype, encoding) in FLOATS.into_iter().flat_map(|d| ENCODINGS.map(|e| (d, e))) {
        let x = tensor(values.clone(), [2, values.len() / 2], dtype, device)?;
        for scale in [1.0, 1.5, 0.125, 448.0, f32::MIN_POSITIVE, f32::MAX] {
            check(&x, encoding, scale)?;
        }
    }
    Ok(())
}

fn every_half_precision_value(device: &Device) -> Outcome {
    let values = || 0..=u16::MAX;
    let inputs = [
        Tensor::from_vec(values().map(bf16::from_bits).collect(), [256, 256], device)?,
        Tensor::from_vec(values().map(f16::from_bits).collect(), [256, 256], device)?,
    ];
    for (x, encoding) in inputs.iter().flat_map(|x| ENCODINGS.map(|e| (x, e))) {
        for scale in [1.0, 0.7, 57.3] {
            check(x, encoding, scale)?;
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
    let CounterValues { saturated, underflowed, elements } = counters.read()?;
    let counts = [saturated, underflowed, elements];
    let counts_wanted = [want.saturated, want.underflowed, x.numel() as u64];
    equal(&format!("{what}: saturated, underflowed, elements"), counts, counts_wanted)
}

fn needles(device: &Device) -> Outcome {
    for len in [1, 15, 16, 17, 31, 33, PIECE - 1, PIECE, PIECE + 1, 4 * PIECE + 7] {
        let places = [0, 1, 15, 16, PIECE - 1, PIECE, len / 2, len - 1];
        for place in places.into_iter().filter(|&place| place < len) {
            let mut values = data::Random::new(len as u64).normals(len);
            values[place] = -1e4;
            check(&tensor(values, [1, len], DType::F32, device)?, Encoding::E5M2, 2.0)?;
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

fn transpose_policies_give_the_same_bits(device: &Device) -> Outcome {
    use TransposePolicy::{Never, OnDemand, WithCast};
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E4M3));
    let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for policy in [WithCast, OnDemand, Never] {
            let x = normal(shape, DType::BF16, seed as u64, &device.clone().with_transpose_policy(policy))?;
            let q = fp8(ops::quantize(&x, &slot)?)?;
            let [rows, cols] = shape;
            let want = fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, 3.0).codes;
            let what = format!("{policy:?} {shape:?}");
            equal(&format!("{what}: made with the cast"), q.columnwise().is_some(), policy == WithCast)?;
            for (kept, q) in [("all", q.clone()), ("backward's", q.for_backward())] {
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

fn dequantizes(device: &Device) -> Outcome {
    for encoding in ENCODINGS {
        let codes: Vec<u8> = (0..=255).collect();
        for factor in [1.0f32, 0.3, 1e-3] {
            let tensor = Tensor::from_vec(codes.clone(), [16, 16], device)?;
            let q = Fp8Tensor::from_codes(tensor, [16, 16], encoding, Tensor::scalar(factor, device)?)?;
            let values: Vec<f32> = codes.iter().map(|&code| encoding.to_f32(code) * factor).collect();
            for dtype in FLOATS {
                let want = data::tensor(values.clone(), [16, 16], dtype, device)?.to_f32_vec()?;
                let want: Vec<f64> = want.into_iter().map(f64::from).collect();
                let got = q.dequantize(dtype)?.to_f32_vec()?;
                close(&format!("{encoding} · {factor} in {dtype}"), &got, &want, 16, [0.0, 0.0])?;
            }
        }
    }
    Ok(())
}

fn dbias_sums_the_unquantized(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E5M2));
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let dy = normal(shape, FLOATS[seed % 3], seed as u64, device)?;
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
