//! The calls that quantize.

use super::columns::Source16;
use super::{Job, Nvfp4Copy, Nvfp4Options, rows};
use crate::slice::blocks::expect_scales;
use crate::slice::{Codec, expect_matrix};
use crate::{E4M3, Error, Result, Source, TensorScale};

/// The slices in which [`Codec::quantize_nvfp4`] stores its results.
#[derive(Debug)]
pub struct Nvfp4Output<'a> {
    /// `[rows, ⌈columns / 2⌉]` of the copy: two codes a byte, the first in its low half; a row of an odd number ends with a zero
    /// half.
    pub codes: &'a mut [u8],
    /// The scale of each block, as many as [`Blocks::grid`](crate::Blocks::grid) returns for the copy.
    pub scales: &'a mut [E4M3],
}

impl<'a> Nvfp4Output<'a> {
    /// Creates an output of these slices.
    #[must_use]
    #[inline]
    pub const fn new(codes: &'a mut [u8], scales: &'a mut [E4M3]) -> Self {
        Self { codes, scales }
    }
}

impl Codec {
    /// Returns the largest magnitude of a copy of a row-major matrix: the amax that [`Codec::quantize_nvfp4`] needs. NaN is passed
    /// over, infinity counts, an empty matrix gives 0. O(rows · cols).
    ///
    /// Copies that are only turned have that of the source. [`Nvfp4Copy::Hadamard`] has one of its own.
    ///
    /// ```
    /// use fp8_format::slice::{Codec, Nvfp4Copy};
    ///
    /// let x = [4.0_f32, 0.0, 0.0, -8.0]; // 2 tokens of 2 features
    /// let codec = Codec::new();
    /// assert_eq!(codec.nvfp4_amax(&x, 2, 2, Nvfp4Copy::Rowwise)?, 8.0);
    /// assert_eq!(codec.nvfp4_amax(&x, 2, 2, Nvfp4Copy::Hadamard)?, 2.0); // a quarter of it, 16 times
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if `src` does not have `rows · cols` elements.
    pub fn nvfp4_amax<S: Source>(&self, src: &[S], rows: usize, cols: usize, copy: Nvfp4Copy) -> Result<f32> {
        expect_matrix("slice::nvfp4_amax", "src", rows, cols, src.len())?;
        if copy != Nvfp4Copy::Hadamard || src.is_empty() {
            return Ok(self.amax(src));
        }
        let source = Source16::new(src, [rows, cols], copy);
        let path = self.path;
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            let width = columns_of(part, rows);
            let amax = |n: usize| source.amax(path, n * width..cols.min((n + 1) * width));
            return Ok((0..cols.div_ceil(width)).into_par_iter().map(amax).reduce(|| 0.0, f32::max));
        }
        Ok(source.amax(path, 0..cols))
    }

    /// Quantizes a copy of a row-major matrix to NVFP4 and returns the factors of the tensor, which [`TensorScale`] makes of `amax`.
    ///
    /// `amax` is the largest magnitude of the whole copy, of which this may be a part: [`Codec::nvfp4_amax`]. With a smaller one,
    /// scales and codes saturate. A block with a NaN gets the scale NaN; its codes are those that it would have without. Infinity
    /// makes `encode` 1: blocks below 0.006 become 0, and infinity itself 2688. O(rows · cols).
    ///
    /// ```
    /// use fp8_format::slice::{Codec, Nvfp4Copy, Nvfp4Options, Nvfp4Output};
    /// use fp8_format::{Blocks, E4M3};
    ///
    /// let x: [f32; 32] = core::array::from_fn(|i| if i < 16 { i as f32 } else { 0.1 });
    /// let (mut codes, mut scales) = ([0; 16], [E4M3::ZERO; 2]);
    /// let (codec, options) = (Codec::new(), Nvfp4Options::default());
    /// let amax = codec.nvfp4_amax(&x, 1, 32, options.copy)?;
    /// let out = Nvfp4Output::new(&mut codes, &mut scales);
    /// let tensor = codec.quantize_nvfp4(&x, 1, 32, amax, &options, out)?;
    /// let mut back = [0.0_f32; 32];
    /// codec.dequantize_nvfp4(&codes, 1, 32, Blocks::B1x16, &scales, tensor, &mut back)?;
    /// assert_eq!((back[15], back[14], back[1]), (15.0, 15.0, 1.25)); // codes 6, 6 and 0.5
    /// assert!((back[31] - 0.1).abs() < 0.001); // the small block has a scale of its own
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if `src` does not have `rows · cols` elements, [`Error::Packed`](crate::Error::Packed)
    /// if the codes do not have ⌈columns / 2⌉ bytes for each row of the copy, [`Error::Scales`](crate::Error::Scales) if there is
    /// not one scale for each block, [`Error::NotFp4`](crate::Error::NotFp4) for blocks of FP8,
    /// [`Error::Amax`](crate::Error::Amax) for an amax that is negative or NaN. Nothing is written then.
    pub fn quantize_nvfp4<S: Source>(
        &self,
        src: &[S],
        rows: usize,
        cols: usize,
        amax: f32,
        options: &Nvfp4Options,
        out: Nvfp4Output<'_>,
    ) -> Result<TensorScale> {
        const OP: &str = "slice::quantize_nvfp4";
        let &Nvfp4Options { copy, blocks, random } = options;
        expect_matrix(OP, "src", rows, cols, src.len())?;
        if amax.is_nan() || amax < 0.0 {
            return Err(Error::Amax { op: OP });
        }
        let [height, width] = copy.shape(rows, cols);
        super::expect_fp4(OP, blocks)?;
        super::expect_packed(OP, "codes", height, width, out.codes.len())?;
        expect_scales(OP, "scales", blocks, [height, width], out.scales.len())?;
        let tensor = TensorScale::from_amax(amax);
        let job = Job { path: self.path, blocks, tensor, random };
        if src.is_empty() {
            // Nothing of it is rows of padding alone: a copy of no tokens has no columns.
            return Ok(tensor);
        }
        match copy {
            Nvfp4Copy::Rowwise => self.fp4_rows(job, src, cols, out),
            Nvfp4Copy::Columnwise | Nvfp4Copy::Hadamard => {
                self.fp4_columns(job, Source16::new(src, [rows, cols], copy), out);
            }
        }
        Ok(tensor)
    }

    fn fp4_rows<S: Source>(&self, job: Job, src: &[S], cols: usize, out: Nvfp4Output<'_>) {
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            let rows = (part / cols).next_multiple_of(super::SIDE).max(super::SIDE);
            let across = job.blocks.grid(rows, cols)[0] * cols.div_ceil(super::SIDE);
            let parts = src.par_chunks(rows * cols).zip(out.codes.par_chunks_mut(rows * cols.div_ceil(2)));
            parts.zip(out.scales.par_chunks_mut(across)).enumerate().for_each(
                |(n, ((src, codes), scales))| {
                    rows::quantize(job, src, cols, n * rows, codes, scales);
                },
            );
            return;
        }
        rows::quantize(job, src, cols, 0, out.codes, out.scales);
    }

    fn fp4_columns<S: Source>(&self, job: Job, source: Source16<'_, S>, out: Nvfp4Output<'_>) {
        let cols = source.cols;
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(source.src.len()) {
            use rayon::prelude::*;
            let (rows, width) = (source.rows, columns_of(part, source.rows));
            let bytes = out.codes.len() / cols * width;
            let across = job.blocks.grid(width, rows).iter().product();
            let parts = out.codes.par_chunks_mut(bytes).zip(out.scales.par_chunks_mut(across)).enumerate();
            parts.for_each(|(n, (codes, scales))| {
                source.quantize(job, n * width..cols.min((n + 1) * width), codes, scales);
            });
            return;
        }
        source.quantize(job, 0..cols, out.codes, out.scales);
    }
}

/// The columns of a part that a thread takes: whole tiles.
#[cfg(feature = "rayon")]
fn columns_of(part: usize, rows: usize) -> usize {
    (part / rows).next_multiple_of(64).max(64)
}

/// Returns the largest magnitude of a copy of a row-major matrix. NaN is passed over. O(rows · cols). See [`Codec::nvfp4_amax`].
///
/// ```
/// use fp8_format::slice::{Nvfp4Copy, nvfp4_amax};
///
/// assert_eq!(nvfp4_amax(&[1.0_f32, -3.0], 1, 2, Nvfp4Copy::Columnwise)?, 3.0);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::nvfp4_amax`].
pub fn nvfp4_amax<S: Source>(src: &[S], rows: usize, cols: usize, copy: Nvfp4Copy) -> Result<f32> {
    Codec::new().nvfp4_amax(src, rows, cols, copy)
}

/// Quantizes a copy of a row-major matrix to NVFP4, with the amax of the whole, and returns the factors of the tensor.
/// O(rows · cols). See [`Codec::quantize_nvfp4`].
///
/// ```
/// use fp8_format::slice::{Nvfp4Options, Nvfp4Output, quantize_nvfp4};
/// use fp8_format::{E2M1, E4M3};
///
/// let (mut codes, mut scales) = ([0; 2], [E4M3::ZERO; 1]);
/// let out = Nvfp4Output::new(&mut codes, &mut scales);
/// let tensor = quantize_nvfp4(&[1.0_f32, -6.0, 2.4], 1, 3, 6.0, &Nvfp4Options::default(), out)?;
/// assert_eq!((tensor.encode(), scales[0].to_f32()), (448.0, 448.0));
/// assert_eq!(E2M1::unpack(codes[0]).map(E2M1::to_f32), [1.0, -6.0]);
/// assert_eq!(E2M1::unpack(codes[1]).map(E2M1::to_f32), [2.0, 0.0]); // an odd row ends with a zero half
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// As [`Codec::quantize_nvfp4`].
pub fn quantize_nvfp4<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    amax: f32,
    options: &Nvfp4Options,
    out: Nvfp4Output<'_>,
) -> Result<TensorScale> {
    Codec::new().quantize_nvfp4(src, rows, cols, amax, options, out)
}
