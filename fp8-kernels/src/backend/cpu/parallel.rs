//! Splits work over threads by shape alone, so that results do not depend on the number of threads.

use super::dispatch::vectorized;
use crate::Result;
use crate::host::Array;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Elements of one piece of elementwise work: large enough to outweigh a task, small enough for the first caches.
pub(crate) const CHUNK: usize = 16 * 1024;

/// Calls `f` with each item, on the calling thread and on threads of the current pool.
///
/// The calling thread works as well. So a short loop may be finished before another thread has woken up, which takes longer
/// than many operations, and a pool of one thread has nothing to wake. Threads take one item after the other.
pub(crate) fn for_each<I>(items: I, f: impl Fn(I::Item) + Sync)
where
    I: ExactSizeIterator<Item: Send> + Send,
{
    let others = items.len().min(rayon::current_num_threads()).saturating_sub(1);
    let items = Mutex::new(items);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    on_threads(others, &|| {
        while let Some(item) = next() {
            f(item);
        }
    });
}

/// Calls `work` here and on `others` threads of the current pool. Compiled once, not once for each kernel.
fn on_threads(others: usize, work: &(dyn Fn() + Sync)) {
    if others == 0 {
        return work();
    }
    rayon::in_place_scope(|scope| {
        (0..others).for_each(|_| scope.spawn(|_| work()));
        work();
    });
}

/// [`for_each`] with errors: an item that fails keeps those not yet begun from being begun.
pub(crate) fn try_for_each<I>(items: I, f: impl Fn(I::Item) -> Result<()> + Sync) -> Result<()>
where
    I: ExactSizeIterator<Item: Send> + Send,
{
    let (has_failed, error) = (AtomicBool::new(false), Mutex::new(None));
    for_each(items, |item| {
        if has_failed.load(Ordering::Relaxed) {
            return;
        }
        if let Err(failure) = f(item) {
            has_failed.store(true, Ordering::Relaxed);
            error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        }
    });
    error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// [`for_each`] with results, in the order of the items.
pub(crate) fn map<I, R: Send>(items: I, f: impl Fn(I::Item) -> R + Sync) -> Vec<R>
where
    I: ExactSizeIterator<Item: Send> + Send,
{
    let mut results: Vec<Option<R>> = Vec::new();
    results.resize_with(items.len(), || None);
    for_each(items.zip(&mut results), |(item, result)| *result = Some(f(item)));
    results.into_iter().flatten().collect()
}

/// `f` on matching pieces of two slices of one length.
pub(crate) fn zip<A: Send, B: Sync>(out: &mut [A], data: &[B], f: impl Fn(&mut [A], &[B]) + Sync) {
    if out.len() <= CHUNK {
        return vectorized(|| f(out, data));
    }
    for_each(out.chunks_mut(CHUNK).zip(data.chunks(CHUNK)), |(out, data)| vectorized(|| f(out, data)));
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
    for_each(out.chunks_mut(step * cols).enumerate(), |(chunk, out)| vectorized(|| f(chunk * step, out)));
}

/// `f(first row, one past the last)` for each piece of `rows`, results in the order of the pieces; none where there are no
/// elements.
pub(crate) fn map_rows<R: Send>(rows: usize, cols: usize, f: impl Fn(usize, usize) -> R + Sync) -> Vec<R> {
    if cols == 0 {
        return Vec::new();
    }
    let step = rows_per_chunk(cols);
    let piece = |chunk: usize| vectorized(|| f(chunk * step, rows.min((chunk + 1) * step)));
    map(0..rows.div_ceil(step), piece)
}

/// [`rows`], with results in the order of the pieces.
pub(crate) fn map_rows_mut<T: Send, R: Send>(
    out: &mut [T],
    cols: usize,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let step = rows_per_chunk(cols);
    let piece = |(chunk, out): (usize, &mut [T])| vectorized(|| f(chunk * step, out));
    map(out.chunks_mut(step * cols.max(1)).enumerate(), piece)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_item_is_taken_once_and_results_keep_their_order() {
        for threads in 1..=4 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            // From outside of the pool, and from one of its threads.
            for len in [0, 1, 2, 3, 1000] {
                let squares: Vec<usize> = (0..len).map(|i| i * i).collect();
                assert_eq!(map(0..len, |i| i * i), squares);
                assert_eq!(
                    pool.install(|| map(0..len, |i| map(0..i % 3, |_| 1).len() + i * i - i % 3)),
                    squares
                );
            }
        }
    }

    #[test]
    fn an_error_ends_the_loop() {
        let calls = AtomicUsize::new(0);
        let failed = try_for_each(0..1_000_000, |i: usize| {
            calls.fetch_add(1, Ordering::Relaxed);
            if i == 3 { Err(Error::HostAllocation { op: "test", bytes: i }) } else { Ok(()) }
        });
        assert_eq!(
            failed.unwrap_err().to_string(),
            Error::HostAllocation { op: "test", bytes: 3 }.to_string()
        );
        assert!(calls.into_inner() < 1_000_000);
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panics = |i: usize| {
            if i == 7 {
                panic!("seven")
            }
        };
        assert!(std::panic::catch_unwind(|| for_each(0..100, panics)).is_err());
    }
}
