//! Reference of `sum`, `mean`, `max` and `column_sums`.

use super::dispatch::vectorized;
use super::{Floats, accumulate, lanes, parallel};
use crate::host::Array;
use crate::ops::GradientMut;
use crate::{Result, Shape, Tensor};

pub(crate) fn sum(x: &Tensor) -> Result<Tensor> {
    Tensor::scalar(total(x, "sum")? as f32, x.device())
}

pub(crate) fn mean(x: &Tensor) -> Result<Tensor> {
    let mean = total(x, "mean")? / x.numel() as f64;
    Tensor::scalar(mean as f32, x.device())
}

pub(crate) fn max(x: &Tensor) -> Result<Tensor> {
    let parts = pieces(x, "max", |values| {
        // Not `any`, which stops early and so is no vector.
        let nan = values.iter().fold(false, |nan, v| nan | v.is_nan());
        if nan { f32::NAN } else { lanes::max(values) }
    })?;
    let larger = |a: f32, b: f32| if a.is_nan() || a > b { a } else { b };
    Tensor::scalar(parts.into_iter().fold(f32::NEG_INFINITY, larger), x.device())
}

pub(crate) fn column_sums(x: &Tensor) -> Result<Tensor> {
    let [rows, cols] = x.shape().matrix();
    let op = "column_sums";
    let values = Floats::of(x, op, "x")?;
    let parts = parallel::map_rows(rows, cols, |first, last| {
        let (mut scratch, mut sums) = (Vec::new(), Array::zeroed(op, cols)?);
        let values = values.read(first * cols..last * cols, &mut scratch);
        add_rows(&mut sums, values);
        Ok(sums)
    });
    Ok(Tensor::on_cpu(parallel::sum_in_order(op, parts, cols)?, Shape::from([cols]), x.device()))
}

pub(crate) fn column_sums_into(x: &Tensor, out: &mut GradientMut<'_>) -> Result<()> {
    accumulate::fill(out, &column_sums(x)?)
}

/// `sums += row` for each row of `values`, from the first on.
#[inline(always)]
pub(crate) fn add_rows(sums: &mut [f32], values: &[f32]) {
    for row in values.chunks_exact(sums.len().max(1)) {
        sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
    }
}

/// f32 within a piece, f64 over the pieces: millions of values lose no more than a piece does.
fn total(x: &Tensor, op: &'static str) -> Result<f64> {
    let parts = pieces(x, op, lanes::sum)?;
    Ok(parts.into_iter().map(f64::from).sum())
}

fn pieces(x: &Tensor, op: &'static str, f: impl Fn(&[f32]) -> f32 + Sync) -> Result<Vec<f32>> {
    let values = Floats::of(x, op, "x")?;
    let len = x.numel();
    let piece = |start: usize| {
        let end = len.min(start + parallel::CHUNK);
        vectorized(|| f(values.read(start..end, &mut Vec::new())))
    };
    Ok(parallel::map((0..len).step_by(parallel::CHUNK), piece))
}
