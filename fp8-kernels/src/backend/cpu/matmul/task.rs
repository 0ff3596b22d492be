//! A product, and its division among threads and caches.

use super::super::parallel;
use super::epilogue::{Epilogue, Factors, Out};
use super::pack::{Elements, Matrix, Packed};
use super::tile::Rows;
use super::vectors::Vectors;
use crate::Result;
use std::ops::Range;

/// The largest blocks that are packed at a time. They decide speed alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// Rows of `a`: a block of it goes through the second-level cache.
    pub(super) rows: usize,
    /// Columns of `b`: a block of it stays in the second-level cache.
    pub(super) cols: usize,
    pub(super) ks: usize,
}

impl Blocks {
    pub(super) fn new(vectors: Vectors) -> Self {
        // A pair takes as much room as an f32.
        Self { rows: 96, cols: 512, ks: if vectors.has_pairs() { 512 } else { 256 } }
    }
}

/// The division of the output among threads: a grid of parts. Each part packs the operands that it needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Multiply-adds that take about as long as waking a thread.
const WORTH_A_THREAD: usize = 1 << 18;

/// Elements of `b` that take about as long as waking a thread.
const WORTH_A_PART: usize = 1 << 15;

impl Parts {
    pub(super) const ONE: Self = Self { rows: 1, cols: 1 };

    /// The grid of at least `threads` parts that packs the least; fewer where parts would be too small.
    pub(super) fn new([m, n, k]: [usize; 3], threads: usize) -> Self {
        let work = m.saturating_mul(n).saturating_mul(k) / WORTH_A_THREAD;
        let threads = threads.min(work).max(1);
        let grid = |rows: usize| Self { rows, cols: threads.div_ceil(rows) };
        // Each part packs its rows of `a` and its columns of `b`.
        let packed = |grid: &Self| grid.rows.saturating_mul(n).saturating_add(grid.cols.saturating_mul(m));
        (1..=threads).map(grid).min_by_key(packed).unwrap_or(Self::ONE)
    }

    /// The parts of a product of few rows, which takes as long as reading `b`: some for each thread, because what else the memory
    /// has to do decides which is done first.
    pub(super) fn of_few_rows([_, n, k]: [usize; 3], threads: usize) -> Self {
        let worth = n.saturating_mul(k) / WORTH_A_PART;
        let cols = if threads == 1 { 1 } else { worth.min(threads.saturating_mul(8)).max(1) };
        Self { rows: 1, cols }
    }

    /// Calls `f` with the rows and columns of each part, on the threads of the current pool.
    pub(super) fn for_each(
        self,
        [m, n]: [usize; 2],
        f: impl Fn(Range<usize>, Range<usize>) -> Result<()> + Sync,
    ) -> Result<()> {
        // Multiples of the tiles of all lanes.
        let (height, width) =
            (m.div_ceil(self.rows).next_multiple_of(12), n.div_ceil(self.cols).next_multiple_of(32));
        let (rows, cols) = (m.div_ceil(height), n.div_ceil(width));
        let part = |index: usize| {
            let (row, col) = (index / cols * height, index % cols * width);
            f(row..m.min(row + height), col..n.min(col + width))
        };
        parallel::try_for_each(0..rows * cols, part)
    }
}

/// A product, of which each thread computes a part.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) op: &'static str,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: Matrix<'a>,
    pub(super) b: Matrix<'a>,
    pub(super) epilogue: &'a Epilogue<'a>,
    pub(super) out: &'a Out<'a>,
    pub(super) blocks: Blocks,
}

impl<'a> Task<'a> {
    pub(super) fn new(
        op: &'static str,
        [m, n, k]: [usize; 3],
        a: Matrix<'a>,
        b: Matrix<'a>,
        epilogue: &'a Epilogue<'a>,
        out: &'a Out<'a>,
        blocks: Blocks,
    ) -> Self {
        // Not reachable from the operations, which check shapes; it keeps the stores below sound on their own.
        assert!(m.checked_mul(n).is_some_and(|len| len <= out.len()));
        assert!(!epilogue.accumulate || out.as_f32().is_some());
        let ks = if let Factors::Blocks { length, .. } = epilogue.factors { length } else { blocks.ks };
        Self { op, m, n, k, a, b, epilogue, out, blocks: Blocks { ks, ..blocks } }
    }

    /// Both operands, if they are packed codes.
    #[inline(always)]
    pub(super) fn packed(&self) -> Option<[Packed<'a>; 2]> {
        match (self.a.elements, self.b.elements) {
            (Elements::Packed(a), Elements::Packed(b)) => Some([a, b]),
            _ => None,
        }
    }
}

/// The factors of one block of k.
pub(super) struct Folded<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl<'a> Folded<'a> {
    /// `None` if the sums of blocks of k have no factors of their own.
    #[inline(always)]
    pub(super) fn new(task: &Task<'a>, first_k: usize) -> Option<Self> {
        let Factors::Blocks { a, b, length } = task.epilogue.factors else { return None };
        let block = first_k / length;
        Some(Self { a: &a[block * task.m..][..task.m], b: &b[block * task.n..][..task.n] })
    }

    /// Multiplies the sums of a tile by their factors and adds them to those of the blocks before, or to 0.
    ///
    /// # Safety
    /// `before` must have `height` readable rows of `count` values.
    #[inline(always)]
    pub(super) unsafe fn fold(
        &self,
        tile: &mut [f32],
        stride: usize,
        [row, col]: [usize; 2],
        [height, count]: [usize; 2],
        before: Option<Rows>,
    ) {
        for (i, sums) in tile.chunks_exact_mut(stride).take(height).enumerate() {
            let a = self.a[row + i];
            let sums = sums[..count].iter_mut().zip(&self.b[col..][..count]);
            match before {
                None => sums.for_each(|(sum, b)| *sum = 0.0 + *sum * a * b),
                Some(before) => {
                    let start = before.first.wrapping_add(i * before.stride);
                    for (j, (sum, b)) in sums.enumerate() {
                        // SAFETY: the caller vouches for value j of row i.
                        *sum = unsafe { *start.wrapping_add(j) } + *sum * a * b;
                    }
                }
            }
        }
    }
}
