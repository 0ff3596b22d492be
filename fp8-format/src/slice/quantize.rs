//! Quantization of a tensor with one scale.
//!
//! `v = f32(x)`; `amax = max |v|`, before scaling and ignoring NaN; `code = satfinite(v · scale)` with one f32 multiplication.
//! Dequantization is `f32(code) · scale_inv`. One read of the source computes codes and amax.

use super::{Codec, equal_lengths};
use crate::arch::{self, Saturating, Scale, bytes, bytes_mut};
use crate::{Fp8, Result, Source};

impl Codec {
    /// Quantizes `src` with one scale and returns the largest magnitude of `src`, before scaling.
    ///
    /// `dst[i] = T::from_f32_saturating(f32(src[i]) · scale)`. The product is rounded to f32 and then to `T`, both to nearest, ties
    /// to even; overflow gives the largest finite value. O(n), one read of `src`.
    ///
    /// NaN is stored as NaN and does not count for the maximum. ±inf is stored as ±[`Fp8::MAX`] and makes the maximum infinite. An
    /// empty slice, or one of NaN alone, returns 0. `scale` is not checked: a product that is NaN is stored as NaN.
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let mut codes = [E4M3::ZERO; 3];
    /// let amax = Codec::new().quantize(&[1.0_f32, -3.3, 1e3], 0.5, &mut codes)?;
    /// assert_eq!((amax, codes.map(E4M3::to_f32)), (1e3, [0.5, -1.625, 448.0])); // from 0.5, -1.65, 500
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
    pub fn quantize<T: Fp8, S: Source>(&self, src: &[S], scale: f32, dst: &mut [T]) -> Result<f32> {
        equal_lengths("slice::quantize", src.len(), dst.len())?;
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        let scale = Scale::new::<S, Saturating<T>>(path, scale, src.len());
        Ok(self.each(src, bytes_mut(dst), |_, src, dst| {
            arch::quantize::<S, Saturating<T>>(path, src, &scale, dst, streams)
        }))
    }

    /// Returns the largest magnitude, which is exact. NaN is ignored, infinity counts, an empty slice gives 0. O(n).
    ///
    /// ```
    /// use fp8_format::slice::{Codec, Path};
    ///
    /// let codec = Codec::new().on(Path::SCALAR);
    /// assert_eq!(codec.amax(&[1.0_f32, f32::NAN, -3.3]), 3.3);
    /// assert_eq!(codec.amax(&[1.0_f32, f32::NEG_INFINITY]), f32::INFINITY);
    /// ```
    #[must_use]
    pub fn amax<S: Source>(&self, src: &[S]) -> f32 {
        let path = self.path;
        let amax = |src| arch::amax::<S>(path, src);
        #[cfg(feature = "rayon")]
        if let Some(part) = self.part(src.len()) {
            use rayon::prelude::*;
            return src.par_chunks(part).map(amax).reduce(|| 0.0, f32::max);
        }
        amax(src)
    }

    /// Dequantizes `src`: `dst[i] = f32(src[i]) · scale_inv`, an f32 product. If `D` is f16 or bf16, the product is rounded once
    /// more, to nearest, ties to even, and overflow gives infinity. Every NaN becomes the canonical one. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let mut x = [half::f16::ZERO; 2];
    /// Codec::new().dequantize(&[0x38, 0xFE].map(E4M3::from_bits), 1000.0, &mut x)?;
    /// assert_eq!(x.map(half::f16::to_f32), [1000.0, f32::NEG_INFINITY]); // from -448000, out of range of f16
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
    pub fn dequantize<T: Fp8, D: Source>(&self, src: &[T], scale_inv: f32, dst: &mut [D]) -> Result<()> {
        equal_lengths("slice::dequantize", src.len(), dst.len())?;
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        self.each(bytes(src), dst, |_, src, dst| {
            arch::dequantize::<Saturating<T>, D>(path, src, scale_inv, dst, streams);
            0.0
        });
        Ok(())
    }
}

/// Quantizes `src` with one scale, `dst[i] = T::from_f32_saturating(f32(src[i]) · scale)`, and returns the largest magnitude of
/// `src`. Rounds to nearest, ties to even, and saturates; NaN stays NaN and does not count for the maximum. O(n). See
/// [`Codec::quantize`].
///
/// ```
/// use fp8_format::{E4M3, slice};
///
/// let x = [1.0_f32, -3.3, f32::NAN, 1e3];
/// let mut codes = [E4M3::ZERO; 4];
/// assert_eq!(slice::quantize(&x, 0.5, &mut codes)?, 1e3);
/// assert_eq!(codes.map(E4M3::to_bits), [0x30, 0xBD, 0x7F, 0x7E]); // 0.5, -1.625 (from -1.65), NaN, 448 (from 500)
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn quantize<T: Fp8, S: Source>(src: &[S], scale: f32, dst: &mut [T]) -> Result<f32> {
    Codec::new().quantize(src, scale, dst)
}

/// Returns the largest magnitude, ignoring NaN; an empty slice gives 0. O(n). See [`Codec::amax`].
///
/// ```
/// assert_eq!(fp8_format::slice::amax(&[1.0_f32, -3.3, f32::NAN]), 3.3);
/// assert_eq!(fp8_format::slice::amax::<f32>(&[]), 0.0);
/// ```
#[must_use]
#[inline]
pub fn amax<S: Source>(src: &[S]) -> f32 {
    Codec::new().amax(src)
}

/// Dequantizes `src`: `dst[i] = f32(src[i]) · scale_inv`, rounded to nearest if `D` is narrower than f32. Overflow gives infinity,
/// NaN becomes the canonical one. O(n). See [`Codec::dequantize`].
///
/// ```
/// use fp8_format::{E4M3, slice};
///
/// let mut x = [0.0_f32; 3];
/// slice::dequantize(&[0x38, 0xB0, 0x7E].map(E4M3::from_bits), 0.1, &mut x)?;
/// assert_eq!(x, [0.1, -0.05, 44.8]);
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn dequantize<T: Fp8, D: Source>(src: &[T], scale_inv: f32, dst: &mut [D]) -> Result<()> {
    Codec::new().dequantize(src, scale_inv, dst)
}
