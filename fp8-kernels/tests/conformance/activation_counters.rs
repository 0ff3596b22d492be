//! The counts of activations and of their gradients, at the borders of each.

use super::case::{Outcome, cases};
use super::compare::equal;
use super::counters::{SHAPES, filled, wanted};
use super::data::exact;
use fp8_kernels::ops::Activation;
use fp8_kernels::{Cell, Counters, DType, Device, Encoding, Slot, Tensor, TransposePolicy, ops};

cases![borders: DtypesAndFormats];

/// ReLU and its gradient hand values through.
fn borders(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
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
