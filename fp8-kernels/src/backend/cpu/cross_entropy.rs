//! Reference of `cross_entropy`.

use super::floats::{Floats, build};
use super::softmax::{exponentials, origin};
use super::{dispatch, parallel};
use crate::host::{self, Array};
use crate::ops::{CrossEntropyOptions, CrossEntropyPart, CrossEntropySaved, Factor, Part};
use crate::{Error, Result, Shape, Tensor, math};

/// The largest logit of each row, the sum of exponentials relative to it, and the target's logit or 0.
pub(crate) fn rows(
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyPart> {
    let op = "cross_entropy";
    let [rows, columns] = logits.shape().matrix();
    let targets = targets_of(op, targets, part.total, options)?;
    let data = Floats::of(logits, op, "logits")?;
    let pieces = parallel::map_rows(rows, columns.max(1), |first, last| {
        let (mut scratch, mut values) = (Vec::new(), Array::for_overwrite(op, columns)?);
        let mut stats = host::room(op, last - first)?;
        for (row, target) in (first..last).zip(&targets[first..last]) {
            let &Some(target) = target else {
                stats.push([0.0, 1.0, 0.0]);
                continue;
            };
            let logits = data.read(row * columns..(row + 1) * columns, &mut scratch);
            values.copy_from_slice(logits);
            let (max, sum) = exponentials(&mut values);
            let own = target.checked_sub(part.first).and_then(|column| logits.get(column));
            stats.push([max, sum, own.copied().unwrap_or(0.0)]);
        }
        Ok(stats)
    });
    let pieces = pieces.into_iter().collect::<Result<Vec<_>>>()?;
    let (mut row_max, mut sums) = (Array::zeroed(op, rows)?, Array::zeroed(op, 2 * rows)?);
    let (sum, logit) = sums.split_at_mut(rows);
    for (row, &stats) in pieces.iter().flatten().enumerate() {
        [row_max[row], sum[row], logit[row]] = stats;
    }
    let device = logits.device();
    let row_max = Tensor::on_cpu(row_max, Shape::from([rows]), device);
    Ok(CrossEntropyPart { row_max, sums: Tensor::on_cpu(sums, Shape::from([2, rows]), device) })
}

/// A part's sums, relative to other maxima.
pub(crate) fn part_sums(part: &CrossEntropyPart, row_max: &Tensor) -> Result<Tensor> {
    let mut sums = Array::copied("cross_entropy", part.sums.as_slice::<f32>()?)?;
    let maxima = part.row_max.as_slice::<f32>()?.iter().zip(row_max.as_slice::<f32>()?);
    for (sum, (&own, &max)) in sums.iter_mut().zip(maxima) {
        *sum *= math::exp(own - origin(max));
    }
    Ok(Tensor::on_cpu(sums, *part.sums.shape(), row_max.device()))
}

/// The loss of the rows' numbers, those of a whole row each.
pub(crate) fn cross_entropy(
    row_max: &Tensor,
    sums: &Tensor,
    targets: &Tensor,
    total: usize,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    let op = "cross_entropy";
    let targets = targets_of(op, targets, total, options)?;
    let (max, (sum, logit)) = (row_max.as_slice::<f32>()?, sums.as_slice::<f32>()?.split_at(targets.len()));
    let mut row_sum = Array::filled(op, 1.0f32, targets.len())?;
    let (mut loss, mut count) = (0.0, 0);
    for (row, _) in targets.iter().enumerate().filter(|(_, target)| target.is_some()) {
        loss += f64::from(sum[row]).ln() + (f64::from(origin(max[row])) - f64::from(logit[row]));
        row_sum[row] = sum[row];
        count += 1;
    }
    let loss = if count == 0 { 0.0 } else { loss / divisor(options, count) };
    let device = row_max.device();
    let row_sum = Tensor::on_cpu(row_sum, Shape::from([targets.len()]), device);
    let count = Tensor::on_cpu(vec![i32::try_from(count).unwrap_or(i32::MAX)], Shape::from([]), device);
    let saved = CrossEntropySaved { row_max: row_max.clone(), row_sum, count };
    Ok((Tensor::scalar(loss as f32, device)?, saved))
}

pub(crate) fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    part: Part,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    loss_scale: Factor<'_>,
) -> Result<Tensor> {
    let op = "cross_entropy_backward";
    let columns = logits.shape().last_dim();
    let targets = targets_of(op, targets, part.total, options)?;
    let data = Floats::of(logits, op, "logits")?;
    let (max, sum) = (saved.row_max.as_slice::<f32>()?, saved.row_sum.as_slice::<f32>()?);
    let count = targets.iter().flatten().count();
    let loss_scale = match loss_scale {
        Factor::Given(scale) => scale,
        Factor::OnDevice(cell) => cell.read()?,
    };
    let factor = (f64::from(loss_scale) / divisor(options, count)) as f32;
    let step = parallel::row_elements(columns);
    build(op, *logits.shape(), logits.dtype(), logits.device(), step, |first, out| {
        let mut scratch = Vec::new();
        let logits = data.read(first..first + out.len(), &mut scratch).chunks_exact(columns.max(1));
        for (i, (out, logits)) in out.chunks_exact_mut(columns.max(1)).zip(logits).enumerate() {
            let row = first / columns.max(1) + i;
            let Some(target) = targets[row] else {
                out.fill(0.0);
                continue;
            };
            let (target, origin) = (target.checked_sub(part.first), origin(max[row]));
            dispatch::vectorized(Backward { logits, target, origin, sum: sum[row], factor, out });
        }
    })
}

/// One row.
struct Backward<'a> {
    logits: &'a [f32],
    /// The target's column, which may be beyond those of a part; `None` where it is before them.
    target: Option<usize>,
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
        let Some(target) = self.target else { return };
        if let (Some(o), Some(&v)) = (self.out.get_mut(target), self.logits.get(target)) {
            // From the probability itself: p − 1 is exact where p is near 1, factor·p − factor is not.
            *o = (probability(v) - 1.0) * self.factor;
        }
    }
}

fn divisor(options: &CrossEntropyOptions, count: usize) -> f64 {
    options.normalizer.map_or(count as f64, f64::from)
}

/// The targets as columns of the whole rows; `None` where one is ignored.
fn targets_of(
    op: &'static str,
    targets: &Tensor,
    total: usize,
    options: &CrossEntropyOptions,
) -> Result<Vec<Option<usize>>> {
    let column = |(position, &target): (usize, &i32)| {
        if options.ignore_index == Some(target) {
            return Ok(None);
        }
        let column = usize::try_from(target).ok().filter(|&column| column < total);
        let value = target.into();
        column.map(Some).ok_or(Error::Index { op, what: "target", value, position, limit: total })
    };
    host::try_collect(op, targets.as_slice::<i32>()?.iter().enumerate().map(column))
}
