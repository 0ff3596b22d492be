//! Norms of rows with zeros, subnormals, the largest values, infinities and NaN.

use super::case::{Outcome, cases};
use super::compare::{close, ensure};
use super::data::{Random, extremes, f64s, normal, rounded, special_rows, specials, tensor, tolerance};
use super::norm::{NORMS, options};
use crate::oracle::{differences, norm as oracle};
use fp8_kernels::ops::Norm;
use fp8_kernels::{DType, Device, Encoding, Slot, Tensor, ops};

cases![
    the_oracles_agree,
    special_values: Dtypes,
    gradients_of_special_values: Dtypes,
    special_gradients: Dtypes,
];

/// The short form of the gradient, and the whole Jacobian.
fn the_oracles_agree(_: &Device) -> Outcome {
    let mut random = Random::new(1);
    let mut values = || random.normals(13).into_iter().map(f64::from).collect::<Vec<_>>();
    let (x, dy, gamma) = (values(), values(), values());
    for centered in [false, true] {
        let whole = oracle::backward(&dy, &x, &gamma, 1e-5, centered);
        let short = oracle::backward_of_row(&dy, &x, &gamma, 1e-5, centered);
        for (whole, short) in whole.iter().zip(&short) {
            let distance = differences::distance(whole, short);
            ensure(distance < 1e-12, || format!("distance {distance:e}"))?;
        }
    }
    Ok(())
}

/// Rows of warps and of blocks, held in registers and read again, with a special value in each.
fn special_shapes() -> [(usize, Vec<f32>); 5] {
    [
        (17, specials()),
        (40, specials()),
        (1025, extremes()),
        (1032, extremes()),
        (8200, vec![f32::NAN, f32::MAX]),
    ]
}

fn special_values(device: &Device, dtype: DType) -> Outcome {
    for (norm, (cols, specials)) in NORMS.into_iter().flat_map(|n| special_shapes().map(|s| (n, s))) {
        let x = tensor(special_rows(&specials, cols, 1), [specials.len(), cols], dtype, device)?;
        let (gamma, centered) = (normal([cols], DType::F32, 2, device)?, norm == Norm::LayerNorm);
        let (y, stats) = ops::norm(&x, &gamma, None, &options(norm), &Slot::off(Encoding::E4M3))?;
        let (values, gamma, eps) = (f64s(&x)?, f64s(&gamma)?, f64::from(1e-5f32));
        let want = values.chunks(cols).flat_map(|row| oracle::forward(row, &gamma, None, eps, centered));
        let (what, [rtol, atol]) = (format!("{norm}, {cols} columns"), tolerance(dtype));
        let want = rounded(want.collect(), dtype)?;
        close(&what, &y.dequantize(dtype)?.to_f32_vec()?, &want, cols, [rtol.max(5e-6), atol])?;
        let rsigmas: Vec<f64> =
            values.chunks(cols).map(|row| oracle::statistics(row, eps, centered).1).collect();
        close(&format!("{what}: rsigma"), &stats.rsigma.to_f32_vec()?, &rsigmas, 1, [5e-5, 0.0])?;
    }
    Ok(())
}

/// dx of rows with a special value each in x.
fn gradients_of_special_values(device: &Device, dtype: DType) -> Outcome {
    for (norm, (cols, specials)) in NORMS.into_iter().flat_map(|n| special_shapes().map(|s| (n, s))) {
        let shape = [specials.len(), cols];
        let x = tensor(special_rows(&specials, cols, 1), shape, dtype, device)?;
        special_backward(norm, &x, &normal(shape, DType::F32, 3, device)?, &[])?;
    }
    Ok(())
}

/// In dy, each in a column of its own, whose dγ and dβ alone feel it. Of the largest, products overflow on the way.
fn special_gradients(device: &Device, dtype: DType) -> Outcome {
    let finite = |specials: Vec<f32>| specials.into_iter().filter(|v| v.abs() != f32::MAX).collect();
    for (norm, (cols, specials)) in NORMS.into_iter().flat_map(|n| special_shapes().map(|s| (n, s))) {
        let specials: Vec<f32> = finite(specials);
        let shape = [specials.len(), cols];
        let dy = tensor(special_rows(&specials, cols, 1), shape, dtype, device)?;
        special_backward(norm, &normal(shape, DType::F32, 3, device)?, &dy, &specials)?;
    }
    Ok(())
}

/// All gradients against the oracle; dγ and dβ where `specials` are dy's, in as many rows.
fn special_backward(norm: Norm, x: &Tensor, dy: &Tensor, specials: &[f32]) -> Outcome {
    let (device, [rows, cols], centered) = (x.device(), x.shape().matrix(), norm == Norm::LayerNorm);
    let (gamma, options) = (normal([cols], DType::F32, 2, device)?, options(norm));
    let (_, stats) = ops::norm(x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
    let (dx, dgamma, dbeta) = ops::norm_backward(dy, x, &gamma, &stats, &options)?;
    let (x_values, dy_values, gamma) = (f64s(x)?, f64s(dy)?, f64s(&gamma)?);
    let (mut want, mut sums) = (Vec::new(), [vec![0.0; cols], vec![0.0; cols]]);
    for (x, dy) in x_values.chunks(cols).zip(dy_values.chunks(cols)) {
        let [dx, shares @ ..] = oracle::backward_of_row(dy, x, &gamma, f64::from(options.eps), centered);
        want.extend(dx);
        for (sums, shares) in sums.iter_mut().zip(shares) {
            sums.iter_mut().zip(shares).for_each(|(sum, v)| *sum += v);
        }
    }
    let (what, rtol) =
        (format!("{norm} {} of {} [{rows}, {cols}]", dy.dtype(), x.dtype()), tolerance(x.dtype())[0]);
    close(
        &format!("{what}: dx"),
        &dx.to_f32_vec()?,
        &rounded(want, x.dtype())?,
        cols,
        [rtol.max(5e-4), 5e-4],
    )?;
    if specials.is_empty() {
        return Ok(());
    }
    let near = [5e-4, 5e-4 * (rows as f64).sqrt()];
    let [gammas, betas] = sums;
    close(&format!("{what}: dgamma"), &dgamma.to_f32_vec()?, &rounded(gammas, DType::F32)?, cols, near)?;
    dbeta.map_or(Ok(()), |dbeta| close(&what, &dbeta.to_f32_vec()?, &rounded(betas, DType::F32)?, cols, near))
}
