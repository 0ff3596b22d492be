//! Counts of saturated, underflowed and NaN values, tested at the borders of each count for every operation that counts.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::equal;
use super::data::{exact, normal, tensor};
use crate::oracle::fp8;
use fp8_kernels::ops::{Activation, AdamWStep, AdamWTensor, Norm, NormOptions};
use fp8_kernels::{
    Cell, CounterValues, Counters, DType, Device, Encoding, Operand, Result, Scale, ScaleRule, Slot, Tensor,
    TransposePolicy, ops,
};

cases![
    a_value_is_saturated_where_it_rounds_beyond_the_largest: Formats,
    borders_in_quantize: DtypesAndFormats,
    borders_in_activations: DtypesAndFormats,
    borders_in_norms: DtypesAndFormats,
    borders_in_adamw: DtypesAndFormats,
    nan_of_whole_rows_is_counted_once_an_element: Dtypes,
    tensors_of_nan_alone: DtypesAndFormats,
    an_infinity_that_a_scale_makes_nan_is_not_counted_as_one: DtypesAndFormats,
];

/// Vectors and tiles, whole and cut.
const SHAPES: [[usize; 2]; 7] = [[1, 1], [5, 13], [3, 32], [128, 64], [130, 72], [129, 66], [2, 8200]];

/// Values on both sides of every border, each with both signs. `ulp` is the f32's.
fn borders() -> Vec<f32> {
    let positive = [
        448.0,
        448.0f32.next_up(),
        464.0f32.next_down(),
        464.0,
        464.0f32.next_up(),
        57344.0,
        61440.0f32.next_down(),
        61440.0,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        0.0,
        1.0,
        f32::powi(2.0, -10),
        f32::powi(2.0, -10).next_up(),
        f32::powi(2.0, -17),
        f32::powi(2.0, -17).next_up(),
        f32::from_bits(1),
    ];
    positive.into_iter().flat_map(|v| [v, -v]).collect()
}

/// The borders and a one, over and over, until the shape is full: an odd number, so that each comes to every place of a thread's.
fn filled([rows, cols]: [usize; 2], dtype: DType, device: &Device) -> Result<Tensor> {
    tensor(
        borders().into_iter().chain([1.0]).cycle().take(rows * cols).collect(),
        [rows, cols],
        dtype,
        device,
    )
}

/// Returns the counts that `values` should give.
fn wanted(values: &[f32], encoding: Encoding, scale: f32) -> CounterValues {
    let want = fp8::quantize(values, encoding, scale);
    let (saturated, underflowed) = (want.saturated, want.underflowed);
    CounterValues { saturated, underflowed, elements: values.len() as u64, nan: want.nan }
}

fn a_value_is_saturated_where_it_rounds_beyond_the_largest(device: &Device, encoding: Encoding) -> Outcome {
    let (cell, rule) = (Cell::new(2.0, device)?, exact(encoding));
    for (value, [e4m3, e5m2]) in [
        (448.0, [0, 0]),
        (448.0f32.next_up(), [0, 0]),
        (464.0, [0, 0]),
        (464.0f32.next_up(), [1, 0]),
        (61440.0f32.next_down(), [1, 0]),
        (61440.0, [1, 1]),
        // The product is infinite, the value is not.
        (f32::MAX, [1, 1]),
        (f32::INFINITY, [0, 0]),
        (f32::NAN, [0, 0]),
    ] {
        for value in [value, -value] {
            let counters = Counters::new(device)?;
            let slot = Slot { counters: Some(&counters), ..Slot::fixed(encoding, &cell, &rule) };
            let x = Tensor::from_vec(
                vec![if value.abs() == f32::MAX { value } else { value / 2.0 }],
                [1],
                device,
            )?;
            ops::quantize(&x, &slot)?;
            let saturated = if encoding == Encoding::E4M3 { e4m3 } else { e5m2 };
            let want = CounterValues { saturated, underflowed: 0, elements: 1, nan: value.is_nan().into() };
            equal(&format!("{value:e} · 2"), counters.read()?, want)?;
        }
    }
    Ok(())
}

fn borders_in_quantize(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let rule = exact(encoding);
    for (shape, scale) in SHAPES.into_iter().flat_map(|shape| [1.0, 0.5, 1.5].map(|scale| (shape, scale))) {
        let (x, cell) = (filled(shape, dtype, device)?, Cell::new(scale, device)?);
        let want = wanted(&x.to_f32_vec()?, encoding, scale);
        for columnwise in [false, true] {
            let run = |what: &str, op: &dyn Fn(&Slot<'_>) -> Result<()>| -> Outcome {
                let counters = Counters::new(device)?;
                let slot =
                    Slot { counters: Some(&counters), columnwise, ..Slot::fixed(encoding, &cell, &rule) };
                op(&slot)?;
                equal(
                    &format!("{what} {shape:?}, scale {scale}, columnwise {columnwise}"),
                    counters.read()?,
                    want,
                )
            };
            run("quantize", &|slot| ops::quantize(&x, slot).map(drop))?;
            run("quantize_dbias", &|slot| ops::quantize_dbias(&x, slot).map(drop))?;
            run("quantize_many", &|slot| ops::quantize_many(&[(&x, *slot)]).map(drop))?;
        }
    }
    Ok(())
}

/// ReLU and its gradient hand values through.
fn borders_in_activations(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule) = (Cell::new(1.0, device)?, exact(encoding));
    for (shape, columnwise) in SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let x = filled(shape, dtype, device)?;
        let values = x.to_f32_vec()?;
        let rectified: Vec<f32> = values.iter().map(|&v| if v <= 0.0 { 0.0 } else { v }).collect();
        for (what, forward, values) in [("relu", true, &rectified), ("gradient of relu", false, &values)] {
            let counters = Counters::new(device)?;
            let slot = Slot { counters: Some(&counters), columnwise, ..Slot::fixed(encoding, &cell, &rule) };
            if forward {
                ops::activation(&x, Activation::Relu, &slot)?;
            } else {
                let h = Tensor::full(1.0, shape, dtype, device)?;
                ops::activation_backward_quantize_dbias(&x, &h, Activation::Relu, &slot)?;
            }
            let what = format!("{what} {shape:?}, columnwise {columnwise}");
            equal(&what, counters.read()?, wanted(values, encoding, 1.0))?;
        }
    }
    Ok(())
}

/// A norm with γ = 0 returns β, which holds the borders.
fn borders_in_norms(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
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

/// A step of no length leaves parameters as they are; their amax is infinite, so that a scale of their own is 1.
fn borders_in_adamw(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let step = AdamWStep { lr: 0.0, weight_decay: 0.0, ..STEP };
    let rule = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: false };
    let cell = Cell::new(1.0, device)?;
    for (shape, columnwise) in SHAPES.into_iter().skip(1).flat_map(|shape| [(shape, false), (shape, true)]) {
        let known = Scale::Cell { cell: &cell, first: &rule, keep: false };
        for (what, scale) in [("known", known), ("its own", Scale::FromTensor(&rule))] {
            let mut param = filled(shape, dtype, device)?;
            let want = wanted(&param.to_f32_vec()?, encoding, 1.0);
            let zeros = || Tensor::zeros(shape, DType::F32, device);
            let (main_grad, mut exp_avg, mut exp_avg_sq) = (zeros()?, zeros()?, zeros()?);
            let counters = Counters::new(device)?;
            let slot = Slot { scale, counters: Some(&counters), columnwise, ..Slot::off(encoding) };
            let tensor = AdamWTensor {
                name: "w",
                param: &mut param,
                main_grad: &main_grad,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
                main_param: None,
                slot: Some(slot),
            };
            ops::adamw_many(&mut [tensor], &step)?;
            equal(&format!("{shape:?}, columnwise {columnwise}, scale {what}"), counters.read()?, want)?;
        }
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

/// Their amax is 0 and their scale stays: the count alone tells them from zeros.
fn tensors_of_nan_alone(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let (cell, rule) = (Cell::new(1.0, device)?, exact(encoding));
    let (amax, counters) = (Cell::new(0.0, device)?, Counters::new(device)?);
    let x = Tensor::full(f32::NAN, [7, 33], dtype, device)?;
    let slot = Slot { amax: Some(&amax), counters: Some(&counters), ..Slot::fixed(encoding, &cell, &rule) };
    let want = |nan| CounterValues { saturated: 0, underflowed: 0, elements: nan, nan };
    let quantized = ops::quantize(&x, &slot)?;
    equal("fp8", quantized.is_fp8(), true)?;
    equal("once", (amax.read()?, counters.read()?), (0.0, want(7 * 33)))?;
    // Counts add up over calls, and go back to zero together.
    ops::quantize(&x, &slot)?;
    equal("twice", counters.read()?, want(2 * 7 * 33))?;
    counters.reset()?;
    equal("reset", counters.read()?, CounterValues::default())?;
    // In high precision nothing is counted.
    let off = Slot { counters: Some(&counters), ..Slot::off(encoding) };
    equal("off", matches!(ops::quantize(&x, &off)?, Operand::High(_)), true)?;
    equal("off", counters.read()?, CounterValues::default())
}

/// Counted are NaN values, not NaN codes: infinity times a scale of 0 is NaN, as is everything times a scale of NaN.
fn an_infinity_that_a_scale_makes_nan_is_not_counted_as_one(
    device: &Device,
    dtype: DType,
    encoding: Encoding,
) -> Outcome {
    let rule = exact(encoding);
    let values = [1.0, f32::INFINITY, f32::NAN, f32::NEG_INFINITY, 0.0, -2.0, 0.5, 3.0, f32::INFINITY];
    for ([rows, cols], nan) in [([1, 9], 1), ([3, 8], 3), ([130, 72], 1040)] {
        let x = values.into_iter().cycle().take(rows * cols).collect();
        let x = tensor(x, [rows, cols], dtype, device)?;
        for scale in [0.0, f32::NAN] {
            for columnwise in [false, true] {
                let (cell, counters) = (Cell::new(scale, device)?, Counters::new(device)?);
                let slot =
                    Slot { counters: Some(&counters), columnwise, ..Slot::fixed(encoding, &cell, &rule) };
                ops::quantize(&x, &slot)?;
                equal(&format!("{rows} rows, scale {scale}, {columnwise}"), counters.read()?.nan, nan)?;
            }
        }
    }
    Ok(())
}
