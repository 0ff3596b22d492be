//! Transposition, alone and together with quantization. Matrices are row-major.

use super::quantize::quantize_equal;
use crate::{Error, Fp8, Result, Source};

/// Side of a tile: its rows and its columns are a cache line of codes each.
const TILE: usize = 64;

fn expect_matrix(op: &'static str, name: &'static str, rows: usize, cols: usize, len: usize) -> Result<()> {
    match rows.checked_mul(cols) {
        Some(product) if product == len => Ok(()),
        _ => Err(Error::Shape { op, name, len, rows, cols }),
    }
}

/// `dst[c · rows + r] = src[r · cols + c]`, tile by tile.
///
/// ```
/// let mut dst = [0_u8; 6];
/// fp8_format::slice::transpose(&[1, 2, 3, 4, 5, 6], 2, 3, &mut dst)?;
/// assert_eq!(dst, [1, 4, 2, 5, 3, 6]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] if a slice does not have `rows · cols` elements; nothing is written then.
#[inline]
pub fn transpose<T: Copy>(src: &[T], rows: usize, cols: usize, dst: &mut [T]) -> Result<()> {
    expect_matrix("slice::transpose", "src", rows, cols, src.len())?;
    expect_matrix("slice::transpose", "dst", rows, cols, dst.len())?;
    for first in (0..rows).step_by(TILE) {
        transpose_band(src, cols, first..rows.min(first + TILE), dst);
    }
    Ok(())
}

/// Transposes the rows of `band` out of a matrix of whole rows of `cols` elements.
#[inline(always)]
fn transpose_band<T: Copy>(src: &[T], cols: usize, band: core::ops::Range<usize>, dst: &mut [T]) {
    if cols == 0 {
        return;
    }
    let rows = dst.len() / cols;
    for left in (0..cols).step_by(TILE) {
        let right = cols.min(left + TILE);
        for (c, column) in (left..right).zip(dst.chunks_exact_mut(rows).skip(left)) {
            let below = src.iter().skip(band.start * cols + c).step_by(cols);
            for (d, s) in column.iter_mut().skip(band.start).take(band.len()).zip(below) {
                *d = *s;
            }
        }
    }
}

/// [`quantize`](super::quantize) of a matrix and of its transpose in one call: one read of `src`, the same codes
/// twice. Returns the largest magnitude.
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
    const OP: &str = "slice::quantize_transpose";
    expect_matrix(OP, "src", rows, cols, src.len())?;
    expect_matrix(OP, "dst", rows, cols, dst.len())?;
    expect_matrix(OP, "dst_t", rows, cols, dst_t.len())?;
    let mut amax = 0.0;
    for first in (0..rows).step_by(TILE) {
        let band = first..rows.min(first + TILE);
        let elements = band.start * cols..band.end * cols;
        if let (Some(src), Some(codes)) = (src.get(elements.clone()), dst.get_mut(elements)) {
            let band_amax = quantize_equal(src, scale, codes);
            amax = if band_amax > amax { band_amax } else { amax };
        }
        transpose_band(dst, cols, band, dst_t); // the band's codes are still in the cache
    }
    Ok(amax)
}
