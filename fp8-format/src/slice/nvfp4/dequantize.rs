//! Values of codes and scales.

use super::{SIDE, expect_fp4, expect_packed};
use crate::arch;
use crate::slice::blocks::expect_scales;
use crate::slice::{Codec, expect_matrix};
use crate::{Blocks, E4M3, Result, Source, TensorScale};

impl Codec {
    /// Dequantizes an NVFP4 matrix: `dst[i] = (code · scale) · decode`, of which the first product is exact and the second an f32
    /// product. If `D` is f16 or bf16, that is rounded once more, to nearest, ties to even, and overflow gives infinity. A scale
    /// that is NaN gives the canonical NaN. O(rows · cols).
    ///
    /// ```
    /// use fp8_format::slice::Codec;
    /// use fp8_format::{Blocks, E2M1, E4M3, TensorScale};
    ///
    /// let codes = [E2M1::pack(E2M1::ONE, E2M1::MIN)];
    /// let (scales, tensor) = ([E4M3::from_f32(24.0)], TensorScale::from_encode(4.0));
    /// let mut x = [0.0_f32; 2];
    /// Codec::new().dequantize_nvfp4(&codes, 1, 2, Blocks::B1x16, &scales, tensor, &mut x)?;
    /// assert_eq!(x, [6.0, -36.0]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if `dst` does not have `rows · cols` elements, [`Error::Packed`](crate::Error::Packed)
    /// if `codes` does not have ⌈cols / 2⌉ bytes a row, [`Error::Scales`](crate::Error::Scales) if there is not one scale for each
    /// block, [`Error::NotFp4`](crate::Error::NotFp4) for blocks of FP8. Nothing is written then.
    #[expect(clippy::too_many_arguments, reason = "a matrix in five parts")]
    pub fn dequantize_nvfp4<D: Source>(
        &self,
        codes: &[u8],
        rows: usize,
        cols: usize,
        blocks: Blocks,
        scales: &[E4M3],
        tensor: TensorScale,
        dst: &mut [D],
    ) -> Result<()> {
        const OP: &str = "slice::dequantize_nvfp4";
        expect_fp4(OP, blocks)?;
        expect_packed(OP, "codes", rows, cols, codes.len())?;
        expect_matrix(OP, "dst", rows, cols, dst.len())?;
        expect_scales(OP, "scales", blocks, [rows, cols], scales.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        let (bytes, across) = (cols.div_ceil(2), cols.div_ceil(SIDE));
        let [height, _] = blocks.size(cols);
        let path = self.path;
        let some = |first: usize, codes: &[u8], dst: &mut [D]| {
            for (r, (codes, dst)) in (first..).zip(codes.chunks(bytes).zip(dst.chunks_mut(cols))) {
                let scales = &scales[r / height * across..][..across];
                arch::fp4_values(path, codes, scales, tensor.decode(), dst);
            }
        };
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(dst.len()) {
            use rayon::prelude::*;
            let rows = (part / cols).max(1);
            let parts = codes.par_chunks(rows * bytes).zip(dst.par_chunks_mut(rows * cols)).enumerate();
            parts.for_each(|(n, (codes, dst))| some(n * rows, codes, dst));
            return Ok(());
        }
        some(0, codes, dst);
        Ok(())
    }
}

/// Dequantizes an NVFP4 matrix: `dst[i] = (code · scale) · decode`, rounded to nearest if `D` is narrower than f32. O(rows · cols).
/// See [`Codec::dequantize_nvfp4`].
///
/// ```
/// use fp8_format::{Blocks, E4M3, TensorScale, slice};
///
/// let mut x = [0.0_f32; 3];
/// slice::dequantize_nvfp4(&[0x21, 0x07], 1, 3, Blocks::B1x16, &[E4M3::ONE], TensorScale::from_encode(1.0), &mut x)?;
/// assert_eq!(x, [0.5, 1.0, 6.0]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::dequantize_nvfp4`].
pub fn dequantize_nvfp4<D: Source>(
    codes: &[u8],
    rows: usize,
    cols: usize,
    blocks: Blocks,
    scales: &[E4M3],
    tensor: TensorScale,
    dst: &mut [D],
) -> Result<()> {
    Codec::new().dequantize_nvfp4(codes, rows, cols, blocks, scales, tensor, dst)
}
