//! `attention` by cuDNN, where it has kernels that compute what this crate's do.
//!
//! Not served are f32, dropout, packed sequences, windows with keys to the right, windows and the bottom-right diagonal where a query
//! may see no key by them, factors of scores that are not positive, tensors of 2^31 elements or more, and padding before cuDNN 9.25, which
//! makes NaN of entries that have no keys. Backward windows without a causal mask are served for whole tiles alone. Decoding, which has a few queries only, would have to plan a graph for every number of keys.

use super::super::cudnn::{Attention, Direction, Element, Layout, Lengths, Mask, Place};
use super::super::{Buffer, Gpu, Grid, In, Out, kernels};
use super::grads::{Gradient, Grads};
use super::places::{address, is_aligned};
use crate::ops::{AttentionGrads, AttentionSaved, BackwardCall, Call, Diagonal, Heads, Problem, Sequences};
use crate::{DType, Result, Shape, Tensor};
use std::cmp::Ordering::Greater;

/// The fewest queries of a call that is served.
const FEWEST_QUERIES: usize = 16;
/// The largest head size that the library has kernels for.
const LARGEST_HEAD: usize = 256;
/// Queries and keys in a tile of the library's backward kernels, at most.
const ROWS_IN_TILE: usize = 128;

/// Returns what [`attention`](super::attention) returns, or `None` if the library does not serve the call.
pub(super) fn attention(gpu: &Gpu, call: &Call<'_>) -> Result<Option<(Tensor, AttentionSaved)>> {
    let op = "attention";
    let &Call { q, k, v, sequences, problem: ref p } = call;
    let Some(call) = described(call) else { return Ok(None) };
    if !takes_lengths(gpu, &call)? || !gpu.dnn_serves(op, &call, true)? {
        return Ok(None);
    }
    let (dtype, device) = (q.tensor().dtype(), q.tensor().device());
    let rows = Shape::from([p.batch, p.heads, p.queries]);
    // Whether the library writes padding is not documented.
    let o = match call.lengths {
        Lengths::Padded => gpu.zeros(dtype, q.shape().numel())?,
        Lengths::All | Lengths::Packed => gpu.alloc(dtype, q.shape().numel())?,
    };
    let stats = gpu.alloc(DType::F32, rows.numel())?;
    let lengths = lengths(gpu, op, sequences, &call, p, false)?;
    let [q_at, k_at, v_at] = [address(op, q)?, address(op, k)?, address(op, v)?];
    let address = |place| match place {
        Place::Query => q_at,
        Place::Key => k_at,
        Place::Value => v_at,
        Place::Output => o.ptr(),
        Place::Stats => stats.ptr(),
        Place::QueryLengths => lengths.ptr(),
        Place::KeyLengths => lengths.ptr() + 4 * keys_at(p) as u64,
        _ => 0,
    };
    // SAFETY: `ops::attention` has checked the shapes and types that `call` describes, and `ops::Heads` that heads end within
    // their tokens; the results and the lengths were made above.
    unsafe { gpu.dnn_run(op, &call, true, p.scale, &address) }?;
    if call.lengths == Lengths::Padded {
        // The library writes NaN there, or nothing.
        set_unseen(gpu, &lengths, &stats, p, f32::NEG_INFINITY)?;
    }
    let saved = AttentionSaved::from_log_sum_exp(Tensor::from_cuda(stats, rows, device));
    Ok(Some((Tensor::from_cuda(o, *q.shape(), device), saved)))
}

/// Returns what [`attention_backward`](super::attention_backward) returns, or `None` if the library does not serve the call.
pub(super) fn attention_backward(gpu: &Gpu, call: &BackwardCall<'_>) -> Result<Option<AttentionGrads>> {
    let op = "attention_backward";
    let &BackwardCall { ref forward, dy, o, saved, layout } = call;
    let &Call { q, k, v, sequences, problem: ref p } = forward;
    // Whether there may be a call at all comes first: it costs nothing, and opens no library.
    let Some(call) = described(forward) else { return Ok(None) };
    let Some(sums) = gpu.dnn_sums(p.deterministic)? else { return Ok(None) };
    if !takes_lengths(gpu, &call)? {
        return Ok(None);
    }
    // Real lengths hide what the last tile of keys has behind them.
    let has_padding = call.lengths == Lengths::Padded;
    let Some(own_lengths) = lengths_of_backward(&call, p) else { return Ok(None) };
    let (dtype, device) = (q.tensor().dtype(), q.tensor().device());
    let grads = Grads::new(gpu, dtype, layout, p)?;
    let of = |which, rows| layout_of(grads.pitch(which), rows, p.head_dim);
    let call = Attention {
        direction: Direction::Backward(sums),
        dq: of(Gradient::Q, p.queries),
        dk: of(Gradient::K, p.keys),
        dv: of(Gradient::V, p.keys),
        lengths: own_lengths,
        ..call
    };
    let places = [Gradient::Q, Gradient::K, Gradient::V].map(|which| grads.address(which));
    let is_aligned = places.iter().all(|address| address.is_multiple_of(ALIGNMENT))
        && [Gradient::Q, Gradient::K]
            .iter()
            .all(|which| ((grads.pitch(*which) * dtype.size()) as u64).is_multiple_of(ALIGNMENT));
    let is_counted = [Gradient::Q, Gradient::K].iter().all(|which| is_counted(p, grads.pitch(*which)));
    if !is_aligned || !is_counted || !gpu.dnn_serves(op, &call, p.deterministic)? {
        return Ok(None);
    }
    if has_padding {
        grads.clear(gpu)?;
    }
    let lengths = lengths(gpu, op, sequences, &call, p, true)?;
    let stats = saved.log_sum_exp()?;
    let mut stats_at = stats.cuda(op)?.ptr();
    let finite = gpu.alloc(DType::F32, if has_padding { stats.numel() } else { 0 })?;
    if has_padding {
        // A hidden score minus −∞ would be NaN.
        gpu.copy(finite.ptr(), stats_at, finite.bytes())?;
        set_unseen(gpu, &lengths, &finite, p, 0.0)?;
        stats_at = finite.ptr();
    }
    let [q_at, k_at, v_at] = [address(op, q)?, address(op, k)?, address(op, v)?];
    let [dy_at, o_at] = [dy.cuda(op)?.ptr(), o.cuda(op)?.ptr()];
    let [dq, dk, dv] = places;
    let address = |place| match place {
        Place::Query => q_at,
        Place::Key => k_at,
        Place::Value => v_at,
        Place::Output => o_at,
        Place::OutputGradient => dy_at,
        Place::Stats => stats_at,
        Place::QueryGradient => dq,
        Place::KeyGradient => dk,
        Place::ValueGradient => dv,
        Place::QueryLengths => lengths.ptr(),
        Place::KeyLengths => lengths.ptr() + 4 * keys_at(p) as u64,
        _ => 0,
    };
    // SAFETY: `ops::attention_backward` has checked the shapes and types that `call` describes, and `ops::Heads` that heads end
    // within their tokens; the results and the lengths were made above.
    unsafe { gpu.dnn_run(op, &call, p.deterministic, p.scale, &address) }?;
    grads.finish(op, device).map(Some)
}

/// The place of the numbers of real keys behind those of queries, aligned as the library expects.
fn keys_at(p: &Problem<'_>) -> usize {
    p.batch.next_multiple_of(ALIGNMENT as usize / 4)
}

/// Whether the library computes entries as short as those of such a call may be.
fn takes_lengths(gpu: &Gpu, call: &Attention) -> Result<bool> {
    Ok(call.lengths != Lengths::Padded || gpu.dnn_takes_empty_sequences()?)
}

/// The lengths that the library is given in the backward pass; `None` if it does not serve the call.
///
/// On Hopper its kernels take what follows the last key of a tile for keys with a score of 0, if no mask hides it: gradients are NaN
/// where all real scores of a row are far below ([#196678 of PyTorch](https://github.com/pytorch/pytorch/issues/196678)). The same is
/// reported of queries ([#1072 of cudnn-frontend](https://github.com/NVIDIA/cudnn-frontend/issues/1072)). Lengths hide it, though all of
/// them are full.
fn lengths_of_backward(call: &Attention, p: &Problem<'_>) -> Option<Lengths> {
    let Mask { causal, left, bottom_right } = call.mask;
    let is_hidden = causal && (bottom_right || p.queries <= p.keys);
    let is_whole = [p.queries, p.keys].iter().all(|rows| rows.is_multiple_of(ROWS_IN_TILE));
    if call.lengths != Lengths::All || is_hidden || is_whole {
        return Some(call.lengths);
    }
    (left.is_none() && !bottom_right).then_some(Lengths::Padded)
}

/// The numbers of real queries, and from [`keys_at`] on those of real keys, where the library is given them.
fn lengths(
    gpu: &Gpu,
    op: &'static str,
    sequences: &Sequences,
    call: &Attention,
    p: &Problem<'_>,
    is_backward: bool,
) -> Result<Buffer> {
    if call.lengths != Lengths::Padded {
        return gpu.alloc(DType::I32, 0);
    }
    let [queries, keys] = sequences.lengths();
    let lengths = gpu.alloc(DType::I32, keys_at(p) + p.batch)?;
    let kernel = gpu.load(kernels::ATTENTION_LENGTHS)?;
    let args = kernels::AttentionLengths {
        query_lengths: In::i32(queries.map(|tensor| tensor.cuda(op)).transpose()?),
        key_lengths: In::i32(keys.map(|tensor| tensor.cuda(op)).transpose()?),
        lengths: Out::i32(&lengths),
        keys_at: keys_at(p) as u64,
        fault: Out::i64(gpu.fault()),
        batch: p.batch as u64,
        queries: p.queries as u32,
        keys: p.keys as u32,
        backward: i32::from(is_backward),
    };
    // SAFETY: each list that is given has a number for each batch entry, as `ops::attention` has checked; there is room for
    // both.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, 2 * p.batch as u64), &args) }?;
    Ok(lengths)
}

/// Sets the numbers of rows that see no key.
fn set_unseen(gpu: &Gpu, lengths: &Buffer, stats: &Buffer, p: &Problem<'_>, value: f32) -> Result<()> {
    // `described` has checked that all elements can be counted in 31 bits.
    let rows = (p.batch * p.heads * p.queries) as u32;
    let kernel = gpu.load(kernels::ATTENTION_UNSEEN)?;
    let args = kernels::AttentionUnseen {
        lengths: In::i32(Some(lengths)),
        keys_at: keys_at(p) as u64,
        log_sums: Out::f32(stats),
        rows,
        heads: p.heads as u32,
        queries: p.queries as u32,
        value,
    };
    // SAFETY: there are lengths for each batch entry, and a number for each row.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, u64::from(rows)), &args) }
}

/// Bytes that tensors are aligned to, where the library reads and writes them.
const ALIGNMENT: u64 = 16;

/// The forward call as the library is asked for it, if it may serve it. Gradients are where the tensors are.
fn described(call: &Call<'_>) -> Option<Attention> {
    let &Call { q, k, v, sequences, problem: ref p } = call;
    let Problem { batch, queries, keys, heads, groups, head_dim, .. } = *p;
    if ![q, k, v].into_iter().all(is_aligned) {
        return None;
    }
    let element = match q.tensor().dtype() {
        DType::BF16 => Element::Bf16,
        DType::F16 => Element::F16,
        _ => return None,
    };
    let lengths = match sequences {
        Sequences::Full | Sequences::Padded { queries: None, keys: None } => Lengths::All,
        Sequences::Padded { .. } => Lengths::Padded,
        Sequences::Packed(_) => return None,
    };
    let has_size = queries >= FEWEST_QUERIES && keys > 0 && batch > 0 && heads > 0;
    let has_head = head_dim.is_multiple_of(8) && head_dim <= LARGEST_HEAD;
    if !has_size || !has_head || p.dropout.is_some() || p.scale.partial_cmp(&0.0) != Some(Greater) {
        return None;
    }
    let widest = [q, k, v].iter().map(|heads| heads.pitch()).fold(heads * head_dim, usize::max);
    if !is_counted(p, widest) {
        return None;
    }
    let mask = mask(p, lengths)?;
    let of = |heads: Heads<'_>, rows| layout_of(heads.pitch(), rows, head_dim);
    let (of_queries, of_output) = (of(q, queries), Layout::dense(queries, heads, head_dim));
    let (of_keys, of_values) = (of(k, keys), of(v, keys));
    Some(Attention {
        direction: Direction::Forward,
        element,
        batch,
        heads,
        groups,
        queries,
        keys,
        head_dim,
        mask,
        lengths,
        q: of_queries,
        k: of_keys,
        v: of_values,
        o: of_output,
        dq: of_queries,
        dk: of_keys,
        dv: of_values,
        dy: of_output,
        stats_head: queries as i64,
        stats_batch: (heads * queries) as i64,
    })
}

/// Whether tensors of this pitch have fewer than 2^31 elements: whether the library's kernels count more is not documented.
fn is_counted(p: &Problem<'_>, pitch: usize) -> bool {
    let count = |all: i32, extent: &usize| all.checked_mul(i32::try_from(*extent).ok()?);
    [p.batch, p.queries.max(p.keys), pitch].iter().try_fold(1, count).is_some()
}

/// The layout of heads in tokens of `pitch` elements.
fn layout_of(pitch: usize, rows: usize, head_dim: usize) -> Layout {
    Layout { batch: (rows * pitch) as i64, row: pitch as i64, head: head_dim as i64 }
}

/// The mask, if the library has it and every query sees a key.
fn mask(p: &Problem<'_>, lengths: Lengths) -> Option<Mask> {
    let Problem { queries, keys, window: [left, right], .. } = *p;
    let causal = match right {
        None => false,
        Some(0) => true,
        Some(_) => return None,
    };
    // A window that reaches the first key from the last query hides nothing.
    let left = left.filter(|left| *left < queries.max(keys)).map(u32::try_from).transpose().ok()?;
    let bottom_right = p.diagonal == Diagonal::BottomRight && (causal || left.is_some());
    if (left.is_some() || bottom_right) && (queries > keys || lengths == Lengths::Padded) {
        return None;
    }
    // In a square it is the same diagonal.
    Some(Mask { causal, left, bottom_right: bottom_right && queries != keys })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Part;

    fn problem(
        queries: usize,
        keys: usize,
        window: [Option<usize>; 2],
        diagonal: Diagonal,
    ) -> Problem<'static> {
        Problem {
            batch: 1,
            queries,
            keys,
            heads: 1,
            groups: 1,
            head_dim: 64,
            window,
            diagonal,
            scale: 1.0,
            rounding: None,
            dropout: None,
            mask_heads: Part::whole(1),
            deterministic: true,
        }
    }

    #[test]
    fn a_mask_is_served_if_every_query_sees_a_key() {
        use Diagonal::{BottomRight, TopLeft};
        let of = |queries, keys, window, diagonal, lengths| {
            mask(&problem(queries, keys, window, diagonal), lengths)
        };
        let plain = Mask { causal: false, left: None, bottom_right: false };
        let causal = Mask { causal: true, ..plain };
        assert_eq!(of(8, 4, [None, None], TopLeft, Lengths::Padded), Some(plain));
        assert_eq!(of(8, 4, [None, Some(0)], TopLeft, Lengths::Padded), Some(causal));
        assert_eq!(of(8, 8, [None, Some(0)], BottomRight, Lengths::All), Some(causal));
        assert_eq!(
            of(4, 8, [None, Some(0)], BottomRight, Lengths::All),
            Some(Mask { bottom_right: true, ..causal })
        );
        assert_eq!(of(8, 8, [Some(3), None], TopLeft, Lengths::All), Some(Mask { left: Some(3), ..plain }));
        assert_eq!(of(8, 8, [Some(8), Some(0)], TopLeft, Lengths::All), Some(causal));
        // The first queries would see nothing, or the last ones.
        assert_eq!(of(8, 4, [None, Some(0)], BottomRight, Lengths::All), None);
        assert_eq!(of(8, 4, [Some(2), None], TopLeft, Lengths::All), None);
        assert_eq!(of(8, 8, [Some(2), None], TopLeft, Lengths::Padded), None);
        assert_eq!(of(4, 8, [None, Some(0)], BottomRight, Lengths::Padded), None);
        // No kernels.
        assert_eq!(of(8, 8, [None, Some(1)], TopLeft, Lengths::All), None);
    }
}
