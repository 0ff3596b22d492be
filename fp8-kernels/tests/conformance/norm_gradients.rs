//! Gradients of norms of bf16 tensors by the kernels that load rows ahead, against the same gradients in f32, which another
//! kernel computes: equal bits.

use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{normal, tensor};
use super::gradient::{self, check};
use super::norm::{NORMS, options};
use fp8_kernels::ops::{GradientMut, Norm, NormOptions, NormStats};
use fp8_kernels::{DType, Device, Encoding, Slot, Tensor, ops};

cases![of_bf16, of_mixed_types, of_special_values, written_and_added];

/// Blocks of one to thirty-two warps, columns that fill them and that do not, and more rows than blocks.
const SHAPES: [[usize; 2]; 9] =
    [[1, 8], [200, 8], [70, 248], [70, 256], [20, 1032], [37, 2048], [9, 4104], [9, 8184], [9, 8192]];

struct Gradients {
    dx: Tensor,
    dgamma: Vec<f32>,
    dbeta: Option<Vec<f32>>,
}

fn gradients(
    [dy, x, gamma]: [&Tensor; 3],
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
) -> Result<Gradients, libtest_mimic::Failed> {
    let (dx, dgamma, dbeta) = match residual {
        None => ops::norm_backward(dy, x, gamma, stats, options)?,
        Some(residual) => ops::norm_backward_add(dy, x, gamma, stats, options, residual)?,
    };
    Ok(Gradients {
        dx,
        dgamma: dgamma.to_f32_vec()?,
        dbeta: dbeta.map(|dbeta| dbeta.to_f32_vec()).transpose()?,
    })
}

/// The gradients of these tensors, and the same with dy, x and the residual in f32.
fn compare(
    what: &str,
    norm: Norm,
    [dy, x, gamma]: [&Tensor; 3],
    residual: Option<&Tensor>,
    zero_centered_gamma: bool,
) -> Outcome {
    let options = NormOptions { zero_centered_gamma, ..options(norm) };
    let (_, stats) = ops::norm(x, gamma, None, &options, &Slot::off(Encoding::E4M3))?;
    let wide = |tensor: &Tensor| ops::cast(tensor, DType::F32);
    let wide_residual = residual.map(wide).transpose()?;
    let want = gradients([&wide(dy)?, &wide(x)?, gamma], &stats, &options, wide_residual.as_ref())?;
    let got = gradients([dy, x, gamma], &stats, &options, residual)?;
    let (shape, cols) = (*x.shape(), x.shape().last_dim());
    let rounded = tensor(want.dx.to_f32_vec()?, [shape.matrix()[0], cols], x.dtype(), x.device())?;
    same(&format!("{what}: dx"), &got.dx.to_f32_vec()?, &rounded.to_f32_vec()?, cols)?;
    same(&format!("{what}: dgamma"), &got.dgamma, &want.dgamma, cols)?;
    equal(what, got.dbeta.is_some(), norm == Norm::LayerNorm)?;
    match (got.dbeta, want.dbeta) {
        (Some(got), Some(want)) => same(&format!("{what}: dbeta"), &got, &want, cols),
        _ => Ok(()),
    }
}

fn of_bf16(device: &Device) -> Outcome {
    for (i, (norm, shape)) in SHAPES.into_iter().flat_map(|shape| NORMS.map(|n| (n, shape))).enumerate() {
        let tensors = |seed| normal(shape, DType::BF16, seed, device);
        let (dy, x, residual) = (tensors(1)?, tensors(2)?, tensors(3)?);
        let gamma = normal([shape[1]], [DType::F32, DType::BF16][i / 2 % 2], 4, device)?;
        for (residual, around_one) in [(None, false), (Some(&residual), i % 4 < 2)] {
            let what = format!("{norm} {shape:?}, residual {}", residual.is_some());
            compare(&what, norm, [&dy, &x, &gamma], residual, around_one)?;
        }
    }
    Ok(())
}

/// Those of which one is not bf16.
fn of_mixed_types(device: &Device) -> Outcome {
    use DType::{BF16, F16, F32};
    let shape = [70, 264];
    for (dy, x, residual) in [(F16, BF16, BF16), (BF16, F32, BF16), (BF16, BF16, F32), (BF16, BF16, F16)] {
        let make = |dtype, seed| normal(shape, dtype, seed, device);
        let (dy, x, residual) = (make(dy, 1)?, make(x, 2)?, make(residual, 3)?);
        let gamma = normal([shape[1]], F32, 4, device)?;
        for norm in NORMS {
            let what = format!("{norm} dy {} x {} residual {}", dy.dtype(), x.dtype(), residual.dtype());
            compare(&what, norm, [&dy, &x, &gamma], Some(&residual), false)?;
        }
    }
    Ok(())
}

/// Infinities and NaN in dy and in x, whose rows and columns alone feel them.
fn of_special_values(device: &Device) -> Outcome {
    let (rows, cols) = (12, 264);
    let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 3e38, 1e-38];
    let mut values = normal([rows, cols], DType::F32, 1, device)?.to_f32_vec()?;
    for (row, special) in specials.into_iter().enumerate() {
        values[2 * row * cols + 37 * row] = special;
    }
    let special = tensor(values, [rows, cols], DType::BF16, device)?;
    let plain = normal([rows, cols], DType::BF16, 2, device)?;
    let gamma = normal([cols], DType::F32, 4, device)?;
    for norm in NORMS {
        compare(&format!("{norm}, dy"), norm, [&special, &plain, &gamma], None, false)?;
        compare(&format!("{norm}, x"), norm, [&plain, &special, &gamma], Some(&plain), false)?;
        compare(&format!("{norm}, residual"), norm, [&plain, &plain, &gamma], Some(&special), false)?;
    }
    Ok(())
}

/// Both gradients, the one while the other is overwritten or absent, and none.
fn written_and_added(device: &Device) -> Outcome {
    for (norm, shape) in gradient::SHAPES.into_iter().flat_map(|s| NORMS.map(|n| (n, s))) {
        let (x, dy) = (normal(shape, DType::BF16, 1, device)?, normal(shape, DType::BF16, 2, device)?);
        let (gamma, options) = (normal([shape[1]], DType::F32, 3, device)?, options(norm));
        let (_, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
        for residual in [None, Some(&dy)] {
            let (want, dgamma, dbeta) = match residual {
                None => ops::norm_backward(&dy, &x, &gamma, &stats, &options)?,
                Some(residual) => ops::norm_backward_add(&dy, &x, &gamma, &stats, &options, residual)?,
            };
            let want = want.to_f32_vec()?;
            let backward = |gamma_out: Option<&mut GradientMut<'_>>,
                            beta_out: Option<&mut GradientMut<'_>>| {
                let got = ops::norm_backward_into(
                    &dy, &x, &gamma, &stats, &options, residual, gamma_out, beta_out,
                )?;
                same("dx", &got.to_f32_vec()?, &want, shape[1])
            };
            let what = format!("{norm} {shape:?}, residual {}", residual.is_some());
            backward(None, None)?;
            check(&format!("{what}: dgamma alone"), &dgamma, |out| backward(Some(out), None))?;
            let Some(dbeta) = dbeta else { continue };
            check(&format!("{what}: dbeta alone"), &dbeta, |out| backward(None, Some(out)))?;
            let zeros = || Tensor::zeros([shape[1]], DType::F32, device);
            for update in [ops::Update::Write, ops::Update::Add] {
                let (mut other, what) = (zeros()?, format!("{what}, the other {update:?}"));
                check(&format!("{what}: dgamma"), &dgamma, |out| {
                    let mut other = zeros()?;
                    backward(Some(out), Some(&mut GradientMut::new(&mut other, "b", update)))?;
                    same("dbeta", &other.to_f32_vec()?, &positive_zeros(&dbeta)?, shape[1])
                })?;
                check(&format!("{what}: dbeta"), &dbeta, |out| {
                    let mut other = zeros()?;
                    backward(Some(&mut GradientMut::new(&mut other, "g", update)), Some(out))?;
                    same("dgamma", &other.to_f32_vec()?, &positive_zeros(&dgamma)?, shape[1])
                })?;
                backward(Some(&mut GradientMut::new(&mut other, "g", update)), None)?;
            }
        }
    }
    Ok(())
}

/// Sums of zero rows and of zeros may be -0, which is +0 once it is added to +0: no value here is one.
fn positive_zeros(sums: &Tensor) -> Result<Vec<f32>, libtest_mimic::Failed> {
    Ok(sums.to_f32_vec()?.into_iter().map(|sum| sum + 0.0).collect())
}
