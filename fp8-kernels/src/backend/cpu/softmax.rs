//! Reference of `softmax`.

use super::floats::{Floats, build};
use super::{dispatch, lanes, parallel};
use crate::{Result, Shape, Tensor, math};

pub(crate) fn softmax(x: &Tensor, scale: f32, causal: bool, mask: Option<&Tensor>) -> Result<Tensor> {
    let op = "softmax";
    let data = Floats::of(x, op, "x")?;
    let mask = mask.map(|mask| Mask::new(mask, x.shape())).transpose()?;
    let keys = x.shape().last_dim();
    let queries = x.shape().iter().rev().nth(1).copied().unwrap_or(1);
    build(op, *x.shape(), x.dtype(), x.device(), parallel::row_elements(keys), |first, out| {
        let mut scratch = Vec::new();
        let scores = data.read(first..first + out.len(), &mut scratch).chunks_exact(keys.max(1));
        for (i, (out, scores)) in out.chunks_exact_mut(keys.max(1)).zip(scores).enumerate() {
            let row = first / keys.max(1) + i;
            let (out, hidden) = out.split_at_mut(if causal { keys.min(row % queries + 1) } else { keys });
            hidden.fill(0.0);
            out.iter_mut().zip(scores).for_each(|(o, &v)| *o = v * scale);
            if let Some(mask) = &mask {
                mask.apply(row, out);
            }
            let (_, sum) = exponentials(out);
            // A row of masked scores only has the sum 0 and stays 0.
            if sum != 0.0 {
                out.iter_mut().for_each(|o| *o /= sum);
            }
        }
    })
}

pub(crate) fn softmax_backward(dy: &Tensor, y: &Tensor, scale: f32) -> Result<Tensor> {
    let op = "softmax_backward";
    let (dy, values) = (Floats::of(dy, op, "dy")?, Floats::of(y, op, "y")?);
    let keys = y.shape().last_dim();
    build(op, *y.shape(), y.dtype(), y.device(), parallel::row_elements(keys), |first, dx| {
        let (mut dy_scratch, mut y_scratch) = (Vec::new(), Vec::new());
        let range = first..first + dx.len();
        let dy = dy.read(range.clone(), &mut dy_scratch).chunks_exact(keys.max(1));
        let y = values.read(range, &mut y_scratch).chunks_exact(keys.max(1));
        for ((dx, dy), y) in dx.chunks_exact_mut(keys.max(1)).zip(dy).zip(y) {
            let mean = lanes::dot(y, dy);
            for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
                *dx = scale * (y * (dy - mean));
            }
        }
    })
}

/// `exp(v − max)` in place; returns the maximum, NaN skipped, and the sum.
pub(crate) fn exponentials(row: &mut [f32]) -> (f32, f32) {
    dispatch::vectorized(Exponentials(row))
}

struct Exponentials<'a>(&'a mut [f32]);

impl dispatch::Kernel for Exponentials<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run(self) -> (f32, f32) {
        let max = lanes::max(self.0);
        let origin = origin(max);
        self.0.iter_mut().for_each(|v| *v = math::exp(*v - origin));
        (max, lanes::sum(self.0))
    }
}

/// Returns the number to subtract before `exp`: the maximum, or 0 where everything is masked, since −∞ − −∞ is NaN.
#[inline(always)]
pub(crate) fn origin(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// A mask that repeats along the dimensions where its extent is 1.
struct Mask<'a> {
    data: &'a [u8],
    /// The extent of each dimension of the scores except the last, innermost first, with the mask's stride along it.
    leading: Vec<(usize, usize)>,
    /// 0 where one byte stands for a whole row.
    step: usize,
}

impl<'a> Mask<'a> {
    fn new(mask: &'a Tensor, scores: &Shape) -> Result<Self> {
        let mut stride = 1;
        let mut dims = Vec::with_capacity(scores.len());
        for (&extent, &own) in scores.iter().zip(mask.shape().iter()).rev() {
            dims.push((extent, if own == 1 { 0 } else { stride }));
            stride *= own;
        }
        let leading = dims.split_off(dims.len().min(1));
        let step = dims.first().map_or(0, |&(_, step)| step);
        Ok(Self { data: mask.as_slice()?, leading, step })
    }

    fn apply(&self, row: usize, scores: &mut [f32]) {
        let (mut rest, mut start) = (row, 0);
        for &(extent, stride) in &self.leading {
            start += rest % extent * stride;
            rest /= extent;
        }
        if self.step == 0 {
            if self.data[start] != 0 {
                scores.fill(f32::NEG_INFINITY);
            }
            return;
        }
        for (v, masked) in scores.iter_mut().zip(&self.data[start..]) {
            *v = if *masked != 0 { f32::NEG_INFINITY } else { *v };
        }
    }
}
