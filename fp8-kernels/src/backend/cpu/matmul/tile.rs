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

/// Returns the largest height of a tile for `rows` rows, at least 1.
#[inline(always)]
pub(super) fn height<L: Lanes>(rows: usize) -> usize {
    HEIGHTS.into_iter().find(|&height| height <= rows.min(L::ROWS)).unwrap_or(1)
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
    // SAFETY: row i of `rows` is readable over the vectors' width.
    let read = |rows: Rows, i: usize, j: usize| unsafe {
        lanes.sums(rows.first.wrapping_add(i * rows.stride + j * L::WIDTH))
    };
    let is_whole = segment == WHOLE;
    // Sums that a tile begins with, and those that a segment's are added to: in memory, as the registers are taken.
    let (begins_with, mut added_to) = if is_whole { (sums.initial, None) } else { (None, sums.initial) };
    // A pointer to every third row, which the compiler must keep: a chain of additions from row to row would take as long as
    // the products.
    let mut left: [*const u32; HEIGHTS[0] / 3] =
        std::array::from_fn(|i| black_box(a.words.wrapping_add(3 * i * a.row)));
    let mut right = b.words;
    let mut left_over = steps;
    loop {
        let mut tile = [[lanes.zero(); VECTORS]; ROWS];
        if let Some(initial) = begins_with {
            for (i, row) in tile.iter_mut().enumerate() {
                for (j, vector) in row.iter_mut().enumerate() {
                    *vector = read(initial, i, j);
                }
            }
        }
        let count = left_over.min(segment);
        for _ in 0..count {
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
            for words in &mut left {
                *words = words.wrapping_add(a.step);
            }
            right = right.wrapping_add(b.step);
        }
        left_over -= count;
        let is_last = left_over == 0;
        for (i, row) in tile.into_iter().enumerate() {
            for (j, vector) in row.into_iter().enumerate() {
                let vector = added_to.map_or(vector, |sums| lanes.add(read(sums, i, j), vector));
                let vector = if sums.canonical && is_last { lanes.canonical(vector) } else { vector };
                // SAFETY: row i of `out` is writable over the vectors' width.
                unsafe {
                    lanes.store(vector, sums.out.first.wrapping_add(i * sums.out.stride + j * L::WIDTH))
                };
            }
        }
        if is_last {
            return;
        }
        added_to = Some(sums.out);
    }
}
