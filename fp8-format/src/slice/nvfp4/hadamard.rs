//! The 16-point Hadamard transform with signs.

use super::SIDE;
use crate::slice::{Codec, expect_matrix};
use crate::traits::Kind;
use crate::{Result, Source};
use half::bf16;

/// The signs of [`Nvfp4Copy::Hadamard`](crate::slice::Nvfp4Copy::Hadamard), those of Transformer Engine: element `i` of 16 is negated
/// if bit `i` is set.
pub const HADAMARD_SIGNS: u16 = 0xD7E8;

/// Transforms columns of 16 elements, side by side: `x · H` with `H[i][j] = sign(i) · (−1)^popcount(i & j) / 4`.
///
/// Each element is first multiplied by its sign and 1/4, which is exact but for subnormal results. Then come sums and differences
/// of elements 1, 2, 4 and 8 apart.
#[inline(always)]
fn transform<const WIDTH: usize>(rows: &mut [[f32; WIDTH]; SIDE]) {
    for (i, row) in rows.iter_mut().enumerate() {
        let factor = if HADAMARD_SIGNS >> i & 1 == 1 { -0.25 } else { 0.25 };
        row.iter_mut().for_each(|x| *x *= factor);
    }
    for stride in [1, 2, 4, 8] {
        for pairs in rows.chunks_mut(2 * stride) {
            let (low, high) = pairs.split_at_mut(stride);
            for (low, high) in low.iter_mut().zip(high) {
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
        }
    }
}

/// The transform of columns that come from a source of this type, rounded as their copy keeps them.
#[inline(always)]
pub(super) fn mixed<S: Source, const WIDTH: usize>(rows: &mut [[f32; WIDTH]; SIDE]) {
    transform(rows);
    if let Kind::BF16 = S::KIND {
        rows.as_flattened_mut().iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
}

impl Codec {
    /// Transforms each 16 elements of a row as [`Nvfp4Copy::Hadamard`](crate::slice::Nvfp4Copy::Hadamard) does: `dst` is `[rows,
    /// 16 · ⌈cols / 16⌉]`, as rows are padded with zeros. Values are rounded to bf16 if the source is bf16. O(rows · cols).
    ///
    /// If `y` is the transform of `x`, the transform of `sign · y` is `sign · x`, but for rounding: so it is undone.
    ///
    /// ```
    /// use fp8_format::slice::{Codec, HADAMARD_SIGNS};
    ///
    /// let mut x = [0.0_f32; 16];
    /// x[5] = -8.0; // an outlier, whose sign is negative
    /// assert_eq!(HADAMARD_SIGNS >> 5 & 1, 1);
    /// let mut mixed = [0.0_f32; 16];
    /// Codec::new().hadamard(&x, 1, 16, &mut mixed)?;
    /// assert_eq!(mixed[..4], [2.0, -2.0, 2.0, -2.0]); // shared out over 16
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if `src` does not have `rows · cols` elements or `dst` not those of the padded rows.
    /// Nothing is written then.
    pub fn hadamard<S: Source>(&self, src: &[S], rows: usize, cols: usize, dst: &mut [f32]) -> Result<()> {
        const OP: &str = "slice::hadamard";
        let width = cols.div_ceil(SIDE).saturating_mul(SIDE);
        expect_matrix(OP, "src", rows, cols, src.len())?;
        expect_matrix(OP, "dst", rows, width, dst.len())?;
        if src.is_empty() {
            return Ok(());
        }
        for (src, dst) in src.chunks(cols).zip(dst.chunks_mut(width)) {
            for (src, dst) in src.chunks(SIDE).zip(dst.as_chunks_mut::<SIDE>().0) {
                let mut columns = [[0.0]; SIDE];
                columns.iter_mut().zip(src).for_each(|(column, x)| *column = [x.to_f32()]);
                mixed::<S, 1>(&mut columns);
                dst.copy_from_slice(columns.as_flattened());
            }
        }
        Ok(())
    }
}

/// Transforms each 16 elements of a row of a matrix, padded with zeros to a multiple of 16. O(rows · cols). See
/// [`Codec::hadamard`].
///
/// ```
/// let mut mixed = [0.0_f32; 16];
/// fp8_format::slice::hadamard(&[4.0_f32], 1, 1, &mut mixed)?;
/// assert_eq!(mixed, [1.0; 16]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::hadamard`].
pub fn hadamard<S: Source>(src: &[S], rows: usize, cols: usize, dst: &mut [f32]) -> Result<()> {
    Codec::new().hadamard(src, rows, cols, dst)
}
