//! Columnwise copies. A strip of columns is read 16 rows at a time, transformed if that is asked for, and turned: then its blocks
//! follow each other, as those of a row do.

use super::{BYTES, Job, Nvfp4Copy, SIDE, hadamard};
use crate::arch::{self, Path, Peak};
use crate::{Blocks, E4M3, Source};
use core::ops::Range;

/// Columns of a strip.
const WIDTH: usize = 64;

/// The blocks of a strip and 16 rows: a column each.
type Turned = [[f32; SIDE]; WIDTH];

/// A matrix, as its columnwise copies see it.
#[derive(Clone, Copy)]
pub(super) struct Source16<'a, S> {
    pub(super) src: &'a [S],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) is_transformed: bool,
}

impl<'a, S: Source> Source16<'a, S> {
    pub(super) fn new(src: &'a [S], [rows, cols]: [usize; 2], copy: Nvfp4Copy) -> Self {
        Self { src, rows, cols, is_transformed: copy == Nvfp4Copy::Hadamard }
    }

    /// The columns of a strip in the 16 rows from `top` on, and zeros for those that are not there.
    #[inline(always)]
    fn turned(&self, top: usize, columns: Range<usize>) -> Turned {
        let mut rows = [[0.0; WIDTH]; SIDE];
        let lines = self.src.chunks(self.cols).skip(top);
        for (row, line) in rows.iter_mut().zip(lines) {
            row.iter_mut().zip(&line[columns.clone()]).for_each(|(x, src)| *x = src.to_f32());
        }
        if self.is_transformed {
            hadamard::mixed::<S, WIDTH>(&mut rows);
        }
        let mut turned = [[0.0; SIDE]; WIDTH];
        for (i, row) in rows.iter().enumerate() {
            turned.iter_mut().zip(row).for_each(|(block, x)| block[i] = *x);
        }
        turned
    }

    /// Calls `f` with the left column of each strip of these columns, and its width.
    fn strips(columns: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        columns.clone().step_by(WIDTH).map(move |left| left..columns.end.min(left + WIDTH))
    }

    /// The largest magnitude of the copy's rows that come from these columns. NaN is passed over.
    pub(super) fn amax(&self, path: Path, columns: Range<usize>) -> f32 {
        let mut most = Peak::default();
        for strip in Self::strips(columns) {
            for top in (0..self.rows).step_by(SIDE) {
                let turned = self.turned(top, strip.clone());
                let mut peaks = [Peak::default(); WIDTH];
                arch::fp4_peaks(path, turned.as_flattened(), &mut peaks);
                most = peaks.into_iter().fold(most, Peak::and);
            }
        }
        most.amax()
    }

    /// Quantizes the copy's rows that come from these columns. `codes` and `scales` have room for these alone.
    pub(super) fn quantize(&self, job: Job, columns: Range<usize>, codes: &mut [u8], scales: &mut [E4M3]) {
        let first = columns.start;
        let length = if self.is_transformed { self.rows.next_multiple_of(SIDE) } else { self.rows };
        let (bytes, across) = (length.div_ceil(2), length.div_ceil(SIDE));
        let is_tiled = job.blocks == Blocks::B16x16;
        for strip in Self::strips(columns) {
            let (before, width) = (strip.start - first, strip.len());
            for (n, top) in (0..self.rows).step_by(SIDE).enumerate() {
                let turned = self.turned(top, strip.clone());
                let blocks = turned[..width].as_flattened();
                let (mut peaks, mut factors) = ([Peak::default(); WIDTH], [0.0; WIDTH]);
                let mut here = [E4M3::ZERO; WIDTH];
                let (peaks, factors, here) = (&mut peaks[..width], &mut factors[..width], &mut here[..width]);
                arch::fp4_peaks(job.path, blocks, peaks);
                if is_tiled {
                    for tile in peaks.chunks_mut(SIDE) {
                        let peak = tile.iter().copied().fold(Peak::default(), Peak::and);
                        tile.fill(peak);
                    }
                }
                arch::fp4_scales(job.path, job.tensor, peaks, factors, here);
                let mut packed = [[0; BYTES]; WIDTH];
                let packed = &mut packed[..width];
                let mut words = [[0; 4]; WIDTH];
                let words = job.random.map(|random| {
                    // Blocks that follow each other in a strip belong to rows that follow each other.
                    let step = random.step(across as u64);
                    let random = random.row(strip.start as u64, across as u64).skip(n as u64);
                    arch::fp4_words(job.path, random, step, &mut words[..width]);
                    &words[..width]
                });
                arch::fp4_codes(job.path, blocks, factors, words, packed.as_flattened_mut());
                for (c, (packed, scale)) in packed.iter().zip(&*here).enumerate() {
                    let row = &mut codes[(before + c) * bytes..][..bytes];
                    let room = row[n * BYTES..].iter_mut();
                    room.zip(packed).for_each(|(dst, byte)| *dst = *byte);
                    let row = before + c;
                    if !is_tiled {
                        scales[row * across + n] = *scale;
                    } else if row.is_multiple_of(SIDE) {
                        scales[row / SIDE * across + n] = *scale;
                    }
                }
            }
        }
    }
}
