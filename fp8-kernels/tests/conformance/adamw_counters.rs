//! The counts of the step of AdamW, which quantizes the new parameters, at the borders of each.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::equal;
use super::counters::{SHAPES, filled, wanted};
use fp8_kernels::ops::{AdamWStep, AdamWTensor};
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, Scale, ScaleRule, Slot, Tensor, TransposePolicy, ops,
};

cases![borders: DtypesAndFormats];

/// A step of no length leaves parameters as they are; their amax is infinite, so that a scale of their own is 1.
fn borders(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
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
