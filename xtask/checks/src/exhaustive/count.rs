//! Chunks of patterns, and the counts of a path.

use std::fmt::LowerHex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Patterns taken at a time: with their codes they stay in a core's own cache.
pub(crate) const CHUNK: usize = 1 << 16;

/// Every `stride`-th 32-bit pattern, in chunks, each chunk visited by one thread of rayon's pool.
pub(crate) fn for_each_chunk(stride: u32, visit: impl Fn(&[u32]) + Sync) {
    use rayon::prelude::*;
    let count = (u64::from(u32::MAX)) / u64::from(stride) + 1;
    let chunks = count.div_ceil(CHUNK as u64);
    (0..chunks).into_par_iter().for_each_init(Vec::new, |patterns, chunk| {
        let first = chunk * CHUNK as u64;
        let last = count.min(first + CHUNK as u64);
        patterns.clear();
        // In range: the largest index times the stride is at most u32::MAX.
        patterns.extend((first..last).map(|i| i as u32 * stride));
        visit(patterns);
    });
}

/// The counts of one path, added up over all threads.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) name: String,
    pub(crate) count: AtomicU64,
    pub(crate) mismatches: AtomicU64,
    pub(crate) nanoseconds: AtomicU64,
}

impl Path {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            count: AtomicU64::new(0),
            mismatches: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        }
    }

    /// Compares element by element; prints the first difference that this path ever sees.
    pub(crate) fn compare<B: Copy + PartialEq + LowerHex>(
        &self,
        input: impl Fn(usize) -> u64,
        got: &[B],
        expected: &[B],
        took: Duration,
    ) {
        // Equality of slices is much faster than counting.
        let wrong = if got == expected {
            0
        } else {
            got.iter().zip(expected).filter(|(g, e)| g != e).count() + got.len().abs_diff(expected.len())
        };
        if wrong > 0
            && self.mismatches.fetch_add(wrong as u64, Ordering::Relaxed) == 0
            && let Some(i) = got.iter().zip(expected).position(|(g, e)| g != e)
        {
            let (g, e) = (got[i], expected[i]);
            println!("{}: input {:#010x} gives {g:#04x}, expected {e:#04x}", self.name, input(i));
        }
        self.count.fetch_add(expected.len() as u64, Ordering::Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// One line: path, count, seconds that its threads spent in it. Returns (count, mismatches).
    pub(crate) fn report(&self) -> (u64, u64) {
        let count = self.count.load(Ordering::Relaxed);
        let mismatches = self.mismatches.load(Ordering::Relaxed);
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 * 1e-9;
        println!("{:<44} {count:>11} {seconds:>7.2} s  {mismatches} mismatches", self.name);
        (count, mismatches)
    }
}

/// The result of `f` and the time it took.
pub(crate) fn timed<R>(f: impl FnOnce() -> R) -> (R, Duration) {
    let start = Instant::now();
    let result = f();
    (result, start.elapsed())
}

pub(crate) fn total<'a>(counts: impl IntoIterator<Item = &'a Path>) -> (u64, u64) {
    let reports = counts.into_iter().map(Path::report);
    reports.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}
