//! Reference of `cross_entropy`.

use super::floats::{Floats, build};
use super::softmax::{exponentials, origin};
use super::{dispatch, parallel};
use crate::host::{self, Array};
use crate::ops::{CrossEntropyOptions, CrossEntropySaved, Factor};
use crate::{Error, Result, Shape, Tensor, math};

pub(crate) fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    let op = "cross_entropy";
    let [rows, vocabulary] = logits.shape().matrix();
    let targets = columns(op, targets, vocabulary, options)?;
    let data = Floats::of(logits, op, "logits")?;
    // Of each piece: maximum and sum of its rows, and its part of the loss.
    let pieces = parallel::map_rows(rows, vocabulary.max(1), |first, last| {
        let (mut scratch, mut values) = (Vec::new(), Array::for_overwrite(op, vocabulary)?);
        let (mut stats, mut loss) = (host::room(op, last - first)?, 0.0);
        for (row, target) in (first..last).zip(&targets[first..last]) {
            let &Some(target) = target else {
                stats.push((0.0, 1.0));
                continue;
            };
            let logits = data.read(row * vocabulary..(row + 1) * vocabulary, &mut scratch);
            values.copy_from_slice(logits);
            let (max, sum) = exponentials(&mut values);
            loss += f64::from(sum).ln() + (f64::from(origin(max)) - f64::from(logits[target]));
            stats.push((max, sum));
        }
        Ok((stats, loss))
    });
    let pieces = pieces.into_iter().collect::<Result<Vec<_>>>()?;
    let count = targets.iter().flatten().count();
    // In the order of the pieces, which depends on the shape alone.
    let sum: f64 = pieces.iter().map(|(_, loss)| loss).sum();
    let loss = if count == 0 { 0.0 } else { sum / divisor(options, count) };
    let (mut row_max, mut row_sum) = (Array::zeroed(op, rows)?, Array::zeroed(op, rows)?);
    let stats = pieces.iter().flat_map(|(stats, _)| stats);
    for ((row_max, row_sum), (max, sum)) in row_max.iter_mut().zip(row_sum.iter_mut()).zip(stats) {
        (*row_max, *row_sum) = (*max, *sum);
    }
    let device = logits.device();
    let stats = |data: Array<f32>| Tensor::on_cpu(data, Shape::from([rows]), device);
    let count = Tensor::on_cpu(vec![i32::try_from(count).unwrap_or(i32::MAX)], Shape::from([]), device);
    let saved = CrossEntropySaved { row_max: stats(row_max), row_sum: stats(row_sum), count };
    Ok((Tensor::scalar(loss as f32, device)?, saved))
}

pub(crate) fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: Factor<'_>,
) -> Result<Tensor> {
    let op = "cross_entropy_backward";
    let vocabulary = logits.shape().last_dim();
    let targets = columns(op, targets, vocabulary, options)?;
    let data = Floats::of(logits, op, "logits")?;
    let (max, sum) = (saved.row_max.as_slice::<f32>()?, saved.row_sum.as_slice::<f32>()?);
    let count = targets.iter().flatten().count();
    let loss_scale = match loss_scale {
        Factor::Given(scale) => scale,
        Factor::OnDevice(cell) => cell.read()?,
    };
    let factor = (f64::from(loss_scale) / divisor(options, count)) as f32;
    let step = parallel::row_elements(vocabulary);
    build(op, *logits.shape(), logits.dtype(), logits.device(), step, |first, out| {
        let mut scratch = Vec::new();
        let logits = data.read(first..first + out.len(), &mut scratch).chunks_exact(vocabulary.max(1));
        for (i, (out, logits)) in out.chunks_exact_mut(vocabulary.max(1)).zip(logits).enumerate() {
            let row = first / vocabulary.max(1) + i;
            let Some(target) = targets[row] else {
                out.fill(0.0);
                continue;
            };
            let origin = origin(max[row]);
            dispatch::vectorized(Backward { logits, target, origin, sum: sum[row], factor, out });
        }
    })
}

/// One row.
struct Backward<'a> {
    logits: &'a [f32],
    target: usize,
    origin: f32,
    sum: f32,
    factor: f32,
    out: &'a mut [f32],
}

impl dispatch::Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let inverse = 1.0 / self.sum;
        let probability = |v: f32| math::exp(v - self.origin) * inverse;
        for (o, &v) in self.out.iter_mut().zip(self.logits) {
            *o = probability(v) * self.factor;
        }
        // From the probability itself: p − 1 is exact where p is near 1, factor·p − factor is not.
        self.out[self.target] = (probability(self.logits[self.target]) - 1.0) * self.factor;
    }
}

fn divisor(options: &CrossEntropyOptions, count: usize) -> f64 {
    options.normalizer.map_or(count as f64, f64::from)
}

/// The targets as columns; `None` where one is ignored.
fn columns(
    op: &'static str,
    targets: &Tensor,
    vocabulary: usize,
    options: &CrossEntropyOptions,
) -> Result<Vec<Option<usize>>> {
    let column = |(position, &target): (usize, &i32)| {
        if options.ignore_index == Some(target) {
            return Ok(None);
        }
        let column = usize::try_from(target).ok().filter(|&column| column < vocabulary);
        let value = target.into();
        column.map(Some).ok_or(Error::Index { op, what: "target", value, position, limit: vocabulary })
    };
    host::try_collect(op, targets.as_slice::<i32>()?.iter().enumerate().map(column))
}
