//! The loops of one thread: blocks that stay in its caches, tiles that stay in registers.

use super::super::scratch;
use super::integers;
use super::lanes::{Job, Lanes};
use super::narrow::{self, Narrow};
use super::pack;
use super::task::{Blocks, Folded, Task};
use super::tile::{self, Left, Right, Rows, Sums};
use super::vectors::Vectors;
use crate::Result;
use std::ops::Range;

impl Task<'_> {
    /// Computes the part of the output at `rows` × `cols`. Parts that run at a time must not overlap.
    pub(super) fn run(&self, vectors: Vectors, rows: Range<usize>, cols: Range<usize>) -> Result<()> {
        if let Some(words) = self.narrow_words(vectors, rows.len())? {
            return self.run_narrow(vectors, rows, cols, words);
        }
        struct Sizes<'a> {
            words: &'a mut [usize; 2],
            block: [usize; 3],
            is_packed: bool,
        }
        impl Job for Sizes<'_> {
            #[inline(always)]
            fn run<L: Lanes>(self, _: L) -> Result<()> {
                let Self { words, block: [rows, cols, ks], is_packed } = self;
                let left = match is_packed {
                    true => integers::left_words(rows, ks),
                    false => pack::left_words(rows, pack::steps::<L>(ks)),
                };
                *words = [left, pack::right_words::<L>(cols, right_steps::<L>(is_packed, ks))];
                Ok(())
            }
        }
        let Blocks { rows: most_rows, cols: most_cols, ks: most_ks } = self.blocks;
        let block = [rows.len().min(most_rows), cols.len().min(most_cols), self.k.min(most_ks).max(1)];
        let mut words = [0; 2];
        vectors.run(Sizes { words: &mut words, block, is_packed: self.packed().is_some() })?;
        // Unfinished sums wait in the output where it can hold them.
        let waits_outside =
            self.k > most_ks && (self.out.as_f32().is_none() || self.epilogue.adds_to_output());
        let waiting = if waits_outside { rows.len() * cols.len() } else { 0 };
        let [left, right] = words;
        scratch::with(self.op, left + right + 2 * LINE + waiting, |room| {
            let (waiting, room) = room.split_at_mut(waiting);
            let room = aligned(bytemuck::cast_slice_mut(room));
            let (right, left) = room.split_at_mut(right.next_multiple_of(LINE));
            let waiting = waits_outside.then_some(waiting);
            vectors.run(Part { task: self, rows, cols, block, left, right, waiting })
        })?
    }

    /// Returns the words that a product of so many rows needs if nothing of `b` is packed; `None` if they are too many rows, or `b`
    /// is not contiguous along k.
    fn narrow_words(&self, vectors: Vectors, rows: usize) -> Result<Option<[usize; 2]>> {
        struct Sizes<'a>(&'a mut Option<[usize; 2]>, [usize; 3]);
        impl Job for Sizes<'_> {
            #[inline(always)]
            fn run<L: Lanes>(self, _: L) -> Result<()> {
                let [rows, k, ks] = self.1;
                *self.0 = narrow::words::<L>(rows, k, ks);
                Ok(())
            }
        }
        let mut words = None;
        if !self.b.is_along_k() || rows > narrow::MOST_ROWS {
            return Ok(words);
        }
        vectors.run(Sizes(&mut words, [rows, self.k, self.blocks.ks]))?;
        Ok(words)
    }

    fn run_narrow(
        &self,
        vectors: Vectors,
        rows: Range<usize>,
        cols: Range<usize>,
        [left, lines]: [usize; 2],
    ) -> Result<()> {
        scratch::with(self.op, left + lines + LINE, |room| {
            let room = bytemuck::cast_slice_mut(room);
            let (left, lines) = room.split_at_mut(left.next_multiple_of(LINE));
            vectors.run(Narrow { task: self, rows, cols, room: [left, lines] })
        })?
    }
}

/// Returns the rows of a panel of `b`.
#[inline(always)]
fn right_steps<L: Lanes>(is_packed: bool, ks: usize) -> usize {
    if is_packed { integers::right_steps(ks) } else { pack::steps::<L>(ks) }
}

/// Words of a cache line.
const LINE: usize = 16;

/// The words from the first cache line on.
fn aligned(words: &mut [u32]) -> &mut [u32] {
    let skipped = words.as_ptr().align_offset(size_of::<u32>() * LINE).min(LINE);
    &mut words[skipped..]
}

struct Part<'a> {
    task: &'a Task<'a>,
    rows: Range<usize>,
    cols: Range<usize>,
    block: [usize; 3],
    left: &'a mut [u32],
    right: &'a mut [u32],
    waiting: Option<&'a mut [f32]>,
}

impl Job for Part<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Result<()> {
        let Self { task, rows, cols, block: [most_rows, most_cols, most_ks], left, right, waiting } = self;
        let packed = task.packed();
        let unfinished = match waiting {
            Some(waiting) => {
                let sums = Rows { first: waiting.as_mut_ptr(), stride: cols.len() };
                Some(Unfinished { sums, row: rows.start, col: cols.start })
            }
            None => {
                let output = task.out.as_f32();
                output.map(|first| Unfinished { sums: Rows { first, stride: task.n }, row: 0, col: 0 })
            }
        };
        for first_col in cols.clone().step_by(most_cols) {
            let block_cols = first_col..cols.end.min(first_col + most_cols);
            // Without products there is one block of no steps.
            for first_k in (0..task.k.max(1)).step_by(most_ks) {
                let ks = first_k..task.k.min(first_k + most_ks);
                match &packed {
                    Some([_, b]) => integers::right(lanes, b, block_cols.clone(), &ks, right),
                    None => pack::right(lanes, &task.b, block_cols.clone(), ks.clone(), right)?,
                }
                for first_row in rows.clone().step_by(most_rows) {
                    let block_rows = first_row..rows.end.min(first_row + most_rows);
                    let left = match &packed {
                        Some([a, _]) => integers::left(lanes, a, block_rows.clone(), &ks, left),
                        None => pack::left::<L>(&task.a, block_rows.clone(), ks.clone(), left)?,
                    };
                    Block {
                        rows: block_rows,
                        cols: block_cols.clone(),
                        ks: ks.clone(),
                        is_packed: packed.is_some(),
                        left,
                        right,
                        unfinished,
                    }
                    .run(lanes, task);
                }
            }
        }
        Ok(())
    }
}

/// Memory in which sums wait for the next block of k. Its first sum is that of `row` and `col`.
#[derive(Clone, Copy)]
struct Unfinished {
    sums: Rows,
    row: usize,
    col: usize,
}

impl Unfinished {
    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> Rows {
        let offset = (row - self.row) * self.sums.stride + (col - self.col);
        Rows { first: self.sums.first.wrapping_add(offset), stride: self.sums.stride }
    }
}

/// A block of sums, and the packed operands of one block of k.
struct Block<'a> {
    rows: Range<usize>,
    cols: Range<usize>,
    ks: Range<usize>,
    /// Whether the operands were packed as [`integers`].
    is_packed: bool,
    left: Left,
    right: &'a [u32],
    unfinished: Option<Unfinished>,
}

impl Block<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L, task: &Task<'_>) {
        let Self { rows, cols, ks, is_packed, left, right, unfinished } = self;
        let (is_first, is_last) = (ks.start == 0, ks.end == task.k);
        let folded = Folded::new(task, ks.start);
        let starts_from_zero = folded.is_some() || is_first && !task.epilogue.starts_from_output();
        let stores_sums =
            folded.is_none() && (!is_last || task.epilogue.is_plain() && task.out.as_f32().is_some());
        let (steps, padded) = (right_steps::<L>(is_packed, ks.len()), cols.len().next_multiple_of(L::WIDTH));
        let mut spare = [0.0; LARGEST_TILE];
        let mut row = rows.start;
        while row < rows.end {
            let rest = rows.end - row;
            let height = if is_packed { integers::height(rest) } else { tile::height::<L>(rest) };
            let words = left.words.wrapping_add((row - rows.start) * left.row);
            for col in (0..cols.len()).step_by(2 * L::WIDTH) {
                let (panel, width) = pack::panel::<L>(col, padded, steps);
                let panel = Right { words: right[panel..][..width * steps].as_ptr(), step: width };
                let (col, count) = (cols.start + col, width.min(cols.len() - col));
                // Tiles beyond the last column, and those that an epilogue follows, are stored here first.
                let local = Rows { first: spare.as_mut_ptr(), stride: 2 * L::WIDTH };
                let waiting = unfinished.map(|unfinished| unfinished.at(row, col));
                let place = waiting.filter(|_| count == width && folded.is_none());
                let initial = match waiting.filter(|_| !starts_from_zero) {
                    None => None,
                    Some(waiting) if count == width => Some(waiting),
                    Some(waiting) => {
                        // SAFETY: `height` rows of `count` sums wait there; `spare` has room for the largest tile.
                        unsafe { copy(waiting, local, height, count) };
                        Some(local)
                    }
                };
                let out = place.filter(|_| stores_sums).unwrap_or(local);
                let sums = Sums { initial, out, canonical: is_last && stores_sums };
                let (size, left) = ([height, width / L::WIDTH], Left { words, ..left });
                match is_packed {
                    // SAFETY: `left` and the panel were packed with these rows, columns and blocks. The sums are the tile's place in
                    // memory that this part of the output alone uses, or `spare`.
                    true => unsafe { integers::tile(lanes, size, ks.len(), left, panel, sums) },
                    // SAFETY: as above, with steps.
                    false => unsafe { tile::tile(lanes, size, steps, left, panel, sums) },
                }
                if let Some(folded) = &folded {
                    let before = waiting.filter(|_| !is_first);
                    // SAFETY: the sums of the blocks before wait where `waiting` says, `height` rows of `count`.
                    unsafe { folded.fold(&mut spare, 2 * L::WIDTH, [row, col], [height, count], before) };
                }
                if let (Some(_), Some(waiting), false) = (&folded, waiting, is_last) {
                    // SAFETY: `spare` has the tile, and the place where its sums wait is of this part of the output alone.
                    unsafe { copy(local, waiting, height, count) };
                } else if !stores_sums {
                    for (i, sums) in spare.chunks_exact_mut(2 * L::WIDTH).take(height).enumerate() {
                        // SAFETY: the row is in the output, which has n columns, and in this part of it alone.
                        let out = unsafe { task.out.row((row + i) * task.n + col, count) };
                        task.epilogue.store(&mut sums[..count], row + i, col, out);
                    }
                } else if let (Some(waiting), None) = (waiting, place) {
                    // SAFETY: as for the other direction.
                    unsafe { copy(local, waiting, height, count) };
                }
            }
            row += height;
        }
    }
}

/// Values of the largest tile of any lanes: 12 rows of 2 · 16.
const LARGEST_TILE: usize = 12 * 32;

/// Copies `count` values of each of `rows` rows.
///
/// # Safety
/// They must be readable and writable, and must not overlap.
#[inline(always)]
unsafe fn copy(from: Rows, to: Rows, rows: usize, count: usize) {
    for i in 0..rows {
        let (from, to) = (from.first.wrapping_add(i * from.stride), to.first.wrapping_add(i * to.stride));
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, count) };
    }
}
