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

impl Sums {
    /// Returns the place of the sums `cols` columns further on.
    #[inline(always)]
    pub(super) fn beyond(self, cols: usize) -> Self {
        let shift = |rows: Rows| Rows { first: rows.first.wrapping_add(cols), ..rows };
        Self { initial: self.initial.map(shift), out: shift(self.out), ..self }
    }

    /// Returns the sums that a tile of `ROWS` rows of `VECTORS` vectors starts from.
    ///
    /// # Safety
    /// So much must be readable.
    #[inline(always)]
    pub(super) unsafe fn load<L: Lanes, const ROWS: usize, const VECTORS: usize>(
        self,
        lanes: L,
    ) -> [[L::Vector; VECTORS]; ROWS] {
        let mut tile = [[lanes.zero(); VECTORS]; ROWS];
        if let Some(Rows { first, stride }) = self.initial {
            for (i, row) in tile.iter_mut().enumerate() {
                for (j, vector) in row.iter_mut().enumerate() {
                    // SAFETY: the caller vouches for row i.
                    *vector = unsafe { lanes.sums(first.wrapping_add(i * stride + j * L::WIDTH)) };
                }
            }
        }
        tile
    }

    /// Stores a tile.
    ///
    /// # Safety
    /// Its rows must be writable.
    #[inline(always)]
    pub(super) unsafe fn store<L: Lanes, const ROWS: usize, const VECTORS: usize>(
        self,
        lanes: L,
        tile: [[L::Vector; VECTORS]; ROWS],
    ) {
        let Rows { first, stride } = self.out;
        for (i, row) in tile.into_iter().enumerate() {
            for (j, vector) in row.into_iter().enumerate() {
                let vector = if self.canonical { lanes.canonical(vector) } else { vector };
                // SAFETY: the caller vouches for row i.
                unsafe { lanes.store(vector, first.wrapping_add(i * stride + j * L::WIDTH)) };
            }
        }
    }
}

/// Columns of words of `b`, which has one row a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Right {
    pub(super) words: *const u32,
    /// From one row to the next.
    pub(super) step: usize,
}

/// Adds `steps` words of `rows` rows of `a` times columns of `b`, which are `vectors` vectors.
///
/// # Safety
/// `rows` is one of [`HEIGHTS`] and at most `L::ROWS`; `vectors` is 1 or 2. The words that this names must be readable, the
/// rows of `sums` readable and writable over the vectors' width.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes>(
    lanes: L,
    [rows, vectors]: [usize; 2],
    steps: usize,
    a: Left,
    b: Right,
    sums: Sums,
) {
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
    steps: usize,
    a: Left,
    b: Right,
    sums: Sums,
) {
    // SAFETY: the caller vouches for the sums.
    let mut tile = unsafe { sums.load::<L, ROWS, VECTORS>(lanes) };
    // A pointer to every third row, which the compiler must keep: a chain of additions from row to row would take as long as
    // the products.
    let mut left: [*const u32; HEIGHTS[0] / 3] =
        std::array::from_fn(|i| black_box(a.words.wrapping_add(3 * i * a.row)));
    let mut right = b.words;
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
        for words in &mut left {
            *words = words.wrapping_add(a.step);
        }
        right = right.wrapping_add(b.step);
    }
    // SAFETY: as above.
    unsafe { sums.store(lanes, tile) };
}
