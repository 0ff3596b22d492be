//! Codes, counts and amaxes of the new parameters where few values decide.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::data::{self, Random, exact};
use super::reference::{Got, same_as_cpu};
use fp8_kernels::ops::AdamWStep;
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, REST, Scale, ScaleRule, Slot, Tensor, TransposePolicy, UNSET,
    ops,
};

cases![counts_beside_infinities: DtypesAndFormats, amaxes_of_needles: Dtypes];

/// With a scale of 1, which an infinite tensor has too, large values saturate and small ones vanish, and both are counted;
/// zeros are not; NaN is counted by itself. Two tensors a step, with scales of their own or with committed ones.
fn counts_beside_infinities(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let values = [f32::INFINITY, -6e4, 1e-6, 449.0, 0.0, -3.0, f32::NEG_INFINITY, 6e4, -1e-6, f32::NAN];
    let step = AdamWStep { weight_decay: 0.0, ..STEP };
    let rule = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: false };
    let pairs = [[[3, 5], [16, 8]], [[130, 66], [128, 64]], [[2, 16], [129, 72]], [[5, 1], [40, 61]]];
    let flags = [(false, false), (true, false), (false, true), (true, true)];
    let all = pairs.into_iter().flat_map(|pair| flags.map(|(columnwise, is_set)| (pair, columnwise, is_set)));
    for (shapes, columnwise, is_set) in all {
        same_as_cpu(&format!("{shapes:?}, {columnwise}, {is_set}"), device, |device| {
            let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
            let mut random = Random::new(7);
            let mut parameters = Vec::new();
            for [rows, cols] in shapes {
                let choice = |_| values[random.bits() as usize % values.len()];
                let param = (0..rows * cols).map(choice).collect();
                let [m, v] = [(); 2].map(|()| Tensor::zeros([rows, cols], DType::F32, device));
                let grad = Tensor::zeros([rows, cols], DType::F32, device)?;
                let scale = if is_set { 1.0 } else { UNSET };
                let cells = (Cell::new(scale, device)?, Counters::new(device)?);
                parameters.push((data::tensor(param, [rows, cols], dtype, device)?, grad, m?, v?, cells));
            }
            let mut tensors = Vec::new();
            for (i, (param, main_grad, exp_avg, exp_avg_sq, (cell, counters))) in
                parameters.iter_mut().enumerate()
            {
                let of_cell = Scale::Cell { cell, first: &rule, keep: false };
                let scale = if i == 0 && !is_set { Scale::FromTensor(&rule) } else { of_cell };
                let slot = Slot { scale, counters: Some(counters), columnwise, ..Slot::off(encoding) };
                let (main_param, slot) = (None, Some(slot));
                tensors.push(ops::AdamWTensor {
                    name: "w",
                    param,
                    main_grad,
                    exp_avg,
                    exp_avg_sq,
                    main_param,
                    slot,
                });
            }
            let codes = ops::adamw_many(&mut tensors, &step)?;
            let mut results: Vec<Got> = codes.into_iter().flatten().map(Got::from).collect();
            for (.., (_, counters)) in &parameters {
                let counts = counters.read()?;
                let counts = [counts.saturated, counts.underflowed, counts.elements, counts.nan];
                results.push(Got::Numbers(counts.map(|count| count as f32).to_vec()));
            }
            Ok(results)
        })?;
    }
    Ok(())
}

/// One value among zeros: in each of eight neighbours, in rows and chunks that are cut, in each warp; where codes are written
/// at once and where their scale comes later.
fn amaxes_of_needles(device: &Device, dtype: DType) -> Outcome {
    let shapes = [([2, 16], [8, 1]), ([3, 7], [7, 1]), ([128, 16], [48, 257]), ([16, 128], [3, 257])];
    let rule = exact(Encoding::E4M3);
    for ((shape, [first, step]), columnwise) in shapes.into_iter().flat_map(|s| [(s, false), (s, true)]) {
        same_as_cpu(&format!("{shape:?}, {columnwise}"), device, |device| {
            let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
            let mut parameters = Vec::new();
            for place in 0..16 {
                let mut values = vec![0.0; shape[0] * shape[1]];
                values[first + place / 2 * step] = -3.0 - place as f32;
                let [grad, m, v] = [(); 3].map(|()| Tensor::zeros(shape, DType::F32, device));
                let scale = Cell::new(if place % 2 == 0 { 3.0 } else { UNSET }, device)?;
                let cells = (scale, Cell::new(REST, device)?);
                parameters.push((data::tensor(values, shape, dtype, device)?, grad?, m?, v?, cells));
            }
            let mut tensors = Vec::new();
            for (param, main_grad, exp_avg, exp_avg_sq, (cell, amax)) in &mut parameters {
                let scale = Scale::Cell { cell, first: &rule, keep: false };
                let slot = Slot { scale, amax: Some(amax), columnwise, ..Slot::off(Encoding::E4M3) };
                let (main_param, slot) = (None, Some(slot));
                tensors.push(ops::AdamWTensor {
                    name: "w",
                    param,
                    main_grad,
                    exp_avg,
                    exp_avg_sq,
                    main_param,
                    slot,
                });
            }
            let codes = ops::adamw_many(&mut tensors, &AdamWStep { weight_decay: 0.0, ..STEP })?;
            let mut results: Vec<Got> = codes.into_iter().flatten().map(Got::from).collect();
            for (.., (_, amax)) in &parameters {
                results.push(Got::Numbers(vec![amax.read()?]));
            }
            Ok(results)
        })?;
    }
    Ok(())
}
