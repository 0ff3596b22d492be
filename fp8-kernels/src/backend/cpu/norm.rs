//! Reference of `norm` and its gradients. Sums of a row run in sixteen lanes; sums over rows as in `reduce`.

use super::dispatch::{Kernel, vectorized};
use super::quantize::{Rows, quantize_rows};
use super::{Buffer, Floats, accumulate, lanes, parallel};
use crate::host::{self, Array};
use crate::ops::{GradientMut, Norm, NormOptions, NormStats};
use crate::{Operand, Result, Shape, Slot, Tensor};

/// A row's `[μ, rsigma]`; RMSNorm's μ is 0.
type RowStats = [f32; 2];

pub(crate) fn norm(
    x: &Tensor,
    gamma: &Tensor,
    beta: Option<&Tensor>,
    options: &NormOptions,
    slot: &Slot<'_>,
) -> Result<(Operand, NormStats)> {
    let values = Floats::of(x, "norm", "x")?;
    let op = "norm";
    let [rows, cols] = x.shape().matrix();
    let stats = statistics(x, values, options)?;
    let gamma = factor(gamma, options)?;
    let beta = beta.map(|beta| beta.cpu_f32("norm")).transpose()?;
    let centered = options.normalization == Norm::LayerNorm;
    let produce = |first: usize, out: &mut [f32]| {
        let mut scratch = Vec::new();
        let x = values.read(first * cols..first * cols + out.len(), &mut scratch);
        let (gamma, beta, stats) = (&gamma[..], beta.as_deref(), &stats[first..]);
        vectorized(Forward { x, gamma, beta, centered, stats, out });
    };
    let produced = Rows { op, shape: *x.shape(), device: x.device(), dtype: x.dtype(), produce };
    let (y, _) = quantize_rows(&produced, slot, false)?;
    let tensor = |part: usize| -> Result<Tensor> {
        let values = match cols {
            0 => Array::zeroed(op, rows)?,
            _ => Array::collect(op, stats.iter().map(|row| row[part]))?,
        };
        Ok(Tensor::on_cpu(values, Shape::from([rows]), x.device()))
    };
    Ok((y, NormStats { mean: centered.then(|| tensor(0)).transpose()?, rsigma: tensor(1)? }))
}

pub(crate) fn norm_backward(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "norm_backward";
    let (values, gradients) = (Floats::of(x, op, "x")?, Floats::of(dy, op, "dy")?);
    let residual = residual.map(|residual| Floats::of(residual, op, "residual")).transpose()?;
    let gamma = factor(gamma, options)?;
    let rsigma = stats.rsigma.as_slice::<f32>()?;
    let mean = stats.mean.as_ref().map(Tensor::as_slice::<f32>).transpose()?;
    let [_, cols] = x.shape().matrix();
    let mut dx = Array::for_overwrite(op, x.numel())?;
    let parts = parallel::map_rows_mut(&mut dx, cols, |first, dx| {
        let range = first * cols..first * cols + dx.len();
        let (mut x, mut dy) = (Vec::new(), Vec::new());
        let (x, dy) = (values.read(range.clone(), &mut x), gradients.read(range, &mut dy));
        let (gamma, rsigma, mean) = (&gamma[..], &rsigma[first..], mean.map(|mean| &mean[first..]));
        let sums = vectorized(Backward { dy, x, gamma, rsigma, mean, dx: &mut *dx });
        if let Some(residual) = residual {
            let mut scratch = Vec::new();
            let rows = residual.read(first * cols..first * cols + dx.len(), &mut scratch);
            dx.iter_mut().zip(rows).for_each(|(dx, residual)| *dx += residual);
        }
        sums
    });
    let width = if mean.is_some() { 2 * cols } else { cols };
    let sums = parallel::sum_in_order(op, parts, width)?;
    let (dgamma, dbeta) = sums.split_at(cols);
    let tensor = |sums| -> Result<Tensor> {
        Ok(Tensor::on_cpu(Array::copied(op, sums)?, Shape::from([cols]), x.device()))
    };
    let dx = Tensor::from_buffer(Buffer::from_f32(dx, x.dtype(), op)?, *x.shape(), x.device());
    Ok((dx, tensor(dgamma)?, mean.is_some().then(|| tensor(dbeta)).transpose()?))
}

#[expect(clippy::too_many_arguments, reason = "those of the operation")]
pub(crate) fn norm_backward_into(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
    dgamma: Option<&mut GradientMut<'_>>,
    mut dbeta: Option<&mut GradientMut<'_>>,
) -> Result<Tensor> {
    let (dx, gamma_sums, beta_sums) = norm_backward(dy, x, gamma, stats, options, residual)?;
    // Both can be written, or neither is.
    if let Some(dbeta) = &mut dbeta {
        dbeta.tensor.as_mut_slice::<f32>(dbeta.name)?;
    }
    if let Some(dgamma) = dgamma {
        accumulate::fill(dgamma, &gamma_sums)?;
    }
    if let (Some(dbeta), Some(sums)) = (dbeta, beta_sums) {
        accumulate::fill(dbeta, &sums)?;
    }
    Ok(dx)
}

/// None where there are no columns.
fn statistics(x: &Tensor, values: Floats<'_>, options: &NormOptions) -> Result<Vec<RowStats>> {
    let [rows, cols] = x.shape().matrix();
    let mut stats = host::room("norm", if cols == 0 { 0 } else { rows })?;
    let pieces = parallel::map_rows(rows, cols, |first, last| {
        let mut scratch = Vec::new();
        let x = values.read(first * cols..last * cols, &mut scratch);
        vectorized(Statistics { x, cols, options })
    });
    for piece in pieces {
        stats.extend(piece?);
    }
    Ok(stats)
}

/// γ, or 1 + γ.
fn factor(gamma: &Tensor, options: &NormOptions) -> Result<Array<f32>> {
    let mut gamma = Array::copied("norm", &gamma.cpu_f32("norm")?)?;
    if options.zero_centered_gamma {
        gamma.iter_mut().for_each(|g| *g += 1.0);
    }
    Ok(gamma)
}

/// Rows of the output, from their statistics.
struct Forward<'a> {
    x: &'a [f32],
    gamma: &'a [f32],
    beta: Option<&'a [f32]>,
    centered: bool,
    stats: &'a [RowStats],
    out: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let cols = self.gamma.len();
        let rows = self.out.chunks_exact_mut(cols).zip(self.x.chunks_exact(cols)).zip(self.stats);
        for ((out, x), &[mean, rsigma]) in rows {
            let columns = out.iter_mut().zip(x.iter().zip(self.gamma));
            match self.beta {
                Some(beta) => {
                    columns.zip(beta).for_each(|((o, (x, &g)), &b)| *o = ((x - mean) * rsigma).mul_add(g, b))
                }
                None if self.centered => columns.for_each(|(o, (x, g))| *o = (x - mean) * rsigma * g),
                None => columns.for_each(|(o, (x, g))| *o = x * rsigma * g),
            }
        }
    }
}

/// Rows of dx; returns their sums, dγ and, where there are means, dβ behind it.
struct Backward<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    gamma: &'a [f32],
    rsigma: &'a [f32],
    mean: Option<&'a [f32]>,
    dx: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = Result<Array<f32>>;

    #[inline(always)]
    fn run(self) -> Result<Array<f32>> {
        let Self { dy, x, gamma, rsigma, mean, dx } = self;
        let cols = gamma.len();
        let per_column = 1.0 / cols as f32;
        let op = "norm_backward";
        let mut sums = Array::zeroed(op, if mean.is_some() { 2 * cols } else { cols })?;
        let (dgamma, dbeta) = sums.split_at_mut(cols);
        let (mut normed, mut scaled) = (Array::for_overwrite(op, cols)?, Array::for_overwrite(op, cols)?);
        let rows = dx.chunks_exact_mut(cols).zip(x.chunks_exact(cols).zip(dy.chunks_exact(cols)));
        for (row, (dx, (x, dy))) in rows.enumerate() {
            let (mu, rsigma) = (mean.map_or(0.0, |mean| mean[row]), rsigma[row]);
            let columns = normed.iter_mut().zip(scaled.iter_mut()).zip(dgamma.iter_mut());
            for (((n, s), sum), ((x, dy), g)) in columns.zip(x.iter().zip(dy).zip(gamma)) {
                *n = (x - mu) * rsigma;
                *s = dy * g;
                *sum = dy.mul_add(*n, *sum);
            }
            dbeta.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            let along = per_column * lanes::dot(&scaled, &normed);
            let level = mean.map_or(0.0, |_| per_column * lanes::sum(&scaled));
            let columns = dx.iter_mut().zip(scaled.iter().zip(&normed[..]));
            columns.for_each(|(dx, (s, n))| *dx = n.mul_add(-along, s - level) * rsigma);
        }
        Ok(sums)
    }
}

/// Statistics of rows.
struct Statistics<'a> {
    x: &'a [f32],
    cols: usize,
    options: &'a NormOptions,
}

impl Kernel for Statistics<'_> {
    type Output = Result<Vec<RowStats>>;

    #[inline(always)]
    fn run(self) -> Result<Vec<RowStats>> {
        let count = self.cols as f32;
        let mut stats = host::room("norm", self.x.len() / self.cols)?;
        for x in self.x.chunks_exact(self.cols) {
            let mean = match self.options.normalization {
                Norm::LayerNorm => lanes::sum(x) / count,
                Norm::RmsNorm => 0.0,
            };
            let variance = lanes::sum_by(x, |x| (x - mean) * (x - mean)) / count;
            stats.push([mean, 1.0 / (variance + self.options.eps).sqrt()]);
        }
        Ok(stats)
    }
}
