//! The counts of quantize, at the borders of each.

use super::case::{Outcome, cases};
use super::compare::equal;
use super::counters::{SHAPES, filled, wanted};
use super::data::{exact, tensor};
use fp8_kernels::{
    Cell, CounterValues, Counters, DType, Device, Encoding, Operand, Result, Slot, Tensor, TransposePolicy,
    ops,
};

cases![
    a_value_is_saturated_where_it_rounds_beyond_the_largest: Formats,
    borders: DtypesAndFormats,
    tensors_of_nan_alone: DtypesAndFormats,
    an_infinity_that_a_scale_makes_nan_is_not_counted_as_one: DtypesAndFormats,
];

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

fn borders(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let rule = exact(encoding);
    let scales = [1.0, 0.5, 1.5];
    // Every kernel meets every scale: tall ones and wide ones share kernels.
    let of_shape = |i: usize| if SHAPES[i][0] >= 128 { scales.to_vec() } else { vec![scales[i % 3]] };
    let all = SHAPES.iter().enumerate().flat_map(|(i, shape)| of_shape(i).into_iter().map(|s| (*shape, s)));
    for (shape, scale) in all {
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
