//! Columnwise results, which are those of the transpose, alone and together with the rowwise ones. They are computed in strips of
//! columns, band after band of 128 rows: such a piece of the source stays in the second cache from its amaxes to its codes.

use super::{Job, Out};
use crate::arch::{self, Path, Saturating, TILE};
use crate::slice::Codec;
use crate::slice::transpose::Columns;
use crate::{Blocks, Fp8, Source};
use core::ops::Range;

/// Columns of a strip. Their codes in a band take 64 KiB of stack.
const WIDTH: usize = 512;

/// Rows of a band: those of the highest block.
const HEIGHT: usize = 128;

/// Elements of a row in a strip, and the blocks in them, at most.
const MOST: usize = WIDTH / 32;

/// Computes the results of the transpose of a matrix that is not empty and, in the same pass, those of the matrix. With threads
/// there is a pass for each.
pub(super) fn quantize<T: Fp8, S: Source>(
    codec: &Codec,
    job: Job,
    src: &[S],
    [rows, cols]: [usize; 2],
    rowwise: Option<Out<'_>>,
    mut columnwise: Out<'_>,
) {
    #[cfg(feature = "rayon")]
    if let Some(part) = codec.part(src.len()) {
        if let Some(out) = rowwise {
            super::rows::quantize::<T, S>(codec, job, src, [rows, cols], out);
        }
        let least = (part / rows).next_multiple_of(HEIGHT).max(HEIGHT);
        return split::<T, S>(job, src, [rows, cols], 0..cols, least, columnwise);
    }
    match rowwise {
        // The scales of columns need all rows, and those of rows all columns.
        Some(out) if job.blocks == Blocks::Row => {
            super::rows::quantize::<T, S>(codec, job, src, [rows, cols], out);
            tiles::<T, S>(job, src, [rows, cols], 0..cols, None, &mut columnwise);
        }
        Some(mut out) => {
            tiles::<T, S>(job, src, [rows, cols], 0..cols, Some(&mut out), &mut columnwise);
        }
        None => tiles::<T, S>(job, src, [rows, cols], 0..cols, None, &mut columnwise),
    }
}

/// Shares columns between threads, down to `least` of them.
#[cfg(feature = "rayon")]
fn split<T: Fp8, S: Source>(
    job: Job,
    src: &[S],
    [rows, cols]: [usize; 2],
    here: Range<usize>,
    least: usize,
    mut out: Out<'_>,
) {
    let left = (here.len() / 2).next_multiple_of(HEIGHT);
    if here.len() <= least || left >= here.len() {
        return tiles::<T, S>(job, src, [rows, cols], here, None, &mut out);
    }
    let (out_left, out_right) = out.split(left * rows, super::count(job.blocks, left, rows));
    let middle = here.start + left;
    rayon::join(
        || split::<T, S>(job, src, [rows, cols], here.start..middle, least, out_left),
        || split::<T, S>(job, src, [rows, cols], middle..here.end, least, out_right),
    );
}

/// A strip of a matrix.
struct Strip<'a, S> {
    job: Job,
    src: &'a [S],
    rows: usize,
    cols: usize,
    left: usize,
    width: usize,
    /// Columns on its left that share the columnwise results with it.
    before: usize,
}

impl<'a, S: Source> Strip<'a, S> {
    /// The elements of a row.
    fn row(&self, r: usize) -> &'a [S] {
        &self.src[r * self.cols + self.left..][..self.width]
    }

    /// The place of the first columnwise scale in a row of blocks, and how far apart the scales of these are.
    fn places(&self, first_row: usize) -> [usize; 2] {
        let [height, across] = match self.job.blocks {
            Blocks::Row => [self.rows, 1],
            Blocks::B1x128 => [128, 1],
            Blocks::B128x128 => [128, 128],
            Blocks::Mx32 => [32, 1],
            // Those of E2M1 have functions of their own.
            Blocks::B1x16 | Blocks::B16x16 => [16, 1],
        };
        let step = self.rows.div_ceil(height);
        [self.before / across * step + first_row / height, step]
    }

    fn path(&self) -> Path {
        self.job.path
    }
}

/// Computes the results of the columns `here`. `rowwise` receives those of the whole matrix, which then are all columns;
/// `columnwise` has room for these columns alone.
#[inline(never)]
fn tiles<T: Fp8, S: Source>(
    job: Job,
    src: &[S],
    [rows, cols]: [usize; 2],
    here: Range<usize>,
    mut rowwise: Option<&mut Out<'_>>,
    columnwise: &mut Out<'_>,
) {
    let mut codes = [[0; WIDTH]; HEIGHT];
    for left in here.clone().step_by(WIDTH) {
        let width = WIDTH.min(here.end - left);
        let strip = Strip { job, src, rows, cols, left, width, before: left - here.start };
        let mut factors = [0.0; WIDTH];
        let factors = &mut factors[..width];
        if job.blocks == Blocks::Row {
            strip.scales_of_columns(0..rows, columnwise, factors);
        }
        for top in (0..rows).step_by(HEIGHT) {
            let band = top..rows.min(top + HEIGHT);
            match job.blocks {
                Blocks::B128x128 => {
                    strip.tiles_of_band::<T>(band.clone(), rowwise.as_deref_mut(), columnwise, &mut codes);
                }
                Blocks::Row => strip.codes_of_columns::<T>(band.clone(), factors, &mut codes),
                Blocks::B1x128 | Blocks::Mx32 | Blocks::B1x16 | Blocks::B16x16 => {
                    let height = if job.blocks == Blocks::Mx32 { 32 } else { HEIGHT };
                    for first in band.clone().step_by(height) {
                        let block = first..band.end.min(first + height);
                        if let Some(out) = &mut rowwise {
                            strip.blocks_of_rows::<T>(block.clone(), out);
                        }
                        strip.scales_of_columns(block.clone(), columnwise, factors);
                        strip.codes_of_columns::<T>(block, factors, &mut codes[first - top..]);
                    }
                }
            }
            let dst = &mut columnwise.codes[strip.before * rows..];
            let mut columns = Columns { dst, rows, streams: job.streams };
            for first in band.clone().step_by(TILE) {
                let half = first..band.end.min(first + TILE);
                columns.write(job.path, half, width, codes[first - top..].as_flattened(), WIDTH);
            }
        }
    }
    arch::fence(job.path);
}

impl<S: Source> Strip<'_, S> {
    /// The columnwise scales of the rows of a block. `factors` receives what their elements are multiplied by.
    fn scales_of_columns(&self, rows: Range<usize>, out: &mut Out<'_>, factors: &mut [f32]) {
        let mut amaxes = [0.0; WIDTH];
        let amaxes = &mut amaxes[..self.width];
        let places = self.places(rows.start);
        for r in rows {
            arch::amax_columns::<S>(self.path(), self.row(r), amaxes);
        }
        out.scales.set(self.path(), places, amaxes, factors);
    }

    /// The codes of columns, one factor each.
    fn codes_of_columns<T: Fp8>(&self, rows: Range<usize>, factors: &[f32], codes: &mut [[u8; WIDTH]]) {
        for (r, codes) in rows.zip(codes) {
            let codes = &mut codes[..self.width];
            arch::quantize_columns::<S, Saturating<T>>(self.path(), self.row(r), factors, codes);
        }
    }

    /// The rowwise results of some rows in blocks of one row.
    fn blocks_of_rows<T: Fp8>(&self, rows: Range<usize>, out: &mut Out<'_>) {
        let Job { path, streams, blocks } = self.job;
        let [_, block] = blocks.size(self.cols);
        for r in rows {
            let (mut amaxes, mut factors) = ([0.0; MOST], [0.0; MOST]);
            let count = self.width.div_ceil(block);
            let (amaxes, factors) = (&mut amaxes[..count], &mut factors[..count]);
            arch::amaxes::<S>(path, self.row(r), block, amaxes);
            let first = r * self.cols.div_ceil(block) + self.left / block;
            out.scales.set(path, [first, 1], amaxes, factors);
            let codes = &mut out.codes[r * self.cols + self.left..][..self.width];
            arch::quantize_blocks::<S, Saturating<T>>(path, self.row(r), block, factors, codes, streams);
        }
    }

    /// The codes and scales of a row of tiles.
    fn tiles_of_band<T: Fp8>(
        &self,
        band: Range<usize>,
        mut rowwise: Option<&mut Out<'_>>,
        columnwise: &mut Out<'_>,
        codes: &mut [[u8; WIDTH]; HEIGHT],
    ) {
        let Job { path, streams, .. } = self.job;
        const TILES: usize = WIDTH / HEIGHT;
        let (mut amaxes, mut factors) = ([0.0; TILES], [0.0; TILES]);
        let count = self.width.div_ceil(HEIGHT);
        let (amaxes, factors) = (&mut amaxes[..count], &mut factors[..count]);
        for r in band.clone() {
            let mut row = [0.0; TILES];
            arch::amaxes::<S>(path, self.row(r), HEIGHT, &mut row[..count]);
            amaxes.iter_mut().zip(row).for_each(|(amax, here)| *amax = here.max(*amax));
        }
        if let Some(out) = &mut rowwise {
            let first = band.start / HEIGHT * self.cols.div_ceil(HEIGHT) + self.left / HEIGHT;
            out.scales.set(path, [first, 1], amaxes, factors);
        }
        columnwise.scales.set(path, self.places(band.start), amaxes, factors);
        for (r, codes) in band.zip(codes) {
            let codes = &mut codes[..self.width];
            arch::quantize_blocks::<S, Saturating<T>>(path, self.row(r), HEIGHT, factors, codes, false);
            if let Some(out) = &mut rowwise {
                let place = &mut out.codes[r * self.cols + self.left..][..self.width];
                arch::copy(path, codes, place, streams);
            }
        }
    }
}
