//! How work is split over threads: by shape alone, so that results do not depend on how many there are.

use super::dispatch::vectorized;
use crate::Result;
use crate::host::Array;
use rayon::prelude::*;

/// Elements of one piece of elementwise work: large enough to outweigh a task, small enough for the first caches.
pub(crate) const CHUNK: usize = 16 * 1024;

/// `f` on matching pieces of two slices of one length.
pub(crate) fn zip<A: Send, B: Sync>(out: &mut [A], data: &[B], f: impl Fn(&mut [A], &[B]) + Sync) {
    if out.len() <= CHUNK {
        return vectorized(|| f(out, data));
    }
    out.par_chunks_mut(CHUNK).zip(data.par_chunks(CHUNK)).for_each(|(out, data)| vectorized(|| f(out, data)));
}

/// Rows of one piece, for rows of `cols` elements: a function of the shape alone.
pub(crate) fn rows_per_chunk(cols: usize) -> usize {
    (CHUNK / cols.max(1)).max(1)
}

/// Elements of one piece of whole rows; at least 1.
pub(crate) fn row_elements(cols: usize) -> usize {
    rows_per_chunk(cols) * cols.max(1)
}

/// `f(first row, rows)` on pieces of whole rows of a `[rows, cols]` matrix. Nothing happens where either is 0.
pub(crate) fn rows<T: Send>(out: &mut [T], cols: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if cols == 0 || out.is_empty() {
        return;
    }
    let step = rows_per_chunk(cols);
    if out.len() <= step * cols {
        return vectorized(|| f(0, out));
    }
    out.par_chunks_mut(step * cols).enumerate().for_each(|(chunk, out)| vectorized(|| f(chunk * step, out)));
}

/// `f(first row, one past the last)` for each piece of `rows`, results in the order of the pieces; none where there are no
/// elements.
pub(crate) fn map_rows<R: Send>(rows: usize, cols: usize, f: impl Fn(usize, usize) -> R + Sync) -> Vec<R> {
    if cols == 0 {
        return Vec::new();
    }
    let step = rows_per_chunk(cols);
    let piece = |chunk: usize| vectorized(|| f(chunk * step, rows.min((chunk + 1) * step)));
    let chunks = rows.div_ceil(step);
    if chunks <= 1 {
        (0..chunks).map(piece).collect()
    } else {
        (0..chunks).into_par_iter().map(piece).collect()
    }
}

/// [`rows`], with results in the order of the pieces.
pub(crate) fn map_rows_mut<T: Send, R: Send>(
    out: &mut [T],
    cols: usize,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let step = rows_per_chunk(cols);
    let piece = |(chunk, out): (usize, &mut [T])| vectorized(|| f(chunk * step, out));
    out.par_chunks_mut(step * cols.max(1)).enumerate().map(piece).collect()
}

/// Adds vectors of one length in their order; zeros for none.
pub(crate) fn sum_in_order(
    op: &'static str,
    parts: impl IntoIterator<Item = Result<Array<f32>>>,
    len: usize,
) -> Result<Array<f32>> {
    let mut parts = parts.into_iter();
    let mut sum = parts.next().unwrap_or_else(|| Array::zeroed(op, len))?;
    for part in parts {
        sum.iter_mut().zip(&part?[..]).for_each(|(sum, v)| *sum += v);
    }
    Ok(sum)
}
