//! The micro-kernel: a tile of sums that stays in registers while k advances.

use super::lanes::Lanes;
use std::hint::black_box;

/// Rows of f32 values, `stride` values apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) first: *mut f32,
    pub(super) stride: usize,
}

/// Packed words of `a`: row i, step p is word `i · row + p · step`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) words: *const u32,
    pub(super) row: usize,
    pub(super) step: usize,
}

impl Left {
    /// # Safety
    /// The row and the step are among those that were packed.
    #[inline(always)]
    pub(super) unsafe fn word(self, row: usize, step: usize) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { *self.words.wrapping_add(row * self.row + step * self.step) }
    }
}

/// The sums that a tile starts from, the place where it stores its own, and whether they are results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// Zeros for `None`.
    pub(super) initial: Option<Rows>,
    pub(super) out: Rows,
    /// Whether NaNs become `f32::NAN`.
    pub(super) canonical: bool,
}

/// Columns of words of `b`, which has one row a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Right {
    pub(super) words: *const u32,
    /// From one row to the next.
    pub(super) step: usize,
}

/// The length of a segment that is never full: all steps are one sum.
pub(super) const WHOLE: usize = usize::MAX;

/// Adds `steps` words of `rows` rows of `a` times columns of `b`, which are `vectors` vectors. Each `segment` of the steps is summed by
/// itself and then added, unless it is [`WHOLE`].
///
/// # Safety
/// `rows` is one of [`HEIGHTS`] and at most `L::ROWS`; `vectors` is 1 or 2. The words that this names must be readable, the
/// rows of `sums` readable and writable over the vectors' width.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes>(
    lanes: L,
    [rows, vectors]: [usize; 2],
    [steps, segment]: [usize; 2],
    a: Left,
    b: Right,
    sums: Sums,
) {
    let steps = [steps, segment.max(1)];
    macro_rules! of_size {
        ($($rows:literal)*) => {
            match (rows, vectors) {
                $(
                    // SAFETY: the caller's promises are those of `sized`.
                    ($rows, 1) if $rows <= L::ROWS => unsafe { sized::<L, $rows, 1>(lanes, steps, a, b, sums) },
                    // SAFETY: as above.
                    ($rows, 2) if $rows <= L::ROWS => unsafe { sized::<L, $rows, 2>(lanes, steps, a, b, sums) },
                )*
                _ => unreachable!("a tile of {rows} rows and {vectors} vectors"),
            }
        };
    }
    of_size!(12 8 6 4 2 1)
}

/// The heights of tiles, the largest first.
const HEIGHTS: [usize; 6] = [12, 8, 6, 4, 2, 1];

/// The most rows of a tile with segments for vectors with 32 registers, which hold two sums for each place then.
const SEGMENTED_ROWS: usize = 6;

/// Returns the largest height of a tile for `rows` rows, at least 1, with such segments.
#[inline(always)]
pub(super) fn height<L: Lanes>(rows: usize, segment: usize) -> usize {
    let most = if segment == WHOLE { L::ROWS } else { L::ROWS.min(SEGMENTED_ROWS) };
    HEIGHTS.into_iter().find(|&height| height <= rows.min(most)).unwrap_or(1)
}

/// # Safety
/// That of [`tile`].
#[inline(always)]
unsafe fn sized<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    lanes: L,
    [steps, segment]: [usize; 2],
    a: Left,
    b: Right,
    sums: Sums,
) {
    let mut tile = [[lanes.zero(); VECTORS]; ROWS];
    if let Some(initial) = sums.initial {
        for (i, row) in tile.iter_mut().enumerate() {
            for (j, vector) in row.iter_mut().enumerate() {
                // SAFETY: row i is readable over the vectors' width.
                *vector =
                    unsafe { lanes.sums(initial.first.wrapping_add(i * initial.stride + j * L::WIDTH)) };
            }
        }
    }
    let mut operands = Operands {
        // A pointer to every third row, which the compiler must keep: a chain of additions from row to row would take as long as
        // the products.
        left: std::array::from_fn(|i| black_box(a.words.wrapping_add(3 * i * a.row))),
        right: b.words,
        a,
        b,
    };
    if segment == WHOLE {
        // SAFETY: the caller vouches for the words of all steps.
        unsafe { operands.multiply(lanes, &mut tile, steps) };
    } else {
        for first in (0..steps).step_by(segment) {
            let mut products = [[lanes.zero(); VECTORS]; ROWS];
            // SAFETY: as above.
            unsafe { operands.multiply(lanes, &mut products, segment.min(steps - first)) };
            for (row, products) in tile.iter_mut().zip(products) {
                for (vector, products) in row.iter_mut().zip(products) {
                    *vector = lanes.add(*vector, products);
                }
            }
        }
    }
    for (i, row) in tile.into_iter().enumerate() {
        for (j, vector) in row.into_iter().enumerate() {
            let vector = if sums.canonical { lanes.canonical(vector) } else { vector };
            // SAFETY: row i of `out` is writable over the vectors' width.
            unsafe { lanes.store(vector, sums.out.first.wrapping_add(i * sums.out.stride + j * L::WIDTH)) };
        }
    }
}

/// The words of both operands from a step on.
struct Operands {
    left: [*const u32; HEIGHTS[0] / 3],
    right: *const u32,
    a: Left,
    b: Right,
}

impl Operands {
    /// Adds the products of the next `steps` to `tile`.
    ///
    /// # Safety
    /// The words of these steps must be readable: `ROWS` of `a`, `VECTORS` vectors of `b`.
    #[inline(always)]
    unsafe fn multiply<L: Lanes, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        lanes: L,
        tile: &mut [[L::Vector; VECTORS]; ROWS],
        steps: usize,
    ) {
        let Self { left, right, a, b } = self;
        for _ in 0..steps {
            let mut columns = [lanes.zero(); VECTORS];
            for (j, column) in columns.iter_mut().enumerate() {
                // SAFETY: each step has a row of `b`.
                *column = unsafe { lanes.words(right.wrapping_add(j * L::WIDTH)) };
            }
            for (i, row) in tile.iter_mut().enumerate() {
                // SAFETY: row i has a word for each step.
                let word = lanes.splat(unsafe { *left[i / 3].wrapping_add(i % 3 * a.row) });
                for (vector, column) in row.iter_mut().zip(columns) {
                    *vector = lanes.multiply_add(*vector, word, column);
                }
            }
            for words in &mut *left {
                *words = words.wrapping_add(a.step);
            }
            *right = right.wrapping_add(b.step);
        }
    }
}
