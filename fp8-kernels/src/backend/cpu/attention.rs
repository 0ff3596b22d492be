//! Reference of `attention`: one block of scores at a time, a running maximum and sum per row.
//!
//! Tasks own whole heads (forward) or groups (backward), so that every sum has one order. They write head by head; a
//! last pass brings the results into the layout of the inputs.

use super::dispatch::{Kernel, vectorized};
use super::matmul::Strided;
use super::softmax::origin;
use super::{Buffer, lanes, parallel};
use crate::host::{self, Array};
use crate::ops::{AttentionGrads, AttentionSaved, BackwardCall, Call, GradPlace, Problem};
use crate::{DType, Device, Encoding, Error, Result, Shape, Tensor, math};
use heads::{AllHeads, Head, KEYS, Keys, LANES, QUERIES, Transposed, TransposedHead, add_product, scores};
use spans::{Dropped, Span, Visible, in_order, of_batch, spans};
use std::ops::Range;

mod heads;
mod rounding;
mod spans;

/// So many queries have their keys transposed a block at a time.
const FEW_QUERIES: usize = 8;
/// Queries of one task.
const TASK: usize = 4 * QUERIES;

pub(crate) fn attention(call: &Call<'_>) -> Result<(Tensor, AttentionSaved)> {
    let (op, p) = ("attention", &call.problem);
    let spans = spans(op, call.sequences, p)?;
    let dropped = Dropped::new(p)?;
    let (dtype, device) = (call.q.tensor().dtype(), call.q.tensor().device());
    let seen = seen(&spans);
    // Keys and values behind the last one that is seen are not converted.
    let (q, k, v) =
        (AllHeads::of(op, call.q)?, AllHeads::firsts(op, call.k, seen)?, AllHeads::firsts(op, call.v, seen)?);
    let rows = p.batch * p.heads * p.queries;
    let (mut o, mut sum) = (Array::zeroed(op, rows * p.head_dim)?, Array::zeroed(op, rows)?);
    let mut max = Array::filled(op, f32::NEG_INFINITY, rows)?;
    // Keys of a few queries, as in generation, are transposed when they are needed.
    let transposed = (p.queries > FEW_QUERIES).then(|| Transposed::new(op, &k, seen, p)).transpose()?;
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
        let q = q.head(span.batch, head).skip(span.queries.start);
        let v = v.head(span.batch, group).skip(span.keys.start);
        let k = match &transposed {
            Some(all) => Keys::Transposed(all.head(span.batch * p.groups + group).skip(span.keys.start)),
            None => {
                let rows = k.head(span.batch, group);
                Keys::Rows(rows.skip(span.keys.start), Array::zeroed(op, p.head_dim * KEYS)?)
            }
        };
        let dropped = dropped.map(|dropped| dropped.of(span, head, p));
        vectorized(Forward { q, k, v, first, o, max, sum, visible: span.visible(p), dropped, p })
    })?;
    let parts = [Part { data: &o, heads: p.heads, first: 0 }];
    let o = token_major(&parts, [p.queries, p.head_dim], call.q.shape(), dtype, device)?;
    let stats = |data| Tensor::on_cpu(data, Shape::from([p.batch, p.heads, p.queries]), device);
    Ok((o, AttentionSaved { row_max: stats(max), row_sum: Some(stats(sum)) }))
}

/// Returns `max + log(sum)` of each row.
pub(crate) fn log_sum_exp(row_max: &Tensor, row_sum: &Tensor) -> Result<Tensor> {
    let rows = row_max.as_slice::<f32>()?.iter().zip(row_sum.as_slice::<f32>()?);
    let values = rows.map(|(&max, &sum)| if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() });
    Ok(Tensor::on_cpu(host::collect("log_sum_exp", values)?, *row_max.shape(), row_max.device()))
}

/// Returns the end of the last key that a query sees: the cache of a generation may have room for many more.
fn seen(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.keys.end).max().unwrap_or(0)
}

pub(crate) fn attention_backward(call: &BackwardCall<'_>) -> Result<AttentionGrads> {
    let BackwardCall { forward: Call { q, k, v, sequences, ref problem }, dy, o, saved, layout } = *call;
    let (op, p) = ("attention_backward", problem);
    let spans = spans(op, sequences, p)?;
    let dropped = Dropped::new(p)?;
    let (dtype, device) = (q.tensor().dtype(), q.tensor().device());
    let [of_q, of_k] = [q, k].map(|heads| heads.shape().numel());
    let (dy, o) = (AllHeads::of(op, dy.into())?, AllHeads::of(op, o.into())?);
    let (q, k, v) = (AllHeads::of(op, q)?, AllHeads::of(op, k)?, AllHeads::of(op, v)?);
    let max = saved.row_max.as_slice::<f32>()?;
    // Without sums the maxima are those of log-sum-exp, and each sum is 1.
    let sum = saved.row_sum.as_ref().map(Tensor::as_slice::<f32>).transpose()?;
    let (mut dq, mut dk) = (Array::zeroed(op, of_q)?, Array::zeroed(op, of_k)?);
    let mut dv = Array::zeroed(op, of_k)?;
    let per_group = p.heads / p.groups;
    let (q_step, k_step) = (p.queries * p.head_dim, p.keys * p.head_dim);
    // Without queries or keys nothing was seen, and all gradients are 0.
    if ![q_step, k_step, per_group].contains(&0) {
        let [k_transposed, v_transposed] = [&k, &v].map(|x| Transposed::new(op, x, p.keys, p));
        let (k_transposed, v_transposed) = (k_transposed?, v_transposed?);
        let tasks = dq.chunks_mut(per_group * q_step).zip(dk.chunks_mut(k_step)).zip(dv.chunks_mut(k_step));
        parallel::try_for_each(tasks.enumerate(), |(index, ((dq, dk), dv))| {
            let (batch, group) = (index / p.groups, index % p.groups);
            for (i, dq) in dq.chunks_exact_mut(q_step).enumerate() {
                let head = group * per_group + i;
                for span in of_batch(&spans, batch) {
                    let k = k.head(batch, group).skip(span.keys.start);
                    let [k_transposed, v_transposed] =
                        [&k_transposed, &v_transposed].map(|x| x.head(index).skip(span.keys.start));
                    let [q, dy, o] = [&q, &dy, &o].map(|x| x.head(batch, head).skip(span.queries.start));
                    let rows = (batch * p.heads + head) * p.queries;
                    let rows = rows + span.queries.start..rows + span.queries.end;
                    let (max, sum, visible) =
                        (&max[rows.clone()], sum.map(|sum| &sum[rows]), span.visible(p));
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
    let grads = [(&dq, p.heads), (&dk, p.groups), (&dv, p.groups)];
    let places: Vec<(GradPlace, Part<'_>)> = layout
        .places(p)
        .into_iter()
        .zip(grads)
        .map(|(place, (data, heads))| (place, Part { data, heads, first: place.first }))
        .collect();
    let tensor = |(index, shape): (usize, &Shape)| {
        let here = places.iter().filter(|(place, _)| place.tensor == index);
        let parts: Vec<Part<'_>> = here.map(|(_, part)| *part).collect();
        let rows = shape.get(1).copied().unwrap_or_default();
        token_major(&parts, [rows, p.head_dim], shape, dtype, device)
    };
    let tensors = layout.shapes(p).iter().enumerate().map(tensor).collect::<Result<Vec<_>>>()?;
    AttentionGrads::from_tensors(op, tensors)
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
    /// `None`: each is 1.
    sum: Option<&'a [f32]>,
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
                    let (origin, mean) = (origin(x.max[first + i]), means[i]);
                    let sum = x.sum.map_or(1.0, |sum| sum[first + i]);
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

/// A part of the features of a result, head by head: `[batch, heads, rows, dim]`.
#[derive(Clone, Copy)]
struct Part<'a> {
    data: &'a [f32],
    heads: usize,
    /// The feature of a token that it begins with.
    first: usize,
}

/// Parts that have all features of `shape`, `[batch, rows, ..]`, token by token and rounded to `dtype`.
fn token_major(
    parts: &[Part<'_>],
    [rows, dim]: [usize; 2],
    shape: &Shape,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut out = Array::for_overwrite("attention", shape.numel())?;
    let features: usize = shape.iter().skip(2).product();
    parallel::rows(&mut out, features, |first, out| {
        for (i, token) in out.chunks_exact_mut(features).enumerate() {
            let (batch, row) = ((first + i) / rows, (first + i) % rows);
            for &Part { data, heads, first } in parts {
                let heads_of_token = token[first..first + heads * dim].chunks_exact_mut(dim);
                for (head, out) in heads_of_token.enumerate() {
                    let start = ((batch * heads + head) * rows + row) * dim;
                    out.copy_from_slice(&data[start..start + dim]);
                }
            }
        }
    });
    let buffer = Buffer::from_f32(out, dtype, "attention")?;
    Ok(Tensor::from_buffer(buffer, *shape, device))
}
