//! Products of few rows, such as those of one token: `b` is read once, as it lies, and nothing of it is packed.
//!
//! Such a product takes as long as reading `b`. The micro-kernel of [`tile`](super::tile) wants a vector of one k over neighboring
//! rows of `b`, which are contiguous along k: here square blocks are transposed in registers on their way to the sums, so the
//! order of every sum, and with it the bits, are those of the packed product. Codes and bf16 values are decoded behind that, in
//! registers ([`form`](super::form)). What remains at the edges, and f16 values, are decoded a few lines at a time, in the first cache.

use super::form::{Bf16, Codes, Form, Words, add};
use super::lanes::{Job, Lanes};
use super::pack::{self, Elements, Lines};
use super::task::{Folded, Task};
use super::tile::Rows;
use crate::backend::cpu::Floats;
use crate::{Encoding, Result};
use std::ops::Range;

/// The most rows of `a` for any lanes. With more, sums and columns do not fit into the registers together.
pub(super) const MOST_ROWS: usize = 8;
/// Values of the largest tile: so many rows of the widest vector.
const LARGEST_TILE: usize = MOST_ROWS * 16;

/// The heights of tiles.
const HEIGHTS: [usize; 5] = [1, 2, 4, 6, 8];

/// Calls with the height of a tile as a constant.
macro_rules! for_height {
    ($lanes:ident, $height:expr, $rows:ident => $call:expr) => {
        for_height!($lanes, $height, $rows => $call, 1 2 4 6 8)
    };
    ($lanes:ident, $height:expr, $rows:ident => $call:expr, $($each:literal)*) => {
        match $height {
            $($each if $each <= $lanes::ROWS => {
                const $rows: usize = $each;
                $call
            })*
            height => unreachable!("a tile of {height} rows"),
        }
    };
}

mod packed;

/// Returns the height of the tile that holds so many rows, if there is one for these lanes.
#[inline(always)]
pub(super) fn height<L: Lanes>(rows: usize) -> Option<usize> {
    HEIGHTS.into_iter().find(|&height| height >= rows && height <= L::ROWS)
}

/// The words that [`Narrow`] needs: those of `a`, and those of the lines of `b` that are decoded at a time.
pub(super) fn words<L: Lanes>(rows: usize, k: usize, most_ks: usize) -> Option<[usize; 2]> {
    // Rows of `a` are packed as a whole, so a block must not begin in the middle of a pair.
    if L::PAIRS && most_ks < k && !most_ks.is_multiple_of(2) {
        return None;
    }
    let steps = pack::steps::<L>(k);
    let left = height::<L>(rows)? * steps + pack::left_words(rows, steps);
    Some([left, L::WIDTH * pack::line_words(pack::steps::<L>(most_ks.min(k)))])
}

/// The part of a product at `rows` × `cols`.
pub(super) struct Narrow<'t, 'a> {
    pub(super) task: &'t Task<'a>,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
    /// Room for the words of `a`, and for lines of `b`.
    pub(super) room: [&'t mut [u32]; 2],
}

impl Job for Narrow<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Result<()> {
        let Self { task, rows, cols, room: [left, spare] } = self;
        let Some(height) = height::<L>(rows.len()) else { return Ok(()) };
        let a = interleaved::<L>(task, rows.clone(), height, left)?;
        let most_ks = task.blocks.ks;
        for first in cols.clone().step_by(L::WIDTH) {
            let count = L::WIDTH.min(cols.end - first);
            let mut tile = [0.0; LARGEST_TILE];
            // Sums of the blocks of k before, where each block has factors of its own.
            let mut before = [0.0; LARGEST_TILE];
            if let (true, Some(out)) = (task.epilogue.starts_from_output(), task.out.as_f32()) {
                for (i, sums) in tile.chunks_exact_mut(L::WIDTH).take(rows.len()).enumerate() {
                    let row = out.wrapping_add((rows.start + i) * task.n + first);
                    for (j, sum) in sums[..count].iter_mut().enumerate() {
                        // SAFETY: the row and column are in the output, and in this part of it alone.
                        *sum = unsafe { *row.wrapping_add(j) };
                    }
                }
            }
            // Without products there is one block of no steps.
            for first_k in (0..task.k.max(1)).step_by(most_ks) {
                let ks = first_k..task.k.min(first_k + most_ks);
                let folded = Folded::new(task, first_k);
                if folded.is_some() {
                    tile = [0.0; LARGEST_TILE];
                }
                let a = |ks: Range<usize>| {
                    let [first, last] = [ks.start, ks.end].map(|k| pack::steps::<L>(k) * height);
                    &a[first..last]
                };
                let outers = first..first + count;
                let rest = whole::<L>(task, &outers, &ks);
                if rest > ks.start {
                    multiply_stored(lanes, height, a(ks.start..rest), task, [first, ks.start], &mut tile);
                }
                if rest < ks.end {
                    let lines = pack::lines::<L>(&task.b, outers, rest..ks.end, spare)?;
                    match task.epilogue.segment() {
                        None => multiply::<L, Words>(lanes, height, a(rest..ks.end), lines, &mut tile),
                        Some(segment) => {
                            for first in (rest..ks.end).step_by(segment) {
                                let skipped = pack::steps::<L>(first - rest);
                                let lines = Lines { words: &lines.words[skipped..], ..lines };
                                let mut sums = [0.0; LARGEST_TILE];
                                let a = a(first..ks.end.min(first + segment));
                                multiply::<L, Words>(lanes, height, a, lines, &mut sums);
                                tile.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
                            }
                        }
                    }
                }
                if let Some(folded) = folded {
                    let size = [rows.len(), count];
                    let before_rows = Rows { first: before.as_mut_ptr(), stride: L::WIDTH };
                    let before_rows = (first_k > 0).then_some(before_rows);
                    // SAFETY: `before` has the rows of a tile of this width.
                    unsafe { folded.fold(&mut tile, L::WIDTH, [rows.start, first], size, before_rows) };
                    before = tile;
                }
            }
            for (i, sums) in tile.chunks_exact_mut(L::WIDTH).take(rows.len()).enumerate() {
                let row = rows.start + i;
                // SAFETY: the row is in the output, which has n columns, and in this part of it alone.
                let out = unsafe { task.out.row(row * task.n + first, count) };
                task.epilogue.store(&mut sums[..count], row, first, out);
            }
        }
        Ok(())
    }
}

/// Packs rows of `a`, the words of a step side by side, with zeros up to `height` of them.
#[inline(always)]
fn interleaved<'w, L: Lanes>(
    task: &Task<'_>,
    rows: Range<usize>,
    height: usize,
    room: &'w mut [u32],
) -> Result<&'w [u32]> {
    let steps = pack::steps::<L>(task.k);
    let (words, block) = room.split_at_mut(height * steps);
    let count = rows.len();
    let left = pack::left::<L>(&task.a, rows, 0..task.k, block)?;
    if steps == 0 {
        return Ok(words);
    }
    for (step, words) in words.chunks_exact_mut(height).enumerate() {
        for (row, word) in words.iter_mut().enumerate() {
            // SAFETY: `left` was packed with `count` rows of these steps.
            *word = if row < count { unsafe { left.word(row, step) } } else { 0 };
        }
    }
    Ok(words)
}

/// Returns the k up to which the lines of `b` at `outers` are multiplied in the form in which they are stored: whole squares of words.
#[inline(always)]
fn whole<L: Lanes>(task: &Task<'_>, outers: &Range<usize>, ks: &Range<usize>) -> usize {
    let values = match task.b.elements {
        Elements::Codes(..) => 4,
        Elements::Floats(Floats::BF16(_)) if !L::PAIRS => 2,
        Elements::Packed(_) => 8,
        Elements::Floats(_) => return ks.start,
    };
    if outers.len() < L::WIDTH || pack::stored(&task.b, outers.start, ks.start).is_none() {
        return ks.start;
    }
    ks.end - ks.len() % (L::WIDTH * values)
}

/// Adds the products of `height` rows of `a` with a vector's width of lines of `b` from `outer` and `k` on, as they are stored.
#[inline(always)]
fn multiply_stored<L: Lanes>(
    lanes: L,
    height: usize,
    a: &[u32],
    task: &Task<'_>,
    [outer, k]: [usize; 2],
    tile: &mut [f32; LARGEST_TILE],
) {
    let Some(lines) = pack::stored(&task.b, outer, k) else { return };
    match task.b.elements {
        Elements::Codes(_, Encoding::E4M3) => multiply::<L, Codes<false>>(lanes, height, a, lines, tile),
        Elements::Codes(_, Encoding::E5M2) => multiply::<L, Codes<true>>(lanes, height, a, lines, tile),
        Elements::Floats(_) => multiply::<L, Bf16>(lanes, height, a, lines, tile),
        Elements::Packed(ref packed) => {
            for_height!(L, height, ROWS => packed::sized::<L, ROWS>(lanes, a, lines, packed, [outer, k], tile));
        }
        // Codes of E2M1 are packed.
        Elements::Codes(_, Encoding::E2M1) => {}
    }
}

/// Adds the products of `height` rows of `a` with a vector's width of lines of `b` to `tile`. `a` has the words of all its rows for a
/// step, then those of the next one.
#[inline(always)]
fn multiply<L: Lanes, F: Form<L>>(
    lanes: L,
    height: usize,
    a: &[u32],
    b: Lines<'_>,
    tile: &mut [f32; LARGEST_TILE],
) {
    for_height!(L, height, ROWS => sized::<L, F, ROWS>(lanes, a, b, tile));
}

#[inline(always)]
fn sized<L: Lanes, F: Form<L>, const ROWS: usize>(
    lanes: L,
    a: &[u32],
    b: Lines<'_>,
    tile: &mut [f32; LARGEST_TILE],
) {
    // Stored words of a line.
    let (words, stride) = (a.len() / (ROWS * F::STEPS), b.stride);
    // The last words that are read: everything below is in bounds.
    assert!(
        b.words.len() >= (L::WIDTH - 1) * stride + words && stride >= words && ROWS * L::WIDTH <= tile.len()
    );
    let mut sums = [lanes.zero(); ROWS];
    for (sum, row) in sums.iter_mut().zip(tile.chunks_exact(L::WIDTH)) {
        // SAFETY: the row is a vector long.
        *sum = unsafe { lanes.sums(row.as_ptr()) };
    }
    let (mut a, mut b) = (a.as_ptr(), b.words.as_ptr());
    for _ in 0..words / L::WIDTH {
        // What follows the lines in memory are usually the next ones.
        for line in 0..L::WIDTH {
            lanes.prefetch(b.wrapping_add((L::WIDTH + line) * stride));
        }
        // SAFETY: the lines have these words, as was just checked.
        let columns = unsafe { lanes.columns(b, stride) };
        for (i, column) in columns.as_ref().iter().enumerate() {
            // SAFETY: there are words of `a` for all steps.
            unsafe { add::<L, F, ROWS>(lanes, &mut sums, a.wrapping_add(i * F::STEPS * ROWS), *column) };
        }
        a = a.wrapping_add(L::WIDTH * F::STEPS * ROWS);
        b = b.wrapping_add(L::WIDTH);
    }
    for i in 0..words % L::WIDTH {
        let mut column = [0; 16];
        for (line, word) in column[..L::WIDTH].iter_mut().enumerate() {
            // SAFETY: the line has this word.
            *word = unsafe { *b.wrapping_add(line * stride + i) };
        }
        // SAFETY: `column` has at least a vector of words.
        let column = unsafe { lanes.words(column.as_ptr()) };
        // SAFETY: as above.
        unsafe { add::<L, F, ROWS>(lanes, &mut sums, a.wrapping_add(i * F::STEPS * ROWS), column) };
    }
    for (sum, row) in sums.into_iter().zip(tile.chunks_exact_mut(L::WIDTH)) {
        // SAFETY: the row is a vector long.
        unsafe { lanes.store(sum, row.as_mut_ptr()) };
    }
}
