//! Reference of `attention`: one block of scores at a time, a running maximum and sum per row.
//!
//! Tasks own whole heads (forward) or groups (backward), so that every sum has one order. They write head by head; a
//! last pass brings the results into the layout of the inputs.

use super::dispatch::{Kernel, vectorized};
use super::matmul::Strided;
use super::softmax::origin;
use super::{Buffer, Widened, lanes, parallel};
use crate::host::{self, Array};
use crate::ops::{AttentionSaved, Problem, Sequences};
use crate::{DType, Device, Encoding, Error, Result, Shape, Tensor, math};
use heads::{Head, KEYS, Keys, LANES, QUERIES, Transposed, TransposedHead, add_product, scores};
use spans::{Dropped, Span, Visible, in_order, of_batch, spans};
use std::ops::Range;

mod heads;
mod rounding;
mod spans;

/// So many queries have their keys transposed a block at a time.
const FEW_QUERIES: usize = 8;
/// Queries of one task.
const TASK: usize = 4 * QUERIES;

pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &Sequences,
    p: &Problem<'_>,
) -> Result<(Tensor, AttentionSaved)> {
    let op = "attention";
    let spans = spans(op, sequences, p)?;
    let dropped = Dropped::new(p)?;
    let (dtype, device) = (q.dtype(), q.device());
    let q = q.cpu_f32(op)?;
    let ([k, v], keys) = widened(op, [k, v], &spans, p)?;
    let rows = p.batch * p.heads * p.queries;
    let (mut o, mut sum) = (Array::zeroed(op, rows * p.head_dim)?, Array::zeroed(op, rows)?);
    let mut max = Array::filled(op, f32::NEG_INFINITY, rows)?;
    // Keys of a few queries, as in generation, are transposed when they are needed.
    let seen = seen(&spans);
    let transposed =
        (p.queries > FEW_QUERIES).then(|| Transposed::new(op, &k, [keys, seen], p)).transpose()?;
    // The rows of each head and sequence, a few at a time.
    let count = spans.iter().map(|span| span.queries.len().div_ceil(TASK)).sum::<usize>() * p.heads;
    let mut tasks = host::room(op, count)?;
    let mut rest = (&mut o[..], &mut max[..], &mut sum[..]);
    let mut done = 0;
    for (span, head) in in_order(&spans, p) {
        let start = (span.batch * p.heads + head) * p.queries + span.queries.start;
        for first in (0..span.queries.len()).step_by(TASK) {
            let count = TASK.min(span.queries.len() - first);
            let skip = start + first - done;
            let (o, max, sum) = rest;
            let (o, o_rest) = o[skip * p.head_dim..].split_at_mut(count * p.head_dim);
            let (max, max_rest) = max[skip..].split_at_mut(count);
            let (sum, sum_rest) = sum[skip..].split_at_mut(count);
            rest = (o_rest, max_rest, sum_rest);
            done += skip + count;
            tasks.push((span, head, first, o, max, sum));
        }
    }
    parallel::try_for_each(tasks.into_iter(), |(span, head, first, o, max, sum)| {
        let group = head / (p.heads / p.groups);
        let q = Head::new(&q, p.queries, p.heads, p.head_dim, span.batch, head).skip(span.queries.start);
        let v = Head::new(&v, keys, p.groups, p.head_dim, span.batch, group).skip(span.keys.start);
        let k = match &transposed {
            Some(all) => Keys::Transposed(all.head(span.batch * p.groups + group).skip(span.keys.start)),
            None => {
                let rows = Head::new(&k, keys, p.groups, p.head_dim, span.batch, group);
                Keys::Rows(rows.skip(span.keys.start), Array::zeroed(op, p.head_dim * KEYS)?)
            }
        };
        let dropped = dropped.map(|dropped| dropped.of(span, head, p));
        vectorized(Forward { q, k, v, first, o, max, sum, visible: span.visible(p), dropped, p })
    })?;
    let o = token_major(&o, [p.batch, p.queries, p.heads, p.head_dim], dtype, device)?;
    let stats = |data| Tensor::on_cpu(data, Shape::from([p.batch, p.heads, p.queries]), device);
    Ok((o, AttentionSaved { row_max: stats(max), row_sum: stats(sum) }))
}

/// Returns the end of the last key that a query sees: the cache of a generation may have room for many more.
fn seen(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.keys.end).max().unwrap_or(0)
}

/// Returns keys and values in f32, and how many of them each batch entry has. Those behind the last one that is seen are not
/// converted.
fn widened<'a>(
    op: &'static str,
    [k, v]: [&'a Tensor; 2],
    spans: &[Span],
    p: &Problem<'_>,
) -> Result<([Widened<'a>; 2], usize)> {
    let seen = seen(spans);
    if k.dtype() == DType::F32 || seen == p.keys {
        return Ok(([k.cpu_f32(op)?, v.cpu_f32(op)?], p.keys));
    }
    let [step, len] = [p.keys, seen].map(|keys| keys * p.groups * p.head_dim);
    let first = |x: &Tensor| x.cpu_buffer(op)?.read_f32_firsts(op, step, len).map(Widened::Copied);
    Ok(([first(k)?, first(v)?], seen))
}

pub(crate) fn attention_backward(
    [dy, q, k, v, o]: [&Tensor; 5],
    saved: &AttentionSaved,
    sequences: &Sequences,
    p: &Problem<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "attention_backward";
    let spans = spans(op, sequences, p)?;
    let dropped = Dropped::new(p)?;
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
        let [k_transposed, v_transposed] = [&k, &v].map(|x| Transposed::new(op, x, [p.keys; 2], p));
        let (k_transposed, v_transposed) = (k_transposed?, v_transposed?);
        let tasks = dq.chunks_mut(per_group * q_step).zip(dk.chunks_mut(k_step)).zip(dv.chunks_mut(k_step));
        parallel::try_for_each(tasks.enumerate(), |(index, ((dq, dk), dv))| {
            let (batch, group) = (index / p.groups, index % p.groups);
            for (i, dq) in dq.chunks_exact_mut(q_step).enumerate() {
                let head = group * per_group + i;
                for span in of_batch(&spans, batch) {
                    let k = Head::new(&k, p.keys, p.groups, p.head_dim, batch, group).skip(span.keys.start);
                    let [k_transposed, v_transposed] =
                        [&k_transposed, &v_transposed].map(|x| x.head(index).skip(span.keys.start));
                    let [q, dy, o] = [&q, &dy, &o].map(|data| {
                        Head::new(data, p.queries, p.heads, p.head_dim, batch, head).skip(span.queries.start)
                    });
                    let rows = (batch * p.heads + head) * p.queries;
                    let rows = rows + span.queries.start..rows + span.queries.end;
                    let (max, sum, visible) = (&max[rows.clone()], &sum[rows], span.visible(p));
                    let dropped = dropped.map(|dropped| dropped.of(span, head, p));
                    let inputs =
                        Inputs { q, k, k_transposed, v_transposed, dy, o, max, sum, visible, dropped };
                    let elements = |rows: &Range<usize>| rows.start * p.head_dim..rows.end * p.head_dim;
                    let (dq, keys) = (&mut dq[elements(&span.queries)], elements(&span.keys));
                    let (dk, dv) = (&mut dk[keys.clone()], &mut dv[keys]);
                    vectorized(Backward { x: &inputs, dq, dk, dv, p })?;
                }
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

/// Some queries against all keys they see.
struct Forward<'a> {
    q: Head<'a>,
    k: Keys<'a>,
    v: Head<'a>,
    first: usize,
    o: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    visible: Visible,
    dropped: Option<Dropped>,
    p: &'a Problem<'a>,
}

impl Kernel for Forward<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self) -> Result<()> {
        let Self { q, mut k, v, first, o, max, sum, visible, dropped, p } = self;
        let dim = p.head_dim;
        // Where probabilities are rounded, a factor above 1 could saturate their codes: it comes with the sum.
        let factor = dropped.map_or(1.0, |dropped| dropped.mask.factor);
        let (inner, outer) = if p.rounding.is_some() { (1.0, factor) } else { (factor, 1.0) };
        let mut block = [0.0; QUERIES * KEYS];
        let rows = o.chunks_mut(QUERIES * dim).zip(max.chunks_mut(QUERIES)).zip(sum.chunks_mut(QUERIES));
        for (i, ((o, max), sum)) in rows.enumerate() {
            let (first, count) = (first + i * QUERIES, max.len());
            let ([begin, _], [_, end]) = (visible.of(first), visible.of(first + count - 1));
            for start in (begin..end).step_by(KEYS) {
                let cols = KEYS.min(end - start);
                k.scores([first, count], [start, cols], q, &mut block)?;
                for (i, row) in block.chunks_exact_mut(KEYS).take(count).enumerate() {
                    let row = &mut row[..cols.next_multiple_of(LANES)];
                    let [hidden, seen] = visible.of(first + i).map(|key| key.saturating_sub(start).min(cols));
                    in_lanes(row, |v| v * p.scale);
                    row[..hidden].fill(f32::NEG_INFINITY);
                    row[seen..].fill(f32::NEG_INFINITY);
                    let largest = max[i].max(lanes::max(row));
                    let origin = origin(largest);
                    in_lanes(row, |v| math::exp(v - origin));
                    // What was summed so far was relative to the old maximum.
                    let shrink = math::exp(max[i] - origin);
                    sum[i] = sum[i] * shrink + lanes::sum(row);
                    max[i] = largest;
                    if shrink != 1.0 {
                        o[i * dim..(i + 1) * dim].iter_mut().for_each(|o| *o *= shrink);
                    }
                    // Dropped after they were summed: what is normalized are the probabilities without dropout.
                    if let Some(dropped) = &dropped {
                        let row = &mut row[hidden..seen.max(hidden)];
                        dropped.each(first + i, start + hidden..start + hidden + row.len(), |j, kept| {
                            row[j] = if kept { row[j] * inner } else { 0.0 };
                        });
                    }
                }
                if p.rounding.is_some() {
                    rounding::round_probabilities(&mut block, count)?;
                }
                let probs = Strided { data: &block, row: KEYS, step: 1 };
                add_product(count, probs, v, [start, cols], o)?;
            }
            for (o, &mut sum) in o.chunks_exact_mut(dim).zip(sum) {
                if sum != 0.0 {
                    o.iter_mut().for_each(|o| *o = *o / sum * outer);
                }
            }
        }
        Ok(())
    }
}

/// Applies `f` to each value of a row whose length is a multiple of [`LANES`].
#[inline(always)]
fn in_lanes(row: &mut [f32], f: impl Fn(f32) -> f32) {
    for lanes in row.chunks_exact_mut(LANES) {
        lanes.iter_mut().for_each(|v| *v = f(*v));
    }
}

/// The inputs of the backward pass of one head.
struct Inputs<'a> {
    q: Head<'a>,
    k: Head<'a>,
    k_transposed: TransposedHead<'a>,
    v_transposed: TransposedHead<'a>,
    dy: Head<'a>,
    o: Head<'a>,
    max: &'a [f32],
    sum: &'a [f32],
    visible: Visible,
    dropped: Option<Dropped>,
}

/// Adds to `dq`, `dk` and `dv`.
struct Backward<'a> {
    x: &'a Inputs<'a>,
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    p: &'a Problem<'a>,
}

impl Kernel for Backward<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self) -> Result<()> {
        let Self { x, dq, dk, dv, p } = self;
        let dim = p.head_dim;
        // What is rounded has no scale yet: rounding commutes with powers of two alone.
        let slope_scale = if p.rounding.is_some() { 1.0 } else { p.scale };
        // The same holds for the factor of probabilities that are kept.
        let factor = x.dropped.map_or(1.0, |dropped| dropped.mask.factor);
        let (inner, outer) = if p.rounding.is_some() { (1.0, factor) } else { (factor, 1.0) };
        // Probabilities; their gradients, then those of the scores.
        let (mut probs, mut grads) = ([0.0; QUERIES * KEYS], [0.0; QUERIES * KEYS]);
        for (block, dq) in dq.chunks_mut(QUERIES * dim).enumerate() {
            let (first, count) = (block * QUERIES, dq.len() / dim);
            let mut means = [0.0; QUERIES];
            for (i, mean) in means.iter_mut().enumerate().take(count) {
                *mean = lanes::dot(x.dy.row(first + i), x.o.row(first + i));
            }
            let ([begin, _], [_, end]) = (x.visible.of(first), x.visible.of(first + count - 1));
            for start in (begin..end).step_by(KEYS) {
                let cols = KEYS.min(end - start);
                scores([first, count], [start, cols], x.q, x.k_transposed, &mut probs)?;
                scores([first, count], [start, cols], x.dy, x.v_transposed, &mut grads)?;
                let rows = probs.chunks_exact_mut(KEYS).zip(grads.chunks_exact_mut(KEYS));
                for (i, (probs, grads)) in rows.take(count).enumerate() {
                    let [hidden, seen] =
                        x.visible.of(first + i).map(|key| key.saturating_sub(start).min(cols));
                    let (origin, sum, mean) = (origin(x.max[first + i]), x.sum[first + i], means[i]);
                    // Scores that are all -inf have a sum of 0, and weigh nothing.
                    let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                    // The mask as factors of the gradients, and of the probabilities that meet dy below.
                    let mut factors = [1.0; KEYS];
                    if let Some(dropped) = &x.dropped {
                        dropped.each(first + i, start..start + seen, |j, kept| {
                            factors[j] = if kept { dropped.mask.factor } else { 0.0 };
                        });
                        let grads = grads[..seen].iter_mut().zip(&factors);
                        grads.for_each(|(grad, &factor)| {
                            *grad = if factor == 0.0 { 0.0 } else { *grad * factor }
                        });
                    }
                    let width = seen.next_multiple_of(LANES);
                    let lanes = probs[..width].chunks_exact_mut(LANES);
                    for (probs, grads) in lanes.zip(grads[..width].chunks_exact_mut(LANES)) {
                        for (prob, grad) in probs.iter_mut().zip(grads) {
                            *prob = math::exp(*prob * p.scale - origin) * inverse;
                            *grad = *prob * (*grad - mean) * slope_scale;
                        }
                    }
                    if x.dropped.is_some() {
                        let probs = probs[..seen].iter_mut().zip(&factors);
                        probs.for_each(|(prob, &factor)| {
                            *prob = if factor == 0.0 { 0.0 } else { *prob * inner }
                        });
                    }
                    for hidden in [0..hidden, seen..cols] {
                        probs[hidden.clone()].fill(0.0);
                        grads[hidden].fill(0.0);
                    }
                }
                let straight = |data| Strided { data, row: KEYS, step: 1 };
                let flipped = |data| Strided { data, row: 1, step: KEYS };
                let rows = start * dim..(start + cols) * dim;
                if let Some(encoding) = p.rounding {
                    // Each product has another operand: its rows have the scales.
                    let mut by_key = grads;
                    rounding::round_columns(&mut by_key, [count, cols], encoding, p.scale)?;
                    add_product(cols, flipped(&by_key), x.q, [first, count], &mut dk[rows.clone()])?;
                    rounding::round_columns(&mut probs, [count, cols], Encoding::E4M3, outer)?;
                    add_product(cols, flipped(&probs), x.dy, [first, count], &mut dv[rows])?;
                    rounding::round_rows(&mut grads, [count, cols], encoding, p.scale)?;
                    add_product(count, straight(&grads), x.k, [start, cols], dq)?;
                    continue;
                }
                add_product(cols, flipped(&probs), x.dy, [first, count], &mut dv[rows.clone()])?;
                add_product(cols, flipped(&grads), x.q, [first, count], &mut dk[rows])?;
                add_product(count, straight(&grads), x.k, [start, cols], dq)?;
            }
        }
        Ok(())
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
