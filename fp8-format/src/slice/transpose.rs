//! Transposition of codes, alone and together with quantization. Matrices are row-major.

use super::Codec;
use crate::arch::{self, Path, Saturating, Scale, TILE, bytes, bytes_mut};
use crate::{Error, Fp8, Result, Source};
use core::ops::Range;

/// Columns whose codes are transposed while they are in the nearest cache: a tile's rows of so many are 32 KiB.
const WIDTH: usize = 512;

fn expect_matrix(op: &'static str, name: &'static str, rows: usize, cols: usize, len: usize) -> Result<()> {
    match rows.checked_mul(cols) {
        Some(product) if product == len => Ok(()),
        _ => Err(Error::Shape { op, name, len, rows, cols }),
    }
}

/// Codes that are to be transposed, row after row.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    codes: &'a [u8],
    rows: usize,
    cols: usize,
}

impl Matrix<'_> {
    /// Writes the columns `cols` as rows, as far as they lie in the rows `band`. `dst` begins with the first of them.
    fn write(self, path: Path, band: Range<usize>, cols: Range<usize>, dst: &mut [u8], streams: bool) {
        let rows = self.rows;
        let mut tile = [[0; TILE]; TILE];
        // Lines of the columns are aligned where the first is and columns are whole lines.
        let streams = streams
            && rows.is_multiple_of(TILE)
            && band.start.is_multiple_of(TILE)
            && dst.as_ptr().align_offset(TILE) == 0;
        for left in cols.clone().step_by(TILE) {
            let across = TILE.min(cols.end - left);
            for (line, row) in tile.iter_mut().zip(band.clone()) {
                line[..across].copy_from_slice(&self.codes[row * self.cols + left..][..across]);
            }
            let place = &mut dst[(left - cols.start) * rows + band.start..];
            if across == TILE && band.len() == TILE {
                let lines = &mut place[..(TILE - 1) * rows + TILE];
                arch::transpose(path, &tile, lines, rows, streams);
            } else {
                let mut columns = [0; TILE * TILE];
                arch::transpose(path, &tile, &mut columns, TILE, false);
                for (line, column) in place.chunks_mut(rows).zip(columns.chunks(TILE)).take(across) {
                    line[..band.len()].copy_from_slice(&column[..band.len()]);
                }
            }
        }
    }
}

/// The rows of a matrix, a tile's at a time.
fn bands(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(TILE).map(move |first| first..rows.min(first + TILE))
}

impl Codec {
    /// `dst[c · rows + r] = src[r · cols + c]`, tile by tile; codes are moved as they are, NaN with its bits. O(rows · cols), no
    /// memory of its own.
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice does not have `rows · cols` elements; nothing is written then.
    pub fn transpose<T: Fp8>(&self, src: &[T], rows: usize, cols: usize, dst: &mut [T]) -> Result<()> {
        expect_matrix("slice::transpose", "src", rows, cols, src.len())?;
        expect_matrix("slice::transpose", "dst", rows, cols, dst.len())?;
        self.transpose_bytes(bytes(src), rows, cols, bytes_mut(dst));
        Ok(())
    }

    fn transpose_bytes(&self, src: &[u8], rows: usize, cols: usize, dst: &mut [u8]) {
        if src.is_empty() {
            return;
        }
        let (path, streams) = (self.path, self.streams(2 * src.len()));
        let matrix = Matrix { codes: src, rows, cols };
        // Columns next to each other, so that what is read of a row is a whole line.
        let some = |first: usize, dst: &mut [u8]| {
            let cols_here = first..first + dst.len() / rows;
            for band in bands(rows) {
                matrix.write(path, band, cols_here.clone(), dst, streams);
            }
        };
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            let width = (part / rows).next_multiple_of(TILE).max(TILE);
            return dst.par_chunks_mut(width * rows).enumerate().for_each(|(i, dst)| some(i * width, dst));
        }
        some(0, dst);
    }

    /// [`Codec::quantize`] of a matrix and of its transpose in one call: one read of `src`, the same codes twice. Rounding, NaN
    /// and saturation are those of `quantize`. Returns the largest magnitude. O(rows · cols).
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice does not have `rows · cols` elements; nothing is written then.
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
        #[cfg(feature = "rayon")]
        if self.part(src.len()).is_some() {
            // Parts of rows and parts of columns are nobody's in common: one after the other.
            let amax = self.quantize(src, scale, dst)?;
            self.transpose_bytes(bytes(dst), rows, cols, bytes_mut(dst_t));
            return Ok(amax);
        }
        let path = self.path;
        let (dst, dst_t) = (bytes_mut(dst), bytes_mut(dst_t));
        let streams = self.streams(size_of_val(src) + dst.len() + dst_t.len());
        let scale = Scale::new::<S, Saturating<T>>(path, scale, src.len());
        let mut amax = 0.0_f32;
        for band in bands(rows) {
            for left in (0..cols).step_by(WIDTH) {
                let here = left..cols.min(left + WIDTH);
                for row in band.clone() {
                    let elements = row * cols + here.start..row * cols + here.end;
                    let (src, dst) = (&src[elements.clone()], &mut dst[elements]);
                    let amax_here = arch::quantize::<S, Saturating<T>>(path, src, &scale, dst, false);
                    amax = amax.max(amax_here);
                }
                let columns = &mut dst_t[here.start * rows..here.end * rows];
                Matrix { codes: dst, rows, cols }.write(path, band.clone(), here, columns, streams);
            }
        }
        Ok(amax)
    }
}

/// [`Codec::transpose`] on the fastest path: `dst[c · rows + r] = src[r · cols + c]`. O(rows · cols).
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
/// [`Error::Shape`] if a slice does not have `rows · cols` elements; nothing is written then.
#[inline]
pub fn transpose<T: Fp8>(src: &[T], rows: usize, cols: usize, dst: &mut [T]) -> Result<()> {
    Codec::new().transpose(src, rows, cols, dst)
}

/// [`Codec::quantize_transpose`] on the fastest path: [`Codec::quantize`] of a matrix and of its transpose. To nearest, saturating,
/// NaN stays NaN. O(rows · cols).
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
/// [`Error::Shape`] if a slice does not have `rows · cols` elements; nothing is written then.
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
