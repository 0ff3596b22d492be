//! Rowwise results. Where a source is read for its amaxes and again for its codes, the second read finds it in a cache.

use super::{Job, Out};
use crate::arch::blocks::{SIDE, TILES};
use crate::arch::{self, Path, Saturating};
use crate::slice::Codec;
use crate::{Blocks, Fp8, Source};

/// Elements whose scales are stored together.
const GROUP: usize = 16384;

/// Blocks of these elements, at most.
const MOST: usize = GROUP / 32;

/// Computes codes and scales of a matrix that is not empty, on the codec's threads.
pub(super) fn quantize<T: Fp8, S: Source>(
    codec: &Codec,
    job: Job,
    src: &[S],
    [rows, cols]: [usize; 2],
    mut out: Out<'_>,
) {
    // Blocks that divide the rows make up the matrix in order, whatever the rows.
    let [height, width] = job.blocks.size(cols);
    let (rows, cols) =
        if height == 1 && cols.is_multiple_of(width) { (src.len() / width, width) } else { (rows, cols) };
    #[cfg(feature = "rayon")]
    if let Some(part) = codec.part(src.len()) {
        let least = (part / cols).max(1).next_multiple_of(height);
        return split::<T, S>(job, src, [rows, cols], least, out);
    }
    let _ = codec;
    part::<T, S>(job, src, [rows, cols], &mut out);
}

/// Shares rows between threads, down to `least` of them.
#[cfg(feature = "rayon")]
fn split<T: Fp8, S: Source>(job: Job, src: &[S], [rows, cols]: [usize; 2], least: usize, mut out: Out<'_>) {
    let [height, _] = job.blocks.size(cols);
    let above = (rows / 2).next_multiple_of(height);
    if rows <= least || above >= rows {
        return part::<T, S>(job, src, [rows, cols], &mut out);
    }
    let (src_above, src_below) = src.split_at(above * cols);
    let (out_above, out_below) = out.split(above * cols, super::count(job.blocks, above, cols));
    rayon::join(
        || split::<T, S>(job, src_above, [above, cols], least, out_above),
        || split::<T, S>(job, src_below, [rows - above, cols], least, out_below),
    );
}

fn part<T: Fp8, S: Source>(job: Job, src: &[S], [rows, cols]: [usize; 2], out: &mut Out<'_>) {
    match job.blocks {
        Blocks::Row => whole_rows::<T, S>(job, src, cols, out),
        Blocks::B1x128 => blocks::<T, S>(job, src, cols, 128, out),
        // Those of E2M1 have functions of their own.
        Blocks::Mx32 | Blocks::B1x16 | Blocks::B16x16 => blocks::<T, S>(job, src, cols, 32, out),
        Blocks::B128x128 => tiles::<T, S>(job, src, [rows, cols], out),
    }
}

/// A scale for each row. A row that exceeds the caches is read from memory twice.
fn whole_rows<T: Fp8, S: Source>(job: Job, src: &[S], cols: usize, out: &mut Out<'_>) {
    const ROWS: usize = 64;
    let Job { path, streams, .. } = job;
    let rule = out.scales.rule();
    let groups = src.chunks(ROWS * cols).zip(out.codes.chunks_mut(ROWS * cols));
    for (group, (src, codes)) in groups.enumerate() {
        let (mut amaxes, mut factors) = ([0.0; ROWS], [0.0; ROWS]);
        let rows = src.len() / cols;
        for ((row, codes), amax) in src.chunks(cols).zip(codes.chunks_mut(cols)).zip(&mut amaxes) {
            *amax = arch::quantize_row::<S, Saturating<T>>(path, row, &rule, codes, streams);
        }
        out.scales.set(path, [group * ROWS, 1], &amaxes[..rows], &mut factors[..rows]);
    }
    arch::fence(path);
}

/// A scale for each `block` elements of a row.
fn blocks<T: Fp8, S: Source>(job: Job, src: &[S], cols: usize, block: usize, out: &mut Out<'_>) {
    let Job { path, streams, .. } = job;
    let cols = if cols.is_multiple_of(block) { src.len() } else { cols };
    // Lines of codes that do not begin where a group does are put together first.
    let is_aligned = out.codes.as_ptr().align_offset(Lines::LINE) == 0;
    let is_in_lines = is_aligned && (src.len() == cols || cols.is_multiple_of(Lines::LINE));
    let mut lines = (streams && !is_in_lines).then(|| Lines::new(out.codes));
    let rule = out.scales.rule();
    let (mut first, mut at) = (0, 0);
    let (mut amaxes, mut factors) = ([0.0; MOST], [0.0; MOST]);
    for row in src.chunks(cols) {
        for group in row.chunks(GROUP) {
            let blocks = group.len().div_ceil(block);
            let (amaxes, factors) = (&mut amaxes[..blocks], &mut factors[..blocks]);
            if let Some(lines) = &mut lines {
                let codes = &mut lines.codes[lines.held..lines.held + group.len()];
                arch::quantize_rows::<S, Saturating<T>>(path, group, block, &rule, amaxes, codes, false);
                lines.write(path, group.len(), out.codes);
            } else {
                let codes = &mut out.codes[at..at + group.len()];
                arch::quantize_rows::<S, Saturating<T>>(path, group, block, &rule, amaxes, codes, streams);
                at += group.len();
            }
            out.scales.set(path, [first, 1], amaxes, factors);
            first += blocks;
        }
    }
    if let Some(lines) = lines {
        let Lines { codes, held, at, .. } = lines;
        out.codes[at..at + held].copy_from_slice(&codes[..held]);
    }
    arch::fence(path);
}

/// A scale for each tile.
fn tiles<T: Fp8, S: Source>(job: Job, src: &[S], [rows, cols]: [usize; 2], out: &mut Out<'_>) {
    let Job { path, streams, .. } = job;
    for top in (0..rows).step_by(SIDE) {
        for left in (0..cols).step_by(TILES * SIDE) {
            let shape = [SIDE.min(rows - top), (TILES * SIDE).min(cols - left), cols];
            let first = top * cols + left;
            let (mut amaxes, mut factors) = ([0.0; TILES], [0.0; TILES]);
            let count = shape[1].div_ceil(SIDE);
            let (amaxes, factors) = (&mut amaxes[..count], &mut factors[..count]);
            let codes = &mut out.codes[first..];
            let rule = &out.scales.rule();
            arch::quantize_tiles::<S, Saturating<T>>(
                path,
                &src[first..],
                shape,
                rule,
                amaxes,
                codes,
                streams,
            );
            out.scales.set(path, [top / SIDE * cols.div_ceil(SIDE) + left / SIDE, 1], amaxes, factors);
        }
    }
    arch::fence(path);
}

/// Codes that wait until they make up whole lines of their destination.
struct Lines {
    codes: [u8; GROUP + Self::LINE],
    /// The number of codes that wait.
    held: usize,
    /// The index of the first of them in the destination.
    at: usize,
    /// Elements in front of the destination's first line.
    head: usize,
}

impl Lines {
    const LINE: usize = 64;

    fn new(dst: &[u8]) -> Self {
        let head = dst.as_ptr().align_offset(Self::LINE) % Self::LINE;
        Self { codes: [0; GROUP + Self::LINE], held: 0, at: 0, head }
    }

    /// Adds `count` codes, which are behind those that wait, and writes what is whole past the caches.
    fn write(&mut self, path: Path, count: usize, dst: &mut [u8]) {
        self.held += count;
        let behind = (self.at + self.held + Self::LINE - self.head) % Self::LINE;
        let whole = self.held.saturating_sub(behind);
        arch::copy(path, &self.codes[..whole], &mut dst[self.at..self.at + whole], true);
        self.codes.copy_within(whole..self.held, 0);
        self.at += whole;
        self.held -= whole;
    }
}
