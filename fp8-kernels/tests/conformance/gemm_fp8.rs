use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused, same};
use super::data::{FLOATS, exact, f64s, normal};
use super::fp8_product::{Expected, is_hardware};
use super::gemm::{DIMS, check_rounded_bias};
use super::threads::same_bits;
use crate::oracle;
use fp8_kernels::{Cell, DType, Device, Encoding, Fp8Tensor, REST, Result, Slot, Tensor, ops};
use ops::{Accumulation, Layout};

cases![
    against_three_loops,
    sums_of_small_integers,
    every_ragged_extent,
    factors_are_applied_one_after_the_other,
    bias_and_output_types,
    an_f32_bias_is_rounded_to_a_16_bit_outputs_type,
    accumulates,
    fp8_output,
    same_for_any_threads,
    refuses,
];

const PAIRS: [[Encoding; 2]; 3] =
    [[Encoding::E4M3, Encoding::E4M3], [Encoding::E4M3, Encoding::E5M2], [Encoding::E5M2, Encoding::E4M3]];

pub(super) fn quantized(
    shape: [usize; 2],
    encoding: Encoding,
    scale: f32,
    seed: u64,
    device: &Device,
) -> Result<Fp8Tensor> {
    let (cell, rule) = (Cell::new(scale, device)?, exact(encoding));
    let x = ops::scale(&normal(shape, DType::F32, seed, device)?, 0.5)?;
    let q = ops::quantize(&x, &Slot::fixed(encoding, &cell, &rule))?;
    let codes = Tensor::from_vec(q.as_fp8().map_or(Ok(Vec::new()), Fp8Tensor::codes)?, shape, device)?;
    Fp8Tensor::from_codes(codes, shape, encoding, Tensor::scalar(1.0 / scale, device)?)
}

fn decoded(x: &Fp8Tensor) -> Result<Vec<f64>> {
    let factor = f64::from(x.scale_inv().item()?);
    Ok(x.codes()?.into_iter().map(|code| f64::from(x.encoding().to_f32(code)) * factor).collect())
}

fn against_three_loops(device: &Device) -> Outcome {
    for ([lhs, rhs], dims) in PAIRS.into_iter().flat_map(|p| DIMS.map(|d| (p, d))) {
        let [m, n, k] = dims;
        let a = quantized([m, k], lhs, 30.0, 1, device)?;
        let b = quantized([n, k], rhs, 100.0, 2, device)?;
        for accumulation in [Accumulation::Fast, Accumulation::Split] {
            let got = ops::gemm_fp8(&a, &b, None, DType::F32, accumulation)?;
            let want = Expected::new(&decoded(&a)?, &decoded(&b)?, Layout::Nt, dims, None);
            let what = format!("{lhs} × {rhs} {dims:?} {accumulation:?}");
            equal(&what, got.shape().to_vec(), vec![m, n])?;
            want.check(&what, &got.to_f32_vec()?, n, DType::F32, device)?;
        }
    }
    Ok(())
}

/// Exact in whatever bits a tensor core keeps.
fn sums_of_small_integers(device: &Device) -> Outcome {
    for ([lhs, rhs], dims) in PAIRS.into_iter().flat_map(|p| DIMS.map(|d| (p, d))) {
        let [m, n, k] = dims;
        let tensor = |shape: [usize; 2], encoding: Encoding, turn: usize| {
            let code = |i: usize| encoding.from_f32_saturating([1.0, -2.0, 2.0, -1.0, 1.0][i * turn % 5]);
            let codes = Tensor::from_vec((0..shape[0] * shape[1]).map(code).collect(), shape, device)?;
            Fp8Tensor::from_codes(codes, shape, encoding, Tensor::scalar(0.5, device)?)
        };
        let (a, b) = (tensor([m, k], lhs, 1)?, tensor([n, k], rhs, 3)?);
        let want = oracle::gemm::gemm(&decoded(&a)?, &decoded(&b)?, Layout::Nt, dims, None);
        let want: Vec<f32> = want.into_iter().map(|sum| sum as f32).collect();
        for accumulation in [Accumulation::Fast, Accumulation::Split] {
            let got = ops::gemm_fp8(&a, &b, None, DType::F32, accumulation)?.to_f32_vec()?;
            same(&format!("{lhs} × {rhs} {dims:?} {accumulation:?}"), &got, &want, n)?;
        }
    }
    Ok(())
}

/// Padding begins behind every element of a vector of codes, in every extent.
fn every_ragged_extent(device: &Device) -> Outcome {
    for extent in 1..=33 {
        for dims in [[2, 3, extent], [extent, 2, 3], [3, extent, 2]] {
            let [m, n, k] = dims;
            let a = quantized([m, k], Encoding::E4M3, 1.0, 1, device)?;
            let b = quantized([n, k], Encoding::E4M3, 1.0, 2, device)?;
            let got = ops::gemm_fp8(&a, &b, None, DType::F32, Accumulation::Split)?;
            let want = Expected::new(&decoded(&a)?, &decoded(&b)?, Layout::Nt, dims, None);
            want.check(&format!("{dims:?}"), &got.to_f32_vec()?, n, DType::F32, device)?;
        }
    }
    Ok(())
}

fn factors_are_applied_one_after_the_other(device: &Device) -> Outcome {
    // Their product is 0 in f32.
    let tensor = |scale_inv: f32| {
        let codes = Tensor::from_vec(vec![0x7Eu8; 16], [1, 16], device)?;
        Fp8Tensor::from_codes(codes, [1, 16], Encoding::E4M3, Tensor::scalar(scale_inv, device)?)
    };
    let (small, large) = (tensor(1e-30)?, tensor(1e-20)?);
    let got = ops::gemm_fp8(&small, &large, None, DType::F32, Accumulation::Split)?.item()?;
    let want = (16.0f32 * 448.0 * 448.0) * 1e-30 * 1e-20;
    // A library may multiply the factors with each other first.
    same("y", &[got], &[if is_hardware(device) && got == 0.0 { 0.0 } else { want }], 1)
}

fn bias_and_output_types(device: &Device) -> Outcome {
    let (a, b) = (
        quantized([17, 33], Encoding::E4M3, 30.0, 1, device)?,
        quantized([31, 33], Encoding::E4M3, 30.0, 2, device)?,
    );
    for (dtype, bias_dtype) in FLOATS.into_iter().flat_map(|d| FLOATS.map(|b| (d, b))) {
        let given = normal([31], bias_dtype, 3, device)?;
        let got = ops::gemm_fp8(&a, &b, Some(&given), dtype, Accumulation::Fast)?;
        // What such an output gets.
        let bias = if bias_dtype == DType::F32 { ops::cast(&given, dtype)? } else { given };
        let added = f64s(&bias)?.repeat(17);
        let want = Expected::new(&decoded(&a)?, &decoded(&b)?, Layout::Nt, [17, 31, 33], Some(&added));
        equal("dtype", got.dtype(), dtype)?;
        want.check(&format!("{dtype}, bias {bias_dtype}"), &got.to_f32_vec()?, 31, dtype, device)?;
        // A library may add in another order for another type.
        if !is_hardware(device) {
            let wide = ops::gemm_fp8(&a, &b, Some(&bias), DType::F32, Accumulation::Fast)?;
            same("one rounding", &got.to_f32_vec()?, &ops::cast(&wide, dtype)?.to_f32_vec()?, 31)?;
        }
    }
    // Sums of every count modulo eight.
    for (n, bias_dtype) in (1..=8).flat_map(|n| FLOATS.map(|b| (n, b))) {
        let a = quantized([1, 5], Encoding::E4M3, 30.0, 1, device)?;
        let b = quantized([n, 5], Encoding::E4M3, 30.0, 2, device)?;
        let bias = normal([n], bias_dtype, 3, device)?;
        let got = ops::gemm_fp8(&a, &b, Some(&bias), DType::F32, Accumulation::Fast)?;
        let want = Expected::new(&decoded(&a)?, &decoded(&b)?, Layout::Nt, [1, n, 5], Some(&f64s(&bias)?));
        want.check(&format!("{n}, bias {bias_dtype}"), &got.to_f32_vec()?, n, DType::F32, device)?;
    }
    Ok(())
}

/// With extents that a library takes and with extents that are padded; where the slot is off, a product that could be
/// quantized is one like any other.
fn an_f32_bias_is_rounded_to_a_16_bit_outputs_type(device: &Device) -> Outcome {
    for (m, n) in [(16, 16), (32, 48), (17, 16), (16, 5), (1, 1)] {
        let ones = |rows: usize, value: f32| {
            let code = Encoding::E4M3.from_f32(value);
            let codes = Tensor::from_vec(vec![code; rows * 2], [rows, 2], device)?;
            Fp8Tensor::from_codes(codes, [rows, 2], Encoding::E4M3, Tensor::scalar(1.0, device)?)
        };
        let (a, b) = (ones(m, 0.5)?, ones(n, 1.0)?);
        for accumulation in [Accumulation::Fast, Accumulation::Split] {
            check_rounded_bias(device, n, |bias, out| ops::gemm_fp8(&a, &b, Some(bias), out, accumulation))?;
        }
        check_rounded_bias(device, n, |bias, out| {
            ops::gemm_fp8_quantize(&a, &b, Some(bias), &Slot::off(Encoding::E4M3), out, Accumulation::Fast)?
                .dequantize(out)
        })?;
    }
    Ok(())
}

/// Sums of every count modulo eight besides.
fn accumulates(device: &Device) -> Outcome {
    for dims in DIMS.into_iter().chain((1..=8).map(|n| [1, n, 5])) {
        let [m, n, k] = dims;
        let a = quantized([m, k], Encoding::E5M2, 30.0, 1, device)?;
        let b = quantized([n, k], Encoding::E4M3, 100.0, 2, device)?;
        let mut out = normal([m, n], DType::F32, 5, device)?;
        let before = f64s(&out)?;
        ops::gemm_fp8_accumulate(&a, &b, &mut out, "dw", ops::Accumulation::Split)?;
        let want = Expected::new(&decoded(&a)?, &decoded(&b)?, Layout::Nt, dims, Some(&before));
        want.check(&format!("{dims:?}"), &out.to_f32_vec()?, n, DType::F32, device)?;
    }
    Ok(())
}

fn fp8_output(device: &Device) -> Outcome {
    // Of the first a library has no kernel, of the others one that writes codes by itself.
    for (dims, [lhs, rhs], encoding) in [
        ([17, 16, 32], PAIRS[0], Encoding::E4M3),
        ([16, 32, 48], PAIRS[0], Encoding::E4M3),
        ([32, 16, 16], PAIRS[2], Encoding::E5M2),
        ([32, 16, 16], PAIRS[0], Encoding::E5M2),
        ([0, 16, 16], PAIRS[0], Encoding::E4M3),
    ] {
        let [m, n, k] = dims;
        let (a, b) = (quantized([m, k], lhs, 30.0, 1, device)?, quantized([n, k], rhs, 30.0, 2, device)?);
        for bias in [None, Some(DType::BF16), Some(DType::F16), Some(DType::F32)] {
            let bias = bias.map(|dtype| normal([n], dtype, 3, device)).transpose()?;
            let what =
                format!("{dims:?} {lhs} × {rhs} → {encoding}, bias {:?}", bias.as_ref().map(Tensor::dtype));
            let values =
                ops::gemm_fp8(&a, &b, bias.as_ref(), DType::F32, Accumulation::Fast)?.to_f32_vec()?;
            let (cell, amax) = (Cell::new(20.0, device)?, Cell::new(REST, device)?);
            let rule = exact(encoding);
            let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
            let got = ops::gemm_fp8_quantize(&a, &b, bias.as_ref(), &slot, DType::BF16, Accumulation::Fast)?;
            let want = oracle::fp8::quantize(&values, encoding, 20.0);
            let got = got.as_fp8().ok_or("want FP8")?;
            let (codes, found) = (got.codes()?, amax.read()?);
            if is_hardware(device) && m > 0 {
                near_codes(&what, got, &values, 20.0)?;
                ensure((found - want.amax).abs() <= 1e-2 * want.amax, || format!("{what}: amax {found}"))?;
            } else {
                same(&what, &codes, &want.codes, n)?;
                same(&format!("{what}: amax"), &[found], &[if m == 0 { REST } else { want.amax }], 1)?;
            }
            same(&what, &[got.scale_inv().item()?], &[1.0 / 20.0], 1)?;
            let turned: Vec<u8> = (0..n * m).map(|i| codes[i % m * n + i / m]).collect();
            same(&format!("{what}: transposed"), &got.transposed()?.codes()?, &turned, m)?;
            // Merged, not overwritten.
            amax.write(1e30)?;
            ops::gemm_fp8_quantize(&a, &b, bias.as_ref(), &slot, DType::BF16, Accumulation::Split)?;
            same(&format!("{what}: a larger amax"), &[amax.read()?], &[1e30], 1)?;
        }
        let off = ops::gemm_fp8_quantize(
            &a,
            &b,
            None,
            &Slot::off(Encoding::E4M3),
            DType::BF16,
            Accumulation::Fast,
        )?;
        equal("dtype where the slot is off", off.as_high().map(Tensor::dtype), Some(DType::BF16))?;
    }
    Ok(())
}

/// Codes of values that another kernel added up: half a step off, and what the sums may be off by.
fn near_codes(what: &str, got: &Fp8Tensor, values: &[f32], scale: f32) -> Outcome {
    let encoding = got.encoding();
    let half_step = if encoding == Encoding::E4M3 { 0.07 } else { 0.14 };
    for (&code, value) in got.codes()?.iter().zip(values) {
        let want = (value * scale).clamp(-encoding.max(), encoding.max());
        let found = encoding.to_f32(code);
        let most = half_step * want.abs() + 0.1;
        ensure((found - want).abs() <= most, || format!("{what}: {found} for {want}"))?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let (a, b) = (
        quantized([257, 1000], Encoding::E4M3, 30.0, 1, device)?,
        quantized([511, 1000], Encoding::E5M2, 30.0, 2, device)?,
    );
    same_bits("[257, 511, 1000]", || Ok(vec![ops::gemm_fp8(&a, &b, None, DType::F32, Accumulation::Fast)?]))
}

fn refuses(device: &Device) -> Outcome {
    let x = |shape, encoding| quantized(shape, encoding, 1.0, 1, device);
    let (e4m3, e5m2) = (Encoding::E4M3, Encoding::E5M2);
    let run = |a: &Fp8Tensor, b: &Fp8Tensor| ops::gemm_fp8(a, b, None, DType::F32, Accumulation::Fast);
    refused(
        run(&x([2, 16], e5m2)?, &x([2, 16], e5m2)?),
        "gemm_fp8: E5M2 × E5M2: FP8 GEMMs take E4M3×E4M3, E4M3×E5M2 and E5M2×E4M3; use E4M3 for one side",
    )?;
    refused(
        run(&x([2, 16], e4m3)?, &x([2, 32], e4m3)?),
        "gemm_fp8: a and b: got [2, 16] and [2, 32]: a · bᵀ needs equal last dimensions",
    )?;
    let mut out = Tensor::zeros([2, 2], DType::F32, device)?;
    refused(
        ops::gemm_fp8_accumulate(
            &x([2, 16], e5m2)?,
            &x([2, 16], e5m2)?,
            &mut out,
            "dw",
            ops::Accumulation::Split,
        ),
        "gemm_fp8_accumulate: E5M2 × E5M2",
    )?;
    let codes = Tensor::zeros([2, 2], DType::F32, device)?;
    refused(
        Fp8Tensor::from_codes(codes, [2, 2], e4m3, Tensor::scalar(1.0, device)?),
        "from_codes: codes has dtype f32: expected u8",
    )
}
