//! Dequantization with a factor for each row or block: `dst = f32(code) · scale_inv`.

use super::{expect_scales, quantize::expect_f32};
use crate::arch::{self, Path, Saturating, bytes};
use crate::slice::{Codec, expect_matrix};
use crate::{Blocks, E8M0, Fp8, Result, Source};

/// The number of E8M0 scales that are widened together.
const GROUP: usize = 512;

/// Rows that blocks divide are taken together, up to about so many elements.
const TOGETHER: usize = 1 << 16;

impl Codec {
    /// Dequantizes a row-major matrix with an f32 factor for each row, 1 × 128 block or 128 × 128 tile: `dst[i] = f32(src[i]) ·
    /// scale_inv`, an f32 product. If `D` is f16 or bf16, the product is rounded once more, to nearest, ties to even, and overflow
    /// gives infinity. Every NaN becomes the canonical one. O(rows · cols).
    ///
    /// ```
    /// use fp8_format::slice::Codec;
    /// use fp8_format::{Blocks, E4M3};
    ///
    /// let mut x = [0.0_f32; 4];
    /// let codes = [0x38, 0xB8, 0x40, 0x7E].map(E4M3::from_bits); // 1, -1; 2, 448
    /// Codec::new().dequantize_blocks(&codes, 2, 2, Blocks::Row, &[0.5, 0.1], &mut x)?;
    /// assert_eq!(x, [0.5, -0.5, 0.2, 44.8]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if `src` or `dst` do not have `rows · cols` elements,
    /// [`Error::Scales`](crate::Error::Scales) if `scale_inv` does not have one element for each block,
    /// [`Error::NotF32`](crate::Error::NotF32) for blocks without f32 scales. Nothing is written then.
    pub fn dequantize_blocks<T: Fp8, D: Source>(
        &self,
        src: &[T],
        rows: usize,
        cols: usize,
        blocks: Blocks,
        scale_inv: &[f32],
        dst: &mut [D],
    ) -> Result<()> {
        const OP: &str = "slice::dequantize_blocks";
        expect_f32(OP, ["dequantize_mx", "dequantize_nvfp4"], blocks)?;
        expect_matrix(OP, "src", rows, cols, src.len())?;
        expect_matrix(OP, "dst", rows, cols, dst.len())?;
        expect_scales(OP, "scale_inv", blocks, [rows, cols], scale_inv.len())?;
        let [height, width] = blocks.size(cols);
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        let cols = if height == 1 && blocks != Blocks::Row { together(cols, width) } else { cols };
        let across = cols.div_ceil(width.max(1));
        self.each_row(bytes(src), cols, dst, |r, src, dst| {
            let scale_inv = &scale_inv[r / height * across..];
            arch::dequantize_blocks::<Saturating<T>, D>(path, src, width, scale_inv, dst, streams);
        });
        Ok(())
    }

    /// Dequantizes an MXFP8 matrix: `dst[i] = f32(src[i]) · scale`, an f32 product, with the scale of its 32 elements of a row. The
    /// product is rounded and NaN is stored as [`Codec::dequantize_blocks`] says; a scale that is NaN gives NaN. O(rows · cols).
    ///
    /// ```
    /// use fp8_format::slice::Codec;
    /// use fp8_format::{E4M3, E8M0};
    ///
    /// let mut x = [0.0_f32; 33];
    /// let scales = [2.0, 0.25].map(E8M0::from_f32_floor);
    /// Codec::new().dequantize_mx(&[E4M3::ONE; 33], 1, 33, &scales, &mut x)?;
    /// assert_eq!((x[31], x[32]), (2.0, 0.25));
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if `src` or `dst` do not have `rows · cols` elements,
    /// [`Error::Scales`](crate::Error::Scales) if `scales` does not have one element for each block. Nothing is written then.
    pub fn dequantize_mx<T: Fp8, D: Source>(
        &self,
        src: &[T],
        rows: usize,
        cols: usize,
        scales: &[E8M0],
        dst: &mut [D],
    ) -> Result<()> {
        const OP: &str = "slice::dequantize_mx";
        const BLOCK: usize = 32;
        expect_matrix(OP, "src", rows, cols, src.len())?;
        expect_matrix(OP, "dst", rows, cols, dst.len())?;
        expect_scales(OP, "scales", Blocks::Mx32, [rows, cols], scales.len())?;
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        let cols = together(cols, BLOCK);
        let across = cols.div_ceil(BLOCK);
        self.each_row(bytes(src), cols, dst, |r, src, dst| {
            let scales = &scales[r * across..];
            let groups = src.chunks(GROUP * BLOCK).zip(dst.chunks_mut(GROUP * BLOCK));
            for ((src, dst), scales) in groups.zip(scales.chunks(GROUP)) {
                widened::<T, D>(path, src, BLOCK, scales, dst, streams);
            }
        });
        Ok(())
    }

    /// Calls `f` for each row of two matrices, with its number.
    fn each_row<D: Source>(
        &self,
        src: &[u8],
        cols: usize,
        dst: &mut [D],
        f: impl Fn(usize, &[u8], &mut [D]) + Sync,
    ) {
        if src.is_empty() {
            return;
        }
        let some = |first: usize, src: &[u8], dst: &mut [D]| {
            for (r, (src, dst)) in src.chunks(cols).zip(dst.chunks_mut(cols)).enumerate() {
                f(first + r, src, dst);
            }
        };
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            let rows = (part / cols).max(1);
            let parts = src.par_chunks(rows * cols).zip(dst.par_chunks_mut(rows * cols)).enumerate();
            return parts.for_each(|(i, (src, dst))| some(i * rows, src, dst));
        }
        some(0, src, dst);
    }
}

/// Columns of a matrix with fewer rows whose elements and blocks have the same order.
fn together(cols: usize, width: usize) -> usize {
    if cols > 0 && cols.is_multiple_of(width) { cols * (TOGETHER / cols).max(1) } else { cols }
}

/// Dequantizes blocks with at most [`GROUP`] scales.
fn widened<T: Fp8, D: Source>(
    path: Path,
    src: &[u8],
    block: usize,
    scales: &[E8M0],
    dst: &mut [D],
    streams: bool,
) {
    let mut scale_inv = [0.0; GROUP];
    for (factor, scale) in scale_inv.iter_mut().zip(scales) {
        *factor = scale.to_f32();
    }
    arch::dequantize_blocks::<Saturating<T>, D>(path, src, block, &scale_inv[..scales.len()], dst, streams);
}

/// Dequantizes a row-major matrix with an f32 factor for each row, 1 × 128 block or 128 × 128 tile: `dst[i] = f32(src[i]) ·
/// scale_inv`, rounded to nearest if `D` is narrower than f32. O(rows · cols). See [`Codec::dequantize_blocks`].
///
/// ```
/// use fp8_format::{Blocks, E4M3, slice};
///
/// let mut x = [0.0_f32; 130];
/// slice::dequantize_blocks(&[E4M3::ONE; 130], 1, 130, Blocks::B1x128, &[0.5, 0.1], &mut x)?;
/// assert_eq!((x[0], x[127], x[128]), (0.5, 0.5, 0.1));
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::dequantize_blocks`].
pub fn dequantize_blocks<T: Fp8, D: Source>(
    src: &[T],
    rows: usize,
    cols: usize,
    blocks: Blocks,
    scale_inv: &[f32],
    dst: &mut [D],
) -> Result<()> {
    Codec::new().dequantize_blocks(src, rows, cols, blocks, scale_inv, dst)
}

/// Dequantizes an MXFP8 matrix: `dst[i] = f32(src[i]) · scale` with the scale of its 32 elements of a row, rounded to nearest if
/// `D` is narrower than f32. O(rows · cols). See [`Codec::dequantize_mx`].
///
/// ```
/// use fp8_format::{E4M3, E8M0, slice};
///
/// let mut x = [0.0_f32; 2];
/// slice::dequantize_mx(&[0x38, 0x30].map(E4M3::from_bits), 2, 1, &[E8M0::ONE, E8M0::from_bits(130)], &mut x)?;
/// assert_eq!(x, [1.0, 4.0]); // 1 and 0.5 · 8
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::dequantize_mx`].
pub fn dequantize_mx<T: Fp8, D: Source>(
    src: &[T],
    rows: usize,
    cols: usize,
    scales: &[E8M0],
    dst: &mut [D],
) -> Result<()> {
    Codec::new().dequantize_mx(src, rows, cols, scales, dst)
}
