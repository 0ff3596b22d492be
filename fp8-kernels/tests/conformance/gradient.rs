//! Gradients that an operation writes or adds to: the bits of the same operation and `accumulate`.

use super::case::{Outcome, cases};
use super::compare::{refused, same};
use super::data::{exact, normal};
use super::norm::options;
use fp8_kernels::ops::{Activation, GradientMut, Norm};
use fp8_kernels::{Cell, DType, Device, Encoding, Slot, Tensor, ops};

cases![quantized, activations, refuses];

pub(super) const SHAPES: [[usize; 2]; 7] = [[0, 8], [3, 0], [1, 1], [5, 33], [130, 72], [300, 40], [2, 1032]];

/// Calls `fill` with gradients to overwrite, whatever they held, and to add to. `sums` are what it computes.
pub(super) fn check(what: &str, sums: &Tensor, fill: impl Fn(&mut GradientMut<'_>) -> Outcome) -> Outcome {
    let (device, cols) = (sums.device(), sums.numel());
    let mut written = Tensor::full(f32::NAN, [cols], DType::F32, device)?;
    fill(&mut GradientMut::new(&mut written, "w", ops::Update::Write))?;
    same(&format!("{what}, written"), &written.to_f32_vec()?, &sums.to_f32_vec()?, cols)?;
    let (mut added, mut want) =
        (normal([cols], DType::F32, 77, device)?, normal([cols], DType::F32, 77, device)?);
    fill(&mut GradientMut::new(&mut added, "w", ops::Update::Add))?;
    ops::accumulate(&mut want, sums, "w")?;
    same(&format!("{what}, added"), &added.to_f32_vec()?, &want.to_f32_vec()?, cols)
}

fn quantized(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E5M2));
    for shape in SHAPES {
        let dy = normal(shape, DType::BF16, 1, device)?;
        for slot in [Slot::off(Encoding::E5M2), Slot::fixed(Encoding::E5M2, &cell, &rule)] {
            let (want, sums) = ops::quantize_dbias(&dy, &slot)?;
            let want = want.dequantize(DType::F32)?.to_f32_vec()?;
            check(&format!("{shape:?}, off {}", slot.is_off()), &sums, |sums| {
                let got = ops::quantize_dbias_into(&dy, &slot, sums)?;
                same("dy", &got.dequantize(DType::F32)?.to_f32_vec()?, &want, shape[1])
            })?;
        }
    }
    Ok(())
}

fn activations(device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(3.0, device)?, exact(Encoding::E5M2));
    for (shape, activation) in
        SHAPES.into_iter().flat_map(|s| [Activation::Gelu, Activation::Swiglu].map(|a| (s, a)))
    {
        let wide = if activation.is_gated() { 2 * shape[1] } else { shape[1] };
        let (h, dy) =
            (normal([shape[0], wide], DType::BF16, 1, device)?, normal(shape, DType::BF16, 2, device)?);
        let slot = Slot::fixed(Encoding::E5M2, &cell, &rule);
        let (want, sums) = ops::activation_backward_quantize_dbias(&dy, &h, activation, &slot)?;
        let want = want.dequantize(DType::F32)?.to_f32_vec()?;
        check(&format!("{activation} {shape:?}"), &sums, |sums| {
            let got = ops::activation_backward_quantize_dbias_into(&dy, &h, activation, &slot, sums)?;
            same("dh", &got.dequantize(DType::F32)?.to_f32_vec()?, &want, wide)
        })?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let zeros = |len: usize, dtype| Tensor::zeros([len], dtype, device);
    let (x, gamma) = (Tensor::zeros([2, 4], DType::F32, device)?, zeros(4, DType::F32)?);
    let off = Slot::off(Encoding::E5M2);
    let mut short = zeros(3, DType::F32)?;
    let mut out = GradientMut::new(&mut short, "w", ops::Update::Add);
    refused(
        ops::column_sums_into(&x, &mut out),
        "column_sums_into: out and the columns of x: got [3] and [4]: a gradient has one element per column",
    )?;
    refused(
        ops::quantize_dbias_into(&x, &off, &mut out),
        "quantize_dbias_into: dbias and the columns of dy: got [3] and [4]",
    )?;
    refused(
        ops::activation_backward_quantize_dbias_into(&x, &x, Activation::Relu, &off, &mut out),
        "activation_backward_quantize_dbias_into: dbias and the columns of h: got [3] and [4]",
    )?;
    let layer = options(Norm::LayerNorm);
    let (_, stats) = ops::norm(&x, &gamma, None, &layer, &off)?;
    refused(
        ops::norm_backward_into(&x, &x, &gamma, &stats, &layer, None, Some(&mut out), None),
        "norm_backward_into: dgamma and the columns of x: got [3] and [4]",
    )?;
    refused(
        ops::norm_backward_into(&x, &x, &gamma, &stats, &layer, None, None, Some(&mut out)),
        "norm_backward_into: dbeta and the columns of x: got [3] and [4]",
    )?;
    let mut narrow = zeros(4, DType::BF16)?;
    refused(
        ops::column_sums_into(&x, &mut GradientMut::new(&mut narrow, "w", ops::Update::Add)),
        "column_sums_into: out and the columns of x has dtype bf16: expected f32",
    )?;
    let rms = options(Norm::RmsNorm);
    let (_, stats) = ops::norm(&x, &gamma, None, &rms, &off)?;
    let mut dbeta = zeros(4, DType::F32)?;
    refused(
        ops::norm_backward_into(
            &x,
            &x,
            &gamma,
            &stats,
            &rms,
            None,
            None,
            Some(&mut GradientMut::new(&mut dbeta, "norm.bias", ops::Update::Add)),
        ),
        "norm_backward_into: dbeta = norm.bias: RMSNorm has none: pass no dbeta",
    )?;
    let _holder = dbeta.clone();
    let shared = "w: cannot be changed in place, because 1 other tensor shares its storage";
    refused(ops::column_sums_into(&x, &mut GradientMut::new(&mut dbeta, "w", ops::Update::Add)), shared)?;
    // One of two that cannot be written leaves the other as it is.
    let layer_norm = options(Norm::LayerNorm);
    let (_, stats) = ops::norm(&x, &gamma, None, &layer_norm, &off)?;
    let mut dgamma = zeros(4, DType::F32)?;
    let result = ops::norm_backward_into(
        &x,
        &x,
        &gamma,
        &stats,
        &layer_norm,
        None,
        Some(&mut GradientMut::new(&mut dgamma, "v", ops::Update::Add)),
        Some(&mut GradientMut::new(&mut dbeta, "w", ops::Update::Add)),
    );
    refused(result, shared)?;
    same("dgamma", &dgamma.to_vec::<f32>()?, &[0.0; 4], 4)
}
