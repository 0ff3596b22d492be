//! Transposition of codes, alone and together with quantization. Matrices are row-major.

use super::{Codec, expect_matrix};
use crate::arch::{self, Path, Saturating, Scale, TILE, bytes, bytes_mut};
use crate::{Fp8, Result, Source};
use core::ops::Range;

/// The number of columns that are transposed together, band after band. Their part of a row fills whole pages, and the
/// TLB can hold the pages that they are written to, one per column of a tall matrix. Their codes in a band take 64 KiB of
/// stack.
const WIDTH: usize = 1024;

/// The number of elements that are converted while the row below them is prefetched. More prefetches would wait for each
/// other.
const PIECE: usize = 256;

/// Parts of a tile with fewer rows or columns than this are copied code by code, which is faster than transposing a whole tile.
const NARROW: usize = 8;

/// The destination of columns of codes: a matrix whose rows have `rows` elements.
pub(super) struct Columns<'a> {
    pub(super) dst: &'a mut [u8],
    pub(super) rows: usize,
    pub(super) streams: bool,
}

impl Columns<'_> {
    /// Writes the part of the first `width` columns that is in the rows `band`. Rows in `codes` are `stride` elements apart.
    pub(super) fn write(
        &mut self,
        path: Path,
        band: Range<usize>,
        width: usize,
        codes: &[u8],
        stride: usize,
    ) {
        let (rows, streams) = (self.rows, self.streams);
        for left in (0..width).step_by(TILE) {
            let (across, codes) = (TILE.min(width - left), &codes[left..]);
            let place = &mut self.dst[left * rows + band.start..];
            if across.min(band.len()) < NARROW {
                for c in 0..across {
                    for r in 0..band.len() {
                        place[c * rows + r] = codes[r * stride + c];
                    }
                }
            } else if across == TILE && band.len() == TILE {
                let codes = &codes[..(TILE - 1) * stride + TILE];
                let lines = &mut place[..(TILE - 1) * rows + TILE];
                arch::transpose(path, codes, stride, lines, rows, streams);
            } else {
                let (mut tile, mut columns) = ([0; TILE * TILE], [0; TILE * TILE]);
                for (line, row) in tile.chunks_mut(TILE).zip(codes.chunks(stride)).take(band.len()) {
                    line[..across].copy_from_slice(&row[..across]);
                }
                arch::transpose(path, &tile, TILE, &mut columns, TILE, false);
                for (line, column) in place.chunks_mut(rows).zip(columns.chunks(TILE)).take(across) {
                    line[..band.len()].copy_from_slice(&column[..band.len()]);
                }
            }
        }
    }
}

/// Splits the rows of a matrix into bands, each as high as a tile.
fn bands(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(TILE).map(move |first| first..rows.min(first + TILE))
}

impl Codec {
    /// Transposes a row-major matrix: `dst[c · rows + r] = src[r · cols + c]`. Codes are copied unchanged, also those of NaN.
    /// O(rows · cols). Allocates only where threads share a matrix of few columns: 16 bytes for each piece of a column.
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let mut columns = [E4M3::ZERO; 6];
    /// Codec::new().transpose(&[1, 2, 3, 4, 5, 6].map(E4M3::from_bits), 3, 2, &mut columns)?;
    /// assert_eq!(columns.map(E4M3::to_bits), [1, 3, 5, 2, 4, 6]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if a slice does not have `rows · cols` elements; nothing is written then.
    pub fn transpose<T: Fp8>(&self, src: &[T], rows: usize, cols: usize, dst: &mut [T]) -> Result<()> {
        expect_matrix("slice::transpose", "src", rows, cols, src.len())?;
        expect_matrix("slice::transpose", "dst", rows, cols, dst.len())?;
        self.transpose_bytes(bytes(src), rows, cols, bytes_mut(dst));
        Ok(())
    }

    pub(super) fn transpose_bytes(&self, src: &[u8], rows: usize, cols: usize, dst: &mut [u8]) {
        if src.is_empty() {
            return;
        }
        let (path, streams) = (self.path, self.streams(src.len().saturating_mul(2)));
        if rows == 1 || cols == 1 {
            self.each(src, dst, |_, src, dst| {
                arch::copy(path, src, dst, streams);
                arch::fence(path);
                0.0
            });
            return;
        }
        // Columns next to each other, so that what is read of a row is whole lines.
        let some = |first: usize, dst: &mut [u8]| {
            for (part, dst) in dst.chunks_mut(rows.saturating_mul(WIDTH)).enumerate() {
                let (left, width) = (first + part * WIDTH, dst.len() / rows);
                let mut columns = Columns { dst, rows, streams };
                for band in bands(rows) {
                    let codes = &src[band.start * cols + left..];
                    columns.write(path, band, width, codes, cols);
                }
            }
            arch::fence(path);
        };
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            if cols < rows && cols.div_ceil(TILE) < rayon::current_num_threads() {
                return by_rows(path, src, cols, part, dst);
            }
            let width = whole_tiles(part / rows, cols);
            return dst.par_chunks_mut(width * rows).enumerate().for_each(|(i, dst)| some(i * width, dst));
        }
        some(0, dst);
    }

    /// Quantizes a row-major matrix like [`Codec::quantize`] and writes its codes twice: in order, and transposed. One read of
    /// `src`. Returns the largest magnitude. O(rows · cols).
    ///
    /// When results bypass the caches, a band of codes takes 64 KiB of stack. With threads, and with fewer than 8 rows or columns,
    /// it calls [`Codec::quantize`] and then [`Codec::transpose`].
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let (mut rows, mut columns) = ([E4M3::ZERO; 4], [E4M3::ZERO; 4]);
    /// let amax = Codec::new().quantize_transpose(&[1.0_f32, 2.0, -3.0, 4.4], 2, 2, 0.5, &mut rows, &mut columns)?;
    /// assert_eq!((amax, rows.map(E4M3::to_f32)), (4.4, [0.5, 1.0, -1.5, 2.25])); // the last of 2.2
    /// assert_eq!(columns.map(E4M3::to_f32), [0.5, -1.5, 1.0, 2.25]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if a slice does not have `rows · cols` elements; nothing is written then.
    pub fn quantize_transpose<T: Fp8, S: Source>(
        &self,
        src: &[S],
        rows: usize,
        cols: usize,
        scale: f32,
        dst: &mut [T],
        dst_t: &mut [T],
    ) -> Result<f32> {
        const OP: &str = "slice::quantize_transpose";
        expect_matrix(OP, "src", rows, cols, src.len())?;
        expect_matrix(OP, "dst", rows, cols, dst.len())?;
        expect_matrix(OP, "dst_t", rows, cols, dst_t.len())?;
        if src.is_empty() {
            return Ok(0.0);
        }
        // Threads share either rows or columns; and a narrow matrix has no bands that would pay off.
        #[cfg(feature = "rayon")]
        let is_parallel = self.part(src.len()).is_some();
        #[cfg(not(feature = "rayon"))]
        let is_parallel = false;
        if is_parallel || rows.min(cols) < NARROW {
            let amax = self.quantize(src, scale, dst)?;
            self.transpose_bytes(bytes(dst), rows, cols, bytes_mut(dst_t));
            return Ok(amax);
        }
        // Narrower rows would be written in pieces too short to bypass the caches.
        let streams = cols.is_multiple_of(WIDTH) && self.streams(size_of_val(src) + dst.len() + dst_t.len());
        let (dst, dst_t) = (bytes_mut(dst), bytes_mut(dst_t));
        let scale = Scale::new::<S, Saturating<T>>(self.path, scale, src.len());
        let run = if streams { beyond_caches::<T, S> } else { within_caches::<T, S> };
        Ok(run(self.path, src, rows, &scale, [dst, dst_t]))
    }
}

/// Rounds a number of rows or columns up to whole tiles, at most all of them.
#[cfg(feature = "rayon")]
fn whole_tiles(least: usize, all: usize) -> usize {
    least.max(1).checked_next_multiple_of(TILE).map_or(all, |count| count.min(all))
}

/// [`Codec::transpose`] on several threads if there are too few columns to share. Each thread takes bands of rows, of about `part`
/// codes, and with them a piece of every column.
#[cfg(feature = "rayon")]
fn by_rows(path: Path, src: &[u8], cols: usize, part: usize, dst: &mut [u8]) {
    use rayon::prelude::*;
    let rows = src.len() / cols;
    let height = whole_tiles(part / cols, rows);
    let mut parts: Vec<Vec<&mut [u8]>> = Vec::new();
    parts.resize_with(rows.div_ceil(height), || Vec::with_capacity(cols));
    for column in dst.chunks_mut(rows) {
        for (pieces, piece) in parts.iter_mut().zip(column.chunks_mut(height)) {
            pieces.push(piece);
        }
    }
    src.par_chunks(height * cols).zip(parts).for_each(|(src, mut pieces)| {
        let mut lines = [0; TILE * TILE];
        for band in bands(src.len() / cols) {
            for (tile, pieces) in pieces.chunks_mut(TILE).enumerate() {
                let codes = &src[band.start * cols + tile * TILE..];
                let mut columns = Columns { dst: &mut lines, rows: TILE, streams: false };
                columns.write(path, 0..band.len(), pieces.len(), codes, cols);
                for (piece, line) in pieces.iter_mut().zip(lines.chunks(TILE)) {
                    piece[band.clone()].copy_from_slice(&line[..band.len()]);
                }
            }
        }
    });
}

/// [`Codec::quantize_transpose`] of a matrix that is not empty, band after band. The codes of a band are still cached when its
/// columns are written.
fn within_caches<T: Fp8, S: Source>(
    path: Path,
    src: &[S],
    rows: usize,
    scale: &Scale,
    [dst, dst_t]: [&mut [u8]; 2],
) -> f32 {
    let cols = src.len() / rows;
    let mut columns = Columns { dst: dst_t, rows, streams: false };
    let mut amax = 0.0_f32;
    for band in bands(rows) {
        let here = band.start * cols..band.end * cols;
        let codes = &mut dst[here.clone()];
        amax = amax.max(arch::quantize::<S, Saturating<T>>(path, &src[here], scale, codes, false));
        columns.write(path, band, cols, codes, cols);
    }
    amax
}

/// The same with results that bypass the caches: [`WIDTH`] columns at a time, which divides their number. The codes of a band are
/// on the stack and are copied to both destinations from there, so neither destination is read.
#[inline(never)]
fn beyond_caches<T: Fp8, S: Source>(
    path: Path,
    src: &[S],
    rows: usize,
    scale: &Scale,
    [dst, dst_t]: [&mut [u8]; 2],
) -> f32 {
    let cols = src.len() / rows;
    let mut amax = 0.0_f32;
    let mut codes = [[0; WIDTH]; TILE];
    for (part, dst_t) in dst_t.chunks_mut(rows.saturating_mul(WIDTH)).enumerate() {
        let left = part * WIDTH;
        let mut columns = Columns { dst: dst_t, rows, streams: true };
        for band in bands(rows) {
            for (row, codes) in band.clone().zip(&mut codes) {
                let here = row * cols + left;
                for (piece, codes) in codes.chunks_mut(PIECE).enumerate() {
                    let first = here + piece * PIECE;
                    if let Some(below) = src.get(first + cols..first + cols + codes.len()) {
                        arch::fetch(path, below);
                    }
                    let src = &src[first..first + codes.len()];
                    let amax_here = arch::quantize::<S, Saturating<T>>(path, src, scale, codes, false);
                    amax = amax.max(amax_here);
                }
                arch::copy(path, codes, &mut dst[here..here + WIDTH], true);
            }
            columns.write(path, band, WIDTH, codes.as_flattened(), WIDTH);
        }
    }
    arch::fence(path);
    amax
}

/// Transposes a row-major matrix: `dst[c · rows + r] = src[r · cols + c]`. O(rows · cols). See [`Codec::transpose`].
///
/// ```
/// use fp8_format::{E4M3, slice};
///
/// let codes = [1, 2, 3, 4, 5, 6].map(E4M3::from_bits);
/// let mut columns = [E4M3::ZERO; 6];
/// slice::transpose(&codes, 2, 3, &mut columns)?;
/// assert_eq!(columns.map(E4M3::to_bits), [1, 4, 2, 5, 3, 6]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) if a slice does not have `rows · cols` elements; nothing is written then.
#[inline]
pub fn transpose<T: Fp8>(src: &[T], rows: usize, cols: usize, dst: &mut [T]) -> Result<()> {
    Codec::new().transpose(src, rows, cols, dst)
}

/// Quantizes a row-major matrix like [`quantize`](crate::slice::quantize()) and writes its codes twice: in order, and transposed.
/// Returns the largest magnitude. O(rows · cols). See [`Codec::quantize_transpose`].
///
/// ```
/// use fp8_format::{E5M2, slice};
///
/// let (mut rows, mut columns) = ([E5M2::ZERO; 4], [E5M2::ZERO; 4]);
/// let amax = slice::quantize_transpose(&[1.0_f32, 2.0, -3.0, 4.4], 2, 2, 1.0, &mut rows, &mut columns)?;
/// assert_eq!(amax, 4.4);
/// assert_eq!(rows.map(E5M2::to_f32), [1.0, 2.0, -3.0, 4.0]);
/// assert_eq!(columns.map(E5M2::to_f32), [1.0, -3.0, 2.0, 4.0]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) if a slice does not have `rows · cols` elements; nothing is written then.
#[inline]
pub fn quantize_transpose<T: Fp8, S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    scale: f32,
    dst: &mut [T],
    dst_t: &mut [T],
) -> Result<f32> {
    Codec::new().quantize_transpose(src, rows, cols, scale, dst, dst_t)
}

#[cfg(all(test, feature = "rayon"))]
mod tests {
    use super::*;

    #[test]
    fn parts_never_have_more_columns_than_there_are() {
        assert_eq!(whole_tiles(0, 1000), 64);
        assert_eq!(whole_tiles(64, 1000), 64);
        assert_eq!(whole_tiles(65, 1000), 128);
        assert_eq!(whole_tiles(999, 1000), 1000);
        assert_eq!(whole_tiles(0, 1), 1); // of a matrix with usize::MAX rows
        assert_eq!(whole_tiles(usize::MAX, usize::MAX), usize::MAX);
    }
}
