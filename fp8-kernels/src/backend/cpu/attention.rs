//! Reference of `attention`: one block of scores at a time, a running maximum and sum per row.
//!
//! Tasks own whole heads (forward) or groups (backward), so that every sum has one order. They write head by head; a
//! last pass brings the results into the layout of the inputs.

use super::dispatch::{Kernel, vectorized};
use super::matmul::{Elements, Epilogue, Matrix, Out, matmul_serial};
use super::softmax::origin;
use super::{Buffer, Floats, lanes, parallel};
use crate::host::Array;
use crate::ops::{AttentionSaved, Problem};
use crate::{DType, Device, Error, Result, Shape, Tensor, math};
use rayon::prelude::*;

/// Queries and keys of one block of scores: 16 KiB, and its operands, in the first cache.
const BLOCK: usize = 64;

pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    key_lengths: Option<&Tensor>,
    p: &Problem,
) -> Result<(Tensor, AttentionSaved)> {
    let op = "attention";
    let lengths = Lengths::new(op, key_lengths, p)?;
    let (dtype, device) = (q.dtype(), q.device());
    let (q, k, v) = (q.cpu_f32(op)?, k.cpu_f32(op)?, v.cpu_f32(op)?);
    let rows = p.batch * p.heads * p.queries;
    let (mut o, mut sum) = (Array::zeroed(op, rows * p.head_dim)?, Array::zeroed(op, rows)?);
    let mut max = Array::filled(op, f32::NEG_INFINITY, rows)?;
    let (head_step, block_step) = (p.queries.max(1), BLOCK * p.head_dim);
    let heads = o.par_chunks_mut(head_step * p.head_dim).zip(max.par_chunks_mut(head_step));
    heads.zip(sum.par_chunks_mut(head_step)).enumerate().try_for_each(|(index, ((o, max), sum))| {
        let (batch, head) = (index / p.heads, index % p.heads);
        let q = Head::new(&q, p.queries, p.heads, p.head_dim, batch, head);
        let group = head / (p.heads / p.groups);
        let [k, v] = [&k, &v].map(|data| Head::new(data, p.keys, p.groups, p.head_dim, batch, group));
        let blocks =
            o.par_chunks_mut(block_step).zip(max.par_chunks_mut(BLOCK)).zip(sum.par_chunks_mut(BLOCK));
        blocks.enumerate().try_for_each(|(block, ((o, max), sum))| {
            let (first, length) = (block * BLOCK, lengths.of(batch));
            vectorized(ForwardBlock { q, k, v, first, o, max, sum, length, p })
        })
    })?;
    let o = token_major(&o, [p.batch, p.queries, p.heads, p.head_dim], dtype, device)?;
    let stats = |data| Tensor::on_cpu(data, Shape::from([p.batch, p.heads, p.queries]), device);
    Ok((o, AttentionSaved { row_max: stats(max), row_sum: stats(sum) }))
}

pub(crate) fn attention_backward(
    [dy, q, k, v, o]: [&Tensor; 5],
    saved: &AttentionSaved,
    key_lengths: Option<&Tensor>,
    p: &Problem,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "attention_backward";
    let lengths = Lengths::new(op, key_lengths, p)?;
    let (dtype, device) = (q.dtype(), q.device());
    let (dy, o) = (dy.cpu_f32(op)?, o.cpu_f32(op)?);
    let (q, k, v) = (q.cpu_f32(op)?, k.cpu_f32(op)?, v.cpu_f32(op)?);
    let (max, sum) = (saved.row_max.as_slice::<f32>()?, saved.row_sum.as_slice::<f32>()?);
    let (mut dq, mut dk) = (Array::zeroed(op, q.len())?, Array::zeroed(op, k.len())?);
    let mut dv = Array::zeroed(op, v.len())?;
    let per_group = p.heads / p.groups;
    let (q_step, k_step) = (p.queries * p.head_dim, p.keys * p.head_dim);
    // Without queries or keys nothing was seen, and all gradients are 0.
    if ![q_step, k_step, per_group].contains(&0) {
        let tasks = dq.par_chunks_mut(per_group * q_step).zip(dk.par_chunks_mut(k_step));
        tasks.zip(dv.par_chunks_mut(k_step)).enumerate().try_for_each(|(index, ((dq, dk), dv))| {
            let (batch, group) = (index / p.groups, index % p.groups);
            let [k, v] = [&k, &v].map(|data| Head::new(data, p.keys, p.groups, p.head_dim, batch, group));
            for (i, dq) in dq.chunks_exact_mut(q_step).enumerate() {
                let head = group * per_group + i;
                let [q, dy, o] =
                    [&q, &dy, &o].map(|data| Head::new(data, p.queries, p.heads, p.head_dim, batch, head));
                let rows = (batch * p.heads + head) * p.queries;
                let rows = rows..rows + p.queries;
                let (max, sum, length) = (&max[rows.clone()], &sum[rows], lengths.of(batch));
                let inputs = Inputs { q, k, v, dy, o, max, sum, length };
                vectorized(BackwardHead { x: &inputs, dq, dk, dv, p })?;
            }
            Ok::<_, Error>(())
        })?;
    }
    let q_dims = [p.batch, p.queries, p.heads, p.head_dim];
    let k_dims = [p.batch, p.keys, p.groups, p.head_dim];
    Ok((
        token_major(&dq, q_dims, dtype, device)?,
        token_major(&dk, k_dims, dtype, device)?,
        token_major(&dv, k_dims, dtype, device)?,
    ))
}

/// One head of one batch entry: rows of `[.., heads, head_dim]`.
#[derive(Clone, Copy)]
struct Head<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
}

impl<'a> Head<'a> {
    fn new(data: &'a [f32], rows: usize, heads: usize, dim: usize, batch: usize, head: usize) -> Self {
        let start = batch * rows * heads * dim + head * dim;
        Self { data: data.get(start..).unwrap_or_default(), stride: heads * dim, dim }
    }

    #[inline(always)]
    fn row(self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..i * self.stride + self.dim]
    }

    /// The rows from `first` on as an operand that is summed over `head_dim`.
    fn along(self, first: usize) -> Matrix<'a> {
        Matrix::along_k(elements(&self.data[first * self.stride..]), self.stride)
    }

    /// The rows from `first` on as an operand that is summed over the rows.
    fn across(self, first: usize) -> Matrix<'a> {
        Matrix::across_k(elements(&self.data[first * self.stride..]), self.stride)
    }
}

fn elements(data: &[f32]) -> Elements<'_> {
    Elements::Floats(Floats::F32(data))
}

/// `out = a · bᵀ`, or plus what `out` holds, on this thread.
fn product(dims: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32], accumulate: bool) -> Result<()> {
    let epilogue = Epilogue { accumulate, ..Epilogue::default() };
    matmul_serial("attention", dims, a, b, &epilogue, Out::f32(out))
}

/// A block of queries against all keys they see.
struct ForwardBlock<'a> {
    q: Head<'a>,
    k: Head<'a>,
    v: Head<'a>,
    first: usize,
    o: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    length: usize,
    p: &'a Problem,
}

impl Kernel for ForwardBlock<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self) -> Result<()> {
        let Self { q, k, v, first, o, max, sum, length, p } = self;
        let (count, dim) = (max.len(), p.head_dim);
        let mut scores = [0.0; BLOCK * BLOCK];
        // The last row sees the most.
        let keys = p.seen(first + count - 1, length);
        for start in (0..keys).step_by(BLOCK) {
            let cols = BLOCK.min(keys - start);
            let scores = &mut scores[..count * cols];
            product([count, cols, dim], q.along(first), k.along(start), scores, false)?;
            for (i, row) in scores.chunks_exact_mut(cols).enumerate() {
                let (row, hidden) =
                    row.split_at_mut(p.seen(first + i, length).saturating_sub(start).min(cols));
                hidden.fill(0.0);
                row.iter_mut().for_each(|v| *v *= p.scale);
                let largest = max[i].max(lanes::max(row));
                let origin = origin(largest);
                row.iter_mut().for_each(|v| *v = math::exp(*v - origin));
                // What was summed so far was relative to the old maximum.
                let shrink = math::exp(max[i] - origin);
                sum[i] = sum[i] * shrink + lanes::sum(row);
                max[i] = largest;
                if shrink != 1.0 {
                    o[i * dim..(i + 1) * dim].iter_mut().for_each(|o| *o *= shrink);
                }
            }
            let scores = Matrix::along_k(elements(scores), cols);
            product([count, dim, cols], scores, v.across(start), o, true)?;
        }
        for (o, &mut sum) in o.chunks_exact_mut(dim).zip(sum) {
            if sum != 0.0 {
                o.iter_mut().for_each(|o| *o /= sum);
            }
        }
        Ok(())
    }
}

/// What the backward of one head reads.
struct Inputs<'a> {
    q: Head<'a>,
    k: Head<'a>,
    v: Head<'a>,
    dy: Head<'a>,
    o: Head<'a>,
    max: &'a [f32],
    sum: &'a [f32],
    length: usize,
}

/// Writes `dq`, adds to `dk` and `dv`.
struct BackwardHead<'a> {
    x: &'a Inputs<'a>,
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    p: &'a Problem,
}

impl Kernel for BackwardHead<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self) -> Result<()> {
        let Self { x, dq, dk, dv, p } = self;
        let dim = p.head_dim;
        // Probabilities; their gradients, then those of the scores.
        let (mut probabilities, mut gradients) = ([0.0; BLOCK * BLOCK], [0.0; BLOCK * BLOCK]);
        for (block, dq) in dq.chunks_mut(BLOCK * dim).enumerate() {
            let (first, count) = (block * BLOCK, dq.len() / dim);
            let mut means = [0.0; BLOCK];
            for (i, mean) in means.iter_mut().enumerate().take(count) {
                *mean = lanes::dot(x.dy.row(first + i), x.o.row(first + i));
            }
            let keys = p.seen(first + count - 1, x.length);
            for start in (0..keys).step_by(BLOCK) {
                let cols = BLOCK.min(keys - start);
                let (probs, grads) = (&mut probabilities[..count * cols], &mut gradients[..count * cols]);
                product([count, cols, dim], x.q.along(first), x.k.along(start), probs, false)?;
                product([count, cols, dim], x.dy.along(first), x.v.along(start), grads, false)?;
                let rows = probs.chunks_exact_mut(cols).zip(grads.chunks_exact_mut(cols));
                for (i, (probs, grads)) in rows.enumerate() {
                    let seen = p.seen(first + i, x.length).saturating_sub(start).min(cols);
                    let (origin, sum, mean) = (origin(x.max[first + i]), x.sum[first + i], means[i]);
                    // Scores that are all -inf have a sum of 0, and weigh nothing.
                    let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                    probs[seen..].fill(0.0);
                    grads[seen..].fill(0.0);
                    for (prob, grad) in probs[..seen].iter_mut().zip(&mut grads[..seen]) {
                        *prob = math::exp(*prob * p.scale - origin) * inverse;
                        *grad = *prob * (*grad - mean) * p.scale;
                    }
                }
                let (probs, grads) = (elements(probs), elements(grads));
                let keys = start * dim..(start + cols) * dim;
                let (transposed, dy) = (Matrix::across_k(probs, cols), x.dy.across(first));
                product([cols, dim, count], transposed, dy, &mut dv[keys.clone()], true)?;
                let transposed = Matrix::across_k(grads, cols);
                product([cols, dim, count], transposed, x.q.across(first), &mut dk[keys], true)?;
                product([count, dim, cols], Matrix::along_k(grads, cols), x.k.across(start), dq, true)?;
            }
        }
        Ok(())
    }
}

/// The number of keys that are not padding, per batch entry.
#[derive(Clone, Copy)]
struct Lengths<'a> {
    /// One for each batch entry; without them all keys count.
    given: Option<&'a [i32]>,
    keys: usize,
}

impl<'a> Lengths<'a> {
    fn new(op: &'static str, key_lengths: Option<&'a Tensor>, p: &Problem) -> Result<Self> {
        let given = key_lengths.map(Tensor::as_slice::<i32>).transpose()?;
        let is_valid = |length: i32| usize::try_from(length).is_ok_and(|length| length <= p.keys);
        let wrong = given.unwrap_or_default().iter().enumerate().find(|&(_, &length)| !is_valid(length));
        match wrong {
            None => Ok(Self { given, keys: p.keys }),
            Some((position, &length)) => {
                let (what, value, limit) = ("key length", length.into(), p.keys + 1);
                Err(Error::Index { op, what, value, position, limit })
            }
        }
    }

    fn of(self, batch: usize) -> usize {
        let given = self.given.and_then(|given| given.get(batch));
        given.map_or(self.keys, |&length| usize::try_from(length).unwrap_or(0))
    }
}

/// `[batch, heads, rows, dim]` to `[batch, rows, heads, dim]`, rounded to `dtype`.
fn token_major(
    data: &[f32],
    [batch, rows, heads, dim]: [usize; 4],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut out = Array::for_overwrite("attention", data.len())?;
    parallel::rows(&mut out, heads * dim, |first, out| {
        for (i, token) in out.chunks_exact_mut(heads * dim).enumerate() {
            let (batch, row) = ((first + i) / rows, (first + i) % rows);
            for (head, out) in token.chunks_exact_mut(dim).enumerate() {
                let start = ((batch * heads + head) * rows + row) * dim;
                out.copy_from_slice(&data[start..start + dim]);
            }
        }
    });
    let buffer = Buffer::from_f32(out, dtype, "attention")?;
    Ok(Tensor::from_buffer(buffer, Shape::from([batch, rows, heads, dim]), device))
}
