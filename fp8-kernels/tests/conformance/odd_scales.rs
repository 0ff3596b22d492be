//! Codes by scale cells that somebody has set to NaN, infinity or zero: a product that is NaN has the code 0x7F, whatever computes
//! it, and amax and counts are those of the values.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{exact, normal, tensor};
use super::norm::options;
use super::quantize::fp8;
use super::reference::{Got, same_as_cpu};
use super::whole::with_cast;
use crate::oracle::fp8;
use fp8_kernels::ops::{Activation, AdamWStep, Norm};
use fp8_kernels::{Cell, Counters, DType, Device, Encoding, Fp8Tensor, REST, Result, Slot, Tensor, ops};

cases![
    quantized: DtypesAndFormats,
    quantized_together: Formats,
    with_bias_gradients: Dtypes,
    of_activations: Dtypes,
    of_norms: Dtypes,
    of_updated_parameters: Formats,
];

/// The fifth is small enough to make zeros of numbers.
const SCALES: [f32; 6] = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-45, 0.0];

/// Numbers among which each special value stands in two places.
fn values(shape: [usize; 2], dtype: DType, device: &Device) -> Result<Tensor> {
    let mut values = normal(shape, DType::F32, 1, device)?.to_f32_vec()?;
    let specials = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 1e-45, -3e38];
    let len = values.len();
    for (i, special) in specials.into_iter().enumerate() {
        values[(i * 37 + 5) % len] = special;
        values[(i * 61 + len / 2) % len] = special;
    }
    tensor(values, shape, dtype, device)
}

/// Vectors with a tail, tiles that are cut, and whole ones.
const SHAPES: [[usize; 2]; 3] = [[3, 67], [130, 72], [128, 64]];

fn quantized(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    for (shape, scale) in SHAPES.into_iter().flat_map(|shape| SCALES.map(|scale| (shape, scale))) {
        let x = values(shape, dtype, device)?;
        for (columnwise, counting) in [(false, false), (true, false), (true, true)] {
            let (cell, amax, rule) = (Cell::new(scale, device)?, Cell::new(REST, device)?, exact(encoding));
            let counters = Counters::new(device)?;
            let slot = Slot {
                amax: Some(&amax),
                counters: counting.then_some(&counters),
                columnwise,
                ..Slot::fixed(encoding, &cell, &rule)
            };
            let got = fp8(ops::quantize(&x, &slot)?)?;
            let want = fp8::quantize(&x.to_f32_vec()?, encoding, scale.abs());
            let what = format!("{shape:?} by {scale}, columnwise: {columnwise}, counting: {counting}");
            same(&what, &got.codes()?, &want.codes, shape[1])?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
            let factor = got.scale_inv().item()?;
            let is_right = if scale.is_nan() { factor.is_nan() } else { factor == 1.0 / scale.abs() };
            equal(&format!("{what}: scale_inv {factor}"), is_right, true)?;
            if columnwise {
                let codes = got.columnwise().ok_or("there is no transpose")?.to_vec::<u8>()?;
                same(&what, &codes, &fp8::transpose(&want.codes, shape[0], shape[1]), shape[0])?;
            }
            if counting {
                let counts = counters.read()?;
                let counts = [counts.saturated, counts.underflowed, counts.nan];
                equal(&what, counts, [want.saturated, want.underflowed, want.nan])?;
            }
        }
    }
    Ok(())
}

fn quantized_together(device: &Device, encoding: Encoding) -> Outcome {
    let (device, rule) = (&with_cast(device), exact(encoding));
    for scale in SCALES {
        let cell = Cell::new(scale, device)?;
        let mut tensors = Vec::new();
        for (shape, dtype) in
            SHAPES.into_iter().flat_map(|shape| [DType::BF16, DType::F32].map(|dtype| (shape, dtype)))
        {
            tensors.push(values(shape, dtype, device)?);
        }
        let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
        let all: Vec<_> = tensors.iter().map(|x| (x, slot)).collect();
        for (x, got) in tensors.iter().zip(ops::quantize_many(&all)?) {
            let want = fp8::quantize(&x.to_f32_vec()?, encoding, scale.abs());
            let what = format!("{} {} by {scale}", x.dtype(), x.shape());
            same(&what, &fp8(got)?.codes()?, &want.codes, x.shape().last_dim())?;
        }
    }
    Ok(())
}

/// Compares the codes that `run` makes with each of the scales, in each shape.
fn as_the_cpu(
    device: &Device,
    encoding: Encoding,
    run: impl Fn(&Slot<'_>, [usize; 2], &Device) -> Result<Vec<Got>>,
) -> Outcome {
    for (shape, scale) in SHAPES.into_iter().flat_map(|shape| SCALES.map(|scale| (shape, scale))) {
        same_as_cpu(&format!("{shape:?} by {scale}"), device, |device| {
            let device = &with_cast(device);
            let (cell, amax, rule) = (Cell::new(scale, device)?, Cell::new(REST, device)?, exact(encoding));
            let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            run(&slot, shape, device)
        })?;
    }
    Ok(())
}

/// Codes and transpose. Their factor may be NaN, which is not compared here.
fn codes(fp8: Option<&Fp8Tensor>) -> Result<Vec<Got>> {
    let Some(fp8) = fp8 else { return Ok(Vec::new()) };
    let bytes = [Some(fp8.codes()?), fp8.columnwise().map(Tensor::to_vec::<u8>).transpose()?];
    Ok(bytes.into_iter().flatten().map(|b| Got::Numbers(b.into_iter().map(f32::from).collect())).collect())
}

fn with_bias_gradients(device: &Device, dtype: DType) -> Outcome {
    as_the_cpu(device, Encoding::E5M2, |slot, shape, device| {
        let (dy, _) = ops::quantize_dbias(&values(shape, dtype, device)?, slot)?;
        codes(dy.as_fp8())
    })
}

fn of_activations(device: &Device, dtype: DType) -> Outcome {
    for (activation, encoding) in [(Activation::Gelu, Encoding::E4M3), (Activation::Swiglu, Encoding::E5M2)] {
        as_the_cpu(device, encoding, |slot, [rows, cols], device| {
            let width = if activation.is_gated() { 2 * cols } else { cols };
            let (h, dy) = (values([rows, width], dtype, device)?, values([rows, cols], dtype, device)?);
            let y = ops::activation(&h, activation, slot)?;
            let (dh, _) = ops::activation_backward_quantize_dbias(&dy, &h, activation, slot)?;
            Ok(codes(y.as_fp8())?.into_iter().chain(codes(dh.as_fp8())?).collect())
        })?;
    }
    Ok(())
}

fn of_norms(device: &Device, dtype: DType) -> Outcome {
    for norm in [Norm::LayerNorm, Norm::RmsNorm] {
        as_the_cpu(device, Encoding::E4M3, |slot, shape, device| {
            // Rows without special values, and γ with a zero.
            let x = normal(shape, dtype, 3, device)?;
            let gamma = tensor((0..shape[1]).map(|i| i as f32 % 5.0).collect(), [shape[1]], dtype, device)?;
            let beta =
                (norm == Norm::LayerNorm).then(|| Tensor::zeros([shape[1]], dtype, device)).transpose()?;
            let (y, _) = ops::norm(&x, &gamma, beta.as_ref(), &options(norm), slot)?;
            codes(y.as_fp8())
        })?;
    }
    Ok(())
}

fn of_updated_parameters(device: &Device, encoding: Encoding) -> Outcome {
    as_the_cpu(device, encoding, |slot, shape, device| {
        let mut param = values(shape, DType::F32, device)?;
        let zeros = || Tensor::zeros(shape, DType::F32, device);
        let (grad, mut m, mut v) = (zeros()?, zeros()?, zeros()?);
        let tensor = ops::AdamWTensor {
            name: "w",
            param: &mut param,
            main_grad: &grad,
            exp_avg: &mut m,
            exp_avg_sq: &mut v,
            main_param: None,
            slot: Some(*slot),
        };
        let made = ops::adamw_many(&mut [tensor], &AdamWStep { lr: 0.0, weight_decay: 0.0, ..STEP })?;
        let codes = made.into_iter().flatten().map(|made| codes(Some(&made))).collect::<Result<Vec<_>>>()?;
        Ok(codes.into_iter().flatten().collect())
    })
}
