//! Norms of bf16 rows by the kernels that load rows ahead, against the same norms of the same values in f32, which other
//! kernels compute: equal bits.

use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{Random, exact, normal, tensor};
use super::norm::options;
use crate::oracle::fp8;
use fp8_kernels::ops::{Norm, NormStats};
use fp8_kernels::{Cell, Counters, DType, Device, Encoding, REST, Scale, ScaleRule, Slot, Tensor, ops};

cases![
    codes_of_layer_norm,
    codes_of_rms_norm,
    values_of_layer_norm,
    values_of_rms_norm,
    rows_with_special_values,
    the_largest_in_each_place,
    what_others_compute,
    amaxes_and_statistics_alone,
];

/// Rows by warps and by blocks of one to eight warps: the last of four times eight columns there and not, and more rows than a
/// simulated device takes at once.
const SHAPES: [[usize; 2]; 14] = [
    [3, 8],
    [170, 16],
    [5, 248],
    [5, 256],
    [9, 776],
    [170, 1024],
    [90, 1032],
    [3, 2040],
    [43, 2048],
    [3, 3080],
    [3, 4104],
    [3, 6152],
    [20, 8184],
    [17, 8192],
];

/// A norm's inputs: bf16 rows, γ, and β for LayerNorm.
struct Inputs {
    x: Tensor,
    gamma: Tensor,
    beta: Option<Tensor>,
}

impl Inputs {
    fn new(norm: Norm, shape: [usize; 2], parameters: DType, device: &Device) -> fp8_kernels::Result<Self> {
        let parameter = |seed| normal([shape[1]], parameters, seed, device);
        let beta = (norm == Norm::LayerNorm).then(|| parameter(3)).transpose()?;
        Ok(Self { x: normal(shape, DType::BF16, shape[1] as u64, device)?, gamma: parameter(2)?, beta })
    }

    /// The values in f32, and the statistics.
    fn wanted(&self, norm: Norm) -> Result<(Vec<f32>, NormStats), libtest_mimic::Failed> {
        let (wide, off) = (ops::cast(&self.x, DType::F32)?, Slot::off(Encoding::E4M3));
        let (y, stats) = ops::norm(&wide, &self.gamma, self.beta.as_ref(), &options(norm), &off)?;
        Ok((y.dequantize(DType::F32)?.to_f32_vec()?, stats))
    }
}

fn same_statistics(what: &str, got: &NormStats, want: &NormStats) -> Outcome {
    same(&format!("{what}: rsigma"), &got.rsigma.to_f32_vec()?, &want.rsigma.to_f32_vec()?, 1)?;
    let means = |stats: &NormStats| stats.mean.as_ref().map(Tensor::to_f32_vec).transpose();
    match (means(got)?, means(want)?) {
        (Some(got), Some(want)) => same(&format!("{what}: mean"), &got, &want, 1),
        (got, want) => equal(what, got.is_some(), want.is_some()),
    }
}

fn codes_of(norm: Norm, device: &Device) -> Outcome {
    let (cell, rule) = (Cell::new(300.0, device)?, exact(Encoding::E4M3));
    for (shape, parameters) in SHAPES.into_iter().flat_map(|s| [DType::F32, DType::BF16].map(|p| (s, p))) {
        let inputs = Inputs::new(norm, shape, parameters, device)?;
        let (values, stats) = inputs.wanted(norm)?;
        let want = fp8::quantize(&values, Encoding::E4M3, 300.0);
        let amax = Cell::new(REST, device)?;
        let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
        let (got, got_stats) =
            ops::norm(&inputs.x, &inputs.gamma, inputs.beta.as_ref(), &options(norm), &slot)?;
        let (what, got) = (format!("{shape:?} {parameters}"), got.as_fp8().ok_or("got no codes")?.clone());
        same(&what, &got.codes()?, &want.codes, shape[1])?;
        same(&what, &[got.scale_inv().item()?, amax.read()?], &[1.0 / 300.0, want.amax], 1)?;
        same_statistics(&what, &got_stats, &stats)?;
    }
    Ok(())
}

fn codes_of_layer_norm(device: &Device) -> Outcome {
    codes_of(Norm::LayerNorm, device)
}

fn codes_of_rms_norm(device: &Device) -> Outcome {
    codes_of(Norm::RmsNorm, device)
}

fn values_of(norm: Norm, device: &Device) -> Outcome {
    for (shape, parameters) in SHAPES.into_iter().flat_map(|s| [DType::F32, DType::BF16].map(|p| (s, p))) {
        let inputs = Inputs::new(norm, shape, parameters, device)?;
        let (values, stats) = inputs.wanted(norm)?;
        let largest = fp8::quantize(&values, Encoding::E4M3, 1.0).amax;
        let want = tensor(values, shape, DType::BF16, device)?.to_f32_vec()?;
        let amax = Cell::new(REST, device)?;
        let slot = Slot { amax: Some(&amax), ..Slot::off(Encoding::E4M3) };
        let (got, got_stats) =
            ops::norm(&inputs.x, &inputs.gamma, inputs.beta.as_ref(), &options(norm), &slot)?;
        let what = format!("{shape:?} {parameters}");
        same(&what, &got.dequantize(DType::BF16)?.to_f32_vec()?, &want, shape[1])?;
        same(&what, &[amax.read()?], &[largest], 1)?;
        same_statistics(&what, &got_stats, &stats)?;
    }
    Ok(())
}

fn values_of_layer_norm(device: &Device) -> Outcome {
    values_of(Norm::LayerNorm, device)
}

fn values_of_rms_norm(device: &Device) -> Outcome {
    values_of(Norm::RmsNorm, device)
}

/// A NaN, an infinity or the largest value in x, whose whole row feels it, or in a parameter, whose column does; of either
/// sign, in each of a vector's places and in each of a thread's vectors.
fn rows_with_special_values(device: &Device) -> Outcome {
    let specials = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -0.0, 1e-38];
    let (cell, rule) = (Cell::new(2.0, device)?, exact(Encoding::E4M3));
    for (norm, parameters, cols) in [
        (Norm::LayerNorm, DType::F32, 1024),
        (Norm::LayerNorm, DType::BF16, 1032),
        (Norm::RmsNorm, DType::F32, 1048),
        (Norm::RmsNorm, DType::BF16, 40),
    ] {
        let rows = specials.len() + 1;
        let mut x = Random::new(7).normals(rows * cols);
        for (row, special) in specials.into_iter().enumerate() {
            x[row * cols + (row * 261 + 3) % cols] = special;
        }
        let mut gamma = Random::new(8).normals(cols);
        for (place, special) in specials.into_iter().enumerate() {
            gamma[(place * 137 + 1) % cols] = special;
        }
        for special_parameters in [false, true] {
            let gamma = if special_parameters { gamma.clone() } else { vec![1.5; cols] };
            let mut inputs = Inputs::new(norm, [rows, cols], parameters, device)?;
            inputs.x = tensor(x.clone(), [rows, cols], DType::BF16, device)?;
            inputs.gamma = tensor(gamma, [cols], parameters, device)?;
            let (values, stats) = inputs.wanted(norm)?;
            let want = fp8::quantize(&values, Encoding::E4M3, 2.0);
            let amax = Cell::new(REST, device)?;
            let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
            let (got, got_stats) =
                ops::norm(&inputs.x, &inputs.gamma, inputs.beta.as_ref(), &options(norm), &slot)?;
            let what = format!("{norm} {parameters} {cols}, special parameters {special_parameters}");
            same(&what, &got.as_fp8().ok_or("got no codes")?.codes()?, &want.codes, cols)?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
            same_statistics(&what, &got_stats, &stats)?;
            let (high, _) = ops::norm(
                &inputs.x,
                &inputs.gamma,
                inputs.beta.as_ref(),
                &options(norm),
                &Slot { amax: Some(&amax), ..Slot::off(Encoding::E4M3) },
            )?;
            let want_high = tensor(values, [rows, cols], DType::BF16, device)?.to_f32_vec()?;
            same(&what, &high.dequantize(DType::BF16)?.to_f32_vec()?, &want_high, cols)?;
            same(&what, &[amax.read()?], &[want.amax], 1)?;
        }
    }
    Ok(())
}

/// One column that is the largest, in each of the 32 that a thread holds: found with codes, with values, and alone, as the scale
/// of current scaling.
fn the_largest_in_each_place(device: &Device) -> Outcome {
    let (cols, rule) = (1024, exact(Encoding::E4M3));
    let current = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let cell = Cell::new(3.0, device)?;
    let norms = [Norm::LayerNorm, Norm::RmsNorm].into_iter();
    for (norm, parameters) in norms.flat_map(|norm| [DType::F32, DType::BF16].map(|p| (norm, p))) {
        for (vector, k) in (0..4).flat_map(|vector| (0..8).map(move |k| (vector, k))) {
            let place = (32 * vector + (7 * vector + 5 * k) % 32) * 8 + k;
            let mut inputs = Inputs::new(norm, [1, cols], parameters, device)?;
            let (mut x, mut gamma) = (inputs.x.to_f32_vec()?, vec![1.0; cols]);
            (x[place], gamma[place]) = (if k % 2 == 0 { 1.5 } else { -2.25 }, 60.0);
            inputs.x = tensor(x, [1, cols], DType::BF16, device)?;
            inputs.gamma = tensor(gamma, [cols], parameters, device)?;
            let (values, _) = inputs.wanted(norm)?;
            let largest = fp8::quantize(&values, Encoding::E4M3, 1.0).amax;
            let run = |slot: Slot<'_>| -> Result<_, libtest_mimic::Failed> {
                let amax = Cell::new(REST, device)?;
                let slot = Slot { amax: Some(&amax), ..slot };
                let (y, _) =
                    ops::norm(&inputs.x, &inputs.gamma, inputs.beta.as_ref(), &options(norm), &slot)?;
                Ok((y, amax.read()?))
            };
            let off = Slot::off(Encoding::E4M3);
            let (scaled, _) = run(Slot { scale: Scale::FromTensor(&current), ..off })?;
            let inverse = scaled.as_fp8().ok_or("got no codes")?.scale_inv().item()?;
            let got = [run(Slot::fixed(Encoding::E4M3, &cell, &rule))?.1, run(off)?.1, inverse];
            let what = format!("{norm} {parameters}, the largest at {place}");
            same(&what, &got, &[largest, largest, 1.0 / (448.0 / largest)], 1)?;
        }
    }
    Ok(())
}

/// Other kernels give the same codes where these cannot be used: counts, γ around one, E5M2, LayerNorm without β, parameters of two
/// types, wider rows.
fn what_others_compute(device: &Device) -> Outcome {
    for cols in [16, 1048, 8200] {
        let shape = [3, cols];
        let inputs = Inputs::new(Norm::LayerNorm, shape, DType::F32, device)?;
        let narrow = ops::cast(&inputs.gamma, DType::BF16)?;
        let wide = ops::cast(&inputs.x, DType::F32)?;
        let beta = inputs.beta.as_ref();
        let around = ops::NormOptions { zero_centered_gamma: true, ..options(Norm::LayerNorm) };
        let plain = options(Norm::LayerNorm);
        let counters = Counters::new(device)?;
        for (i, (gamma, beta, options, encoding, counters)) in [
            (&inputs.gamma, beta, plain, Encoding::E4M3, None),
            (&inputs.gamma, beta, plain, Encoding::E4M3, Some(&counters)),
            (&inputs.gamma, beta, around, Encoding::E4M3, None),
            (&inputs.gamma, beta, plain, Encoding::E5M2, None),
            (&inputs.gamma, None, plain, Encoding::E4M3, None),
            (&narrow, beta, plain, Encoding::E4M3, None),
        ]
        .into_iter()
        .enumerate()
        {
            let (cell, rule) = (Cell::new(30.0, device)?, exact(encoding));
            let slot = Slot { counters, ..Slot::fixed(encoding, &cell, &rule) };
            let codes = |x: &Tensor| -> Result<_, libtest_mimic::Failed> {
                let (y, _) = ops::norm(x, gamma, beta, &options, &slot)?;
                Ok(y.as_fp8().ok_or("got no codes")?.codes()?)
            };
            same(&format!("{cols} columns, variant {i}"), &codes(&inputs.x)?, &codes(&wide)?, cols)?;
        }
        equal("values counted", counters.read()?.elements, 6 * cols as u64)?;
    }
    Ok(())
}

/// Current scaling takes the amax first, and a scale that is set keeps it from doing so.
fn amaxes_and_statistics_alone(device: &Device) -> Outcome {
    let current = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    for (norm, cols, parameters) in [
        (Norm::LayerNorm, 264, DType::F32),
        (Norm::LayerNorm, 1032, DType::BF16),
        (Norm::RmsNorm, 264, DType::BF16),
        (Norm::RmsNorm, 1032, DType::F32),
    ] {
        let inputs = Inputs::new(norm, [5, cols], parameters, device)?;
        let (values, stats) = inputs.wanted(norm)?;
        let largest = fp8::quantize(&values, Encoding::E4M3, 1.0).amax;
        let slot = Slot { scale: Scale::FromTensor(&current), ..Slot::off(Encoding::E4M3) };
        let (got, got_stats) =
            ops::norm(&inputs.x, &inputs.gamma, inputs.beta.as_ref(), &options(norm), &slot)?;
        let want = fp8::quantize(&values, Encoding::E4M3, 448.0 / largest);
        let what = format!("{norm} {cols} {parameters}");
        same(&what, &got.as_fp8().ok_or("got no codes")?.codes()?, &want.codes, cols)?;
        same_statistics(&what, &got_stats, &stats)?;
    }
    Ok(())
}
