//! The calls that quantize.

use super::scales::{Factors, Scales};
use super::{BlockScaling, Job, MxRounding, Out, columns, count, expect_scales, rows};
use crate::arch::bytes_mut;
use crate::slice::{Codec, expect_matrix};
use crate::{Blocks, E8M0, Error, Fp8, Result, Source};

/// The slices in which [`Codec::quantize_blocks`] stores its results. A matrix of scales has the size that
/// [`Blocks::grid`] returns.
///
/// ```
/// use fp8_format::slice::{self, BlockOutput, BlockScaling};
/// use fp8_format::{Blocks, E4M3};
///
/// let (mut codes, mut scale_inv, mut amax) = ([E4M3::ZERO; 6], [0.0; 2], [0.0; 2]);
/// let out = BlockOutput { amax: Some(&mut amax), ..BlockOutput::new(&mut codes, &mut scale_inv) };
/// let x = [1.0_f32, -7.0, 0.5, 0.0, 448.0, -896.0];
/// slice::quantize_blocks(&x, 2, 3, &BlockScaling::new(Blocks::Row), out)?;
/// assert_eq!(amax, [7.0, 896.0]);
/// assert_eq!(scale_inv, [1.0 / 64.0, 2.0]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockOutput<'a, T> {
    /// The codes, row-major.
    pub codes: &'a mut [T],
    /// The dequantization factors: `value = code · scale_inv`.
    pub scale_inv: &'a mut [f32],
    /// The factors before the cast, if wanted: `code = satfinite(v · scale)`.
    pub scale: Option<&'a mut [f32]>,
    /// The largest magnitude of each block, if wanted. NaN is ignored; a block of NaN alone has 0.
    pub amax: Option<&'a mut [f32]>,
}

impl<'a, T> BlockOutput<'a, T> {
    /// Stores codes and dequantization factors.
    #[must_use]
    pub const fn new(codes: &'a mut [T], scale_inv: &'a mut [f32]) -> Self {
        Self { codes, scale_inv, scale: None, amax: None }
    }
}

/// The slices in which [`Codec::quantize_mx`] stores its results. A matrix of scales has the size that [`Blocks::grid`]
/// returns for `Mx32`.
///
/// ```
/// use fp8_format::slice::{self, MxOutput, MxRounding};
/// use fp8_format::{E4M3, E8M0};
///
/// let (mut codes, mut scales, mut amax) = ([E4M3::ZERO; 40], [E8M0::ONE; 2], [0.0; 2]);
/// let out = MxOutput { amax: Some(&mut amax), ..MxOutput::new(&mut codes, &mut scales) };
/// slice::quantize_mx(&[2.5_f32; 40], 1, 40, MxRounding::Ceil, out)?;
/// assert_eq!(amax, [2.5; 2]);
/// assert_eq!(scales.map(E8M0::to_f32), [1.0 / 128.0; 2]); // 2.5 / 448 is 1 / 179.2
/// assert_eq!(codes, [E4M3::from_f32(320.0); 40]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
#[derive(Debug)]
pub struct MxOutput<'a, T> {
    /// The codes, row-major.
    pub codes: &'a mut [T],
    /// The dequantization factors: `value = code · scale`.
    pub scales: &'a mut [E8M0],
    /// The largest magnitude of each block, if wanted. NaN is ignored; a block of NaN alone has 0.
    pub amax: Option<&'a mut [f32]>,
}

impl<'a, T> MxOutput<'a, T> {
    /// Stores codes and scales.
    #[must_use]
    pub const fn new(codes: &'a mut [T], scales: &'a mut [E8M0]) -> Self {
        Self { codes, scales, amax: None }
    }
}

/// The names of codes, scales, optional scales and amaxes in errors.
type Names = [&'static str; 4];

const ONE: Names = ["out.codes", "out.scale_inv", "out.scale", "out.amax"];
const ROWWISE: Names = ["rowwise.codes", "rowwise.scale_inv", "rowwise.scale", "rowwise.amax"];
const COLUMNWISE: Names = ["columnwise.codes", "columnwise.scale_inv", "columnwise.scale", "columnwise.amax"];
const MX_ONE: Names = ["out.codes", "out.scales", "", "out.amax"];
const MX_ROWWISE: Names = ["rowwise.codes", "rowwise.scales", "", "rowwise.amax"];
const MX_COLUMNWISE: Names = ["columnwise.codes", "columnwise.scales", "", "columnwise.amax"];

impl<'a, T: Fp8> BlockOutput<'a, T> {
    /// Checks the sizes for a matrix of this shape.
    fn parse<S: Source>(
        self,
        op: &'static str,
        [codes, scale_inv, scale, amax]: Names,
        scaling: &BlockScaling,
        shape: [usize; 2],
    ) -> Result<Out<'a>> {
        let blocks = scaling.blocks;
        expect_matrix(op, codes, shape[0], shape[1], self.codes.len())?;
        expect_scales(op, scale_inv, blocks, shape, self.scale_inv.len())?;
        if let Some(values) = &self.scale {
            expect_scales(op, scale, blocks, shape, values.len())?;
        }
        if let Some(values) = &self.amax {
            expect_scales(op, amax, blocks, shape, values.len())?;
        }
        let rule = scaling.rule::<S>(T::ENCODING);
        let factors = Factors::F32 { rule, scale_inv: self.scale_inv, scale: self.scale };
        Ok(Out { codes: bytes_mut(self.codes), scales: Scales { factors, amax: self.amax } })
    }
}

impl<'a, T: Fp8> MxOutput<'a, T> {
    /// Checks the sizes for a matrix of this shape.
    fn parse(
        self,
        op: &'static str,
        [codes, scales, _, amax]: Names,
        rounding: MxRounding,
        shape: [usize; 2],
    ) -> Result<Out<'a>> {
        expect_matrix(op, codes, shape[0], shape[1], self.codes.len())?;
        expect_scales(op, scales, Blocks::Mx32, shape, self.scales.len())?;
        if let Some(values) = &self.amax {
            expect_scales(op, amax, Blocks::Mx32, shape, values.len())?;
        }
        let factors = Factors::Mx { rule: rounding.rule(T::ENCODING), scales: self.scales };
        Ok(Out { codes: bytes_mut(self.codes), scales: Scales { factors, amax: self.amax } })
    }
}

impl Codec {
    /// Quantizes a row-major matrix with an f32 scale for each row, 1 × 128 block or 128 × 128 tile.
    ///
    /// The scale of a block follows from its largest magnitude as [`BlockScaling`] says; `code = T::from_f32_saturating(f32(x) ·
    /// scale)`, and the value of a code is `code · scale_inv`. NaN is stored as NaN and does not count for the amax. ±inf is stored
    /// as ±[`Fp8::MAX`]; it makes the scale of its block 1.
    ///
    /// `src` is read from memory once as far as the caches hold what is read twice: a row with [`Blocks::Row`], and 64 tiles, 4 MiB of
    /// f32, with [`Blocks::B128x128`]. O(rows · cols).
    ///
    /// ```
    /// use fp8_format::slice::{BlockOutput, BlockScaling, Codec};
    /// use fp8_format::{Blocks, E4M3};
    ///
    /// let mut x = [0.5_f32; 256];
    /// x[200] = 100.0; // an outlier costs its own block precision, not the other one
    /// let (mut codes, mut scale_inv) = ([E4M3::ZERO; 256], [0.0; 2]);
    /// let out = BlockOutput::new(&mut codes, &mut scale_inv);
    /// Codec::new().quantize_blocks(&x, 1, 256, &BlockScaling::new(Blocks::B1x128), out)?;
    /// assert_eq!(scale_inv, [1.0 / 512.0, 0.25]); // 448 / 0.5 = 896 and 448 / 100 = 4.48, rounded down to 512 and 4
    /// assert_eq!((codes[0].to_f32(), codes[199].to_f32(), codes[200].to_f32()), (256.0, 2.0, 384.0)); // 384: from 400
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if `src` or the codes do not have `rows · cols` elements, [`Error::Scales`] if scales or amaxes do not have
    /// one element for each block, [`Error::NotF32`] for blocks without f32 scales. Nothing is written then.
    pub fn quantize_blocks<T: Fp8, S: Source>(
        &self,
        src: &[S],
        rows: usize,
        cols: usize,
        scaling: &BlockScaling,
        out: BlockOutput<'_, T>,
    ) -> Result<()> {
        const OP: &str = "slice::quantize_blocks";
        expect_f32(OP, ["quantize_mx", "quantize_nvfp4"], scaling.blocks)?;
        expect_matrix(OP, "src", rows, cols, src.len())?;
        let out = out.parse::<S>(OP, ONE, scaling, [rows, cols])?;
        self.rowwise::<T, S>(scaling.blocks, src, [rows, cols], out);
        Ok(())
    }

    /// Quantizes the transpose of a row-major matrix, and the matrix itself if `rowwise` is given.
    ///
    /// `columnwise` receives what [`Codec::quantize_blocks`] gives for the transpose: `[cols, rows]` codes and the scales of its
    /// blocks. For rows and 1 × 128 blocks these are not the transposed codes of `rowwise`, since other elements share a scale.
    /// Blocks are read from memory once for both, rows several times. With threads, each direction is a pass of its own. O(rows ·
    /// cols), 64 KiB of stack.
    ///
    /// ```
    /// use fp8_format::slice::{BlockOutput, BlockScaling, Codec};
    /// use fp8_format::{Blocks, E4M3};
    ///
    /// let x = [1.0_f32, 16.0, -2.0, 32.0, 3.5, 0.0]; // 3 rows, 2 columns
    /// let (mut codes, mut scale_inv) = ([[E4M3::ZERO; 6]; 2], ([0.0; 3], [0.0; 2]));
    /// let [rowwise, columnwise] = &mut codes;
    /// let rowwise = BlockOutput::new(rowwise, &mut scale_inv.0);
    /// let columnwise = BlockOutput::new(columnwise, &mut scale_inv.1);
    /// let scaling = BlockScaling { power_2_scales: true, ..BlockScaling::new(Blocks::Row) };
    /// Codec::new().quantize_blocks_transpose(&x, 3, 2, &scaling, Some(rowwise), columnwise)?;
    /// assert_eq!(scale_inv.0, [1.0 / 16.0, 1.0 / 8.0, 1.0 / 128.0]);
    /// assert_eq!(scale_inv.1, [1.0 / 128.0, 1.0 / 8.0]);
    /// assert_eq!(codes[0].map(E4M3::to_f32), [16.0, 256.0, -16.0, 256.0, 448.0, 0.0]);
    /// assert_eq!(codes[1].map(E4M3::to_f32), [128.0, -256.0, 448.0, 128.0, 256.0, 0.0]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Codec::quantize_blocks`].
    pub fn quantize_blocks_transpose<T: Fp8, S: Source>(
        &self,
        src: &[S],
        rows: usize,
        cols: usize,
        scaling: &BlockScaling,
        rowwise: Option<BlockOutput<'_, T>>,
        columnwise: BlockOutput<'_, T>,
    ) -> Result<()> {
        const OP: &str = "slice::quantize_blocks_transpose";
        expect_f32(OP, ["quantize_mx_transpose", "quantize_nvfp4"], scaling.blocks)?;
        expect_matrix(OP, "src", rows, cols, src.len())?;
        let rowwise = rowwise.map(|out| out.parse::<S>(OP, ROWWISE, scaling, [rows, cols])).transpose()?;
        let columnwise = columnwise.parse::<S>(OP, COLUMNWISE, scaling, [cols, rows])?;
        self.columnwise::<T, S>(scaling.blocks, src, [rows, cols], rowwise, columnwise);
        Ok(())
    }

    /// Quantizes a row-major matrix to MXFP8: an [`E8M0`] scale for 32 elements of a row.
    ///
    /// The scale of a block follows from its largest magnitude as [`MxRounding`] says; `code = T::from_f32_saturating(f32(x) ·
    /// scale.scale())`, and the value of a code is `code · scale.scale_inv()`. NaN is stored as NaN and does not count for the
    /// amax. ±inf is stored as ±[`Fp8::MAX`]; it gives its block the largest scale, so that its finite elements become 0. `src` is
    /// read once. O(rows · cols).
    ///
    /// ```
    /// use fp8_format::slice::{Codec, MxOutput, MxRounding};
    /// use fp8_format::{E4M3, E8M0};
    ///
    /// let mut x = [0.5_f32; 64];
    /// x[40] = 100.0;
    /// let (mut codes, mut scales) = ([E4M3::ZERO; 64], [E8M0::ONE; 2]);
    /// let out = MxOutput::new(&mut codes, &mut scales);
    /// Codec::new().quantize_mx(&x, 1, 64, MxRounding::Ceil, out)?;
    /// assert_eq!(scales.map(E8M0::to_f32), [1.0 / 512.0, 0.25]);
    /// assert_eq!((codes[0].to_f32(), codes[40].to_f32()), (256.0, 384.0)); // 384: from 400
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if `src` or the codes do not have `rows · cols` elements, [`Error::Scales`] if scales or amaxes do not have
    /// one element for each block. Nothing is written then.
    pub fn quantize_mx<T: Fp8, S: Source>(
        &self,
        src: &[S],
        rows: usize,
        cols: usize,
        rounding: MxRounding,
        out: MxOutput<'_, T>,
    ) -> Result<()> {
        const OP: &str = "slice::quantize_mx";
        expect_matrix(OP, "src", rows, cols, src.len())?;
        let out = out.parse(OP, MX_ONE, rounding, [rows, cols])?;
        self.rowwise::<T, S>(Blocks::Mx32, src, [rows, cols], out);
        Ok(())
    }

    /// Quantizes the transpose of a row-major matrix to MXFP8, and the matrix itself if `rowwise` is given.
    ///
    /// `columnwise` receives what [`Codec::quantize_mx`] gives for the transpose: `[cols, rows]` codes and the scales of its
    /// blocks, each of 32 elements of a column. `src` is read from memory once for both. With threads, each direction is a pass of
    /// its own. O(rows · cols), 64 KiB of stack.
    ///
    /// ```
    /// use fp8_format::slice::{Codec, MxOutput, MxRounding};
    /// use fp8_format::{E4M3, E8M0};
    ///
    /// let x = [1.0_f32, 16.0, -2.0, 32.0]; // 2 rows, 2 columns
    /// let (mut codes, mut scales) = ([E4M3::ZERO; 4], [E8M0::ONE; 2]);
    /// let columnwise = MxOutput::new(&mut codes, &mut scales);
    /// Codec::new().quantize_mx_transpose(&x, 2, 2, MxRounding::Ceil, None, columnwise)?;
    /// assert_eq!(scales.map(E8M0::to_f32), [1.0 / 128.0, 1.0 / 8.0]);
    /// assert_eq!(codes.map(E4M3::to_f32), [128.0, -256.0, 128.0, 256.0]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Codec::quantize_mx`].
    pub fn quantize_mx_transpose<T: Fp8, S: Source>(
        &self,
        src: &[S],
        rows: usize,
        cols: usize,
        rounding: MxRounding,
        rowwise: Option<MxOutput<'_, T>>,
        columnwise: MxOutput<'_, T>,
    ) -> Result<()> {
        const OP: &str = "slice::quantize_mx_transpose";
        expect_matrix(OP, "src", rows, cols, src.len())?;
        let rowwise = rowwise.map(|out| out.parse(OP, MX_ROWWISE, rounding, [rows, cols])).transpose()?;
        let columnwise = columnwise.parse(OP, MX_COLUMNWISE, rounding, [cols, rows])?;
        self.columnwise::<T, S>(Blocks::Mx32, src, [rows, cols], rowwise, columnwise);
        Ok(())
    }

    fn rowwise<T: Fp8, S: Source>(
        &self,
        blocks: Blocks,
        src: &[S],
        shape @ [rows, cols]: [usize; 2],
        mut out: Out<'_>,
    ) {
        if src.is_empty() {
            return out.scales.set_empty(self.path, count(blocks, rows, cols));
        }
        let streams = self.streams(size_of_val(src) + out.codes.len());
        rows::quantize::<T, S>(self, Job { path: self.path, streams, blocks }, src, shape, out);
    }

    fn columnwise<T: Fp8, S: Source>(
        &self,
        blocks: Blocks,
        src: &[S],
        shape @ [rows, cols]: [usize; 2],
        mut rowwise: Option<Out<'_>>,
        mut columnwise: Out<'_>,
    ) {
        if src.is_empty() {
            if let Some(out) = &mut rowwise {
                out.scales.set_empty(self.path, count(blocks, rows, cols));
            }
            return columnwise.scales.set_empty(self.path, count(blocks, cols, rows));
        }
        let directions = 1 + usize::from(rowwise.is_some());
        let streams = self.streams(size_of_val(src) + directions * src.len());
        let job = Job { path: self.path, streams, blocks };
        columns::quantize::<T, S>(self, job, src, shape, rowwise, columnwise);
    }
}

/// Blocks with other scales have functions of their own: of MX, and of NVFP4.
pub(super) fn expect_f32(op: &'static str, [mx, nvfp4]: [&'static str; 2], blocks: Blocks) -> Result<()> {
    match blocks {
        Blocks::Row | Blocks::B1x128 | Blocks::B128x128 => Ok(()),
        Blocks::Mx32 => Err(Error::NotF32 { op, blocks, instead: mx }),
        Blocks::B1x16 | Blocks::B16x16 => Err(Error::NotF32 { op, blocks, instead: nvfp4 }),
    }
}

/// Quantizes a row-major matrix with an f32 scale for each row, 1 × 128 block or 128 × 128 tile, computed from the block's largest
/// magnitude. Rounds to nearest, ties to even, and saturates. O(rows · cols). See [`Codec::quantize_blocks`].
///
/// ```
/// use fp8_format::slice::{self, BlockOutput, BlockScaling};
/// use fp8_format::{Blocks, E4M3};
///
/// let x = [1.0_f32, -7.0, 0.5, 0.0];
/// let (mut codes, mut scale_inv) = ([E4M3::ZERO; 4], [0.0; 2]);
/// let out = BlockOutput::new(&mut codes, &mut scale_inv);
/// slice::quantize_blocks(&x, 2, 2, &BlockScaling::new(Blocks::Row), out)?;
/// assert_eq!(scale_inv, [1.0 / 64.0, 1.0 / 896.0]);
/// assert_eq!(codes.map(E4M3::to_f32), [64.0, -448.0, 448.0, 0.0]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::quantize_blocks`].
pub fn quantize_blocks<T: Fp8, S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    scaling: &BlockScaling,
    out: BlockOutput<'_, T>,
) -> Result<()> {
    Codec::new().quantize_blocks(src, rows, cols, scaling, out)
}

/// Quantizes the transpose of a row-major matrix like [`quantize_blocks`], and the matrix itself if `rowwise` is given.
/// O(rows · cols). See [`Codec::quantize_blocks_transpose`].
///
/// ```
/// use fp8_format::slice::{self, BlockOutput, BlockScaling};
/// use fp8_format::{Blocks, E4M3};
///
/// let x = [1.0_f32, 16.0, -2.0, 32.0];
/// let (mut codes, mut scale_inv) = ([E4M3::ZERO; 4], [0.0; 2]);
/// let columnwise = BlockOutput::new(&mut codes, &mut scale_inv);
/// slice::quantize_blocks_transpose(&x, 2, 2, &BlockScaling::new(Blocks::B1x128), None, columnwise)?;
/// assert_eq!(scale_inv, [1.0 / 128.0, 1.0 / 8.0]);
/// assert_eq!(codes.map(E4M3::to_f32), [128.0, -256.0, 128.0, 256.0]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::quantize_blocks`].
pub fn quantize_blocks_transpose<T: Fp8, S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    scaling: &BlockScaling,
    rowwise: Option<BlockOutput<'_, T>>,
    columnwise: BlockOutput<'_, T>,
) -> Result<()> {
    Codec::new().quantize_blocks_transpose(src, rows, cols, scaling, rowwise, columnwise)
}

/// Quantizes a row-major matrix to MXFP8: an [`E8M0`] scale for 32 elements of a row. Rounds to nearest, ties to even, and
/// saturates. O(rows · cols). See [`Codec::quantize_mx`].
///
/// ```
/// use fp8_format::slice::{self, MxOutput, MxRounding};
/// use fp8_format::{E5M2, E8M0};
///
/// let (mut codes, mut scales) = ([E5M2::ZERO; 33], [E8M0::ONE; 2]);
/// slice::quantize_mx(&[3.0_f32; 33], 1, 33, MxRounding::Floor, MxOutput::new(&mut codes, &mut scales))?;
/// assert_eq!(scales.map(E8M0::to_f32), [2_f32.powi(1 - 15); 2]);
/// assert_eq!(codes.map(E5M2::to_f32), [49152.0; 33]); // 3 · 2¹⁴
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::quantize_mx`].
pub fn quantize_mx<T: Fp8, S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    rounding: MxRounding,
    out: MxOutput<'_, T>,
) -> Result<()> {
    Codec::new().quantize_mx(src, rows, cols, rounding, out)
}

/// Quantizes the transpose of a row-major matrix to MXFP8, and the matrix itself if `rowwise` is given. O(rows · cols). See
/// [`Codec::quantize_mx_transpose`].
///
/// ```
/// use fp8_format::slice::{self, MxOutput, MxRounding};
/// use fp8_format::{E4M3, E8M0};
///
/// let x = [1.0_f32, 16.0, -2.0, 32.0];
/// let (mut codes, mut scales) = ([[E4M3::ZERO; 4]; 2], [[E8M0::ONE; 2]; 2]);
/// let ([rows, columns], [scales_of_rows, scales_of_columns]) = (&mut codes, &mut scales);
/// let rowwise = MxOutput::new(rows, scales_of_rows);
/// let columnwise = MxOutput::new(columns, scales_of_columns);
/// slice::quantize_mx_transpose(&x, 2, 2, MxRounding::Ceil, Some(rowwise), columnwise)?;
/// assert_eq!(codes[0].map(E4M3::to_f32), [16.0, 256.0, -16.0, 256.0]);
/// assert_eq!(codes[1].map(E4M3::to_f32), [128.0, -256.0, 128.0, 256.0]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::quantize_mx`].
pub fn quantize_mx_transpose<T: Fp8, S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    rounding: MxRounding,
    rowwise: Option<MxOutput<'_, T>>,
    columnwise: MxOutput<'_, T>,
) -> Result<()> {
    Codec::new().quantize_mx_transpose(src, rows, cols, rounding, rowwise, columnwise)
}
