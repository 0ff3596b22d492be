//! Quantization of a tensor with one scale.
//!
//! `v = f32(x)`; `amax = max |v|`, before scaling, NaN passed over; `code = satfinite(v · scale)`, one f32
//! multiplication; back, `f32(code) · scale_inv`. One read of the source does all of it.

use super::{Codec, equal_lengths};
use crate::arch::{self, Saturating, Scale, bytes, bytes_mut};
use crate::{Fp8, Result, Source};

impl Codec {
    /// Quantizes `src` with one scale and returns the largest magnitude of `src`, before scaling.
    ///
    /// `dst[i] = T::from_f32_saturating(f32(src[i]) · scale)`: the product is an f32, rounded to nearest, ties to even, as is its
    /// code; beyond the range it becomes the largest finite value. O(n), one read of `src`.
    ///
    /// NaN is stored as NaN and passed over by the maximum (0 if there is nothing else); ±inf is stored as ±[`Fp8::MAX`] and makes
    /// the maximum infinite. An empty slice gives 0. Any scale is taken as it is: a product that is NaN is stored as NaN.
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let mut codes = [E4M3::ZERO; 3];
    /// let amax = Codec::new().quantize(&[1.0_f32, -3.3, 1e3], 0.5, &mut codes)?;
    /// assert_eq!((amax, codes.map(E4M3::to_f32)), (1e3, [0.5, -1.625, 448.0])); // of 0.5, -1.65, 500
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

    /// The largest magnitude, exact: NaN is passed over, infinity counts, an empty slice gives 0. O(n).
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

    /// `dst[i] = f32(src[i]) · scale_inv`, one f32 multiplication, rounded again to nearest, ties to even, where `D` is narrower:
    /// beyond its range infinity. NaN, also of the product, becomes the canonical one. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice::Codec};
    ///
    /// let mut x = [half::f16::ZERO; 2];
    /// Codec::new().dequantize(&[0x38, 0xFE].map(E4M3::from_bits), 1000.0, &mut x)?;
    /// assert_eq!(x.map(half::f16::to_f32), [1000.0, f32::NEG_INFINITY]); // of -448000, beyond f16
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

/// [`Codec::quantize`] on the fastest path: `dst[i] = T::from_f32_saturating(f32(src[i]) · scale)`; returns the largest magnitude
/// of `src`. To nearest, ties to even; saturating; NaN stays NaN and does not count for the maximum. O(n).
///
/// ```
/// use fp8_format::{E4M3, slice};
///
/// let x = [1.0_f32, -3.3, f32::NAN, 1e3];
/// let mut codes = [E4M3::ZERO; 4];
/// assert_eq!(slice::quantize(&x, 0.5, &mut codes)?, 1e3);
/// assert_eq!(codes.map(E4M3::to_bits), [0x30, 0xBD, 0x7F, 0x7E]); // 0.5, -1.625 (of -1.65), NaN, 448 (of 500)
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn quantize<T: Fp8, S: Source>(src: &[S], scale: f32, dst: &mut [T]) -> Result<f32> {
    Codec::new().quantize(src, scale, dst)
}

/// [`Codec::amax`] on the fastest path: the largest magnitude, NaN passed over. O(n).
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

/// [`Codec::dequantize`] on the fastest path: `dst[i] = f32(src[i]) · scale_inv`, to nearest where `D` is narrower than f32,
/// infinity beyond its range; NaN becomes the canonical one. O(n).
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
