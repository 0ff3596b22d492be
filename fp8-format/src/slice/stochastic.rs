//! Stochastic rounding of slices. Element `i` takes word `i` of a Philox stream.

use super::{Codec, equal_lengths};
use crate::arch::{self, Saturating, bytes_mut};
use crate::philox::Philox;
use crate::{Fp8, Result, Source};

impl Codec {
    /// Rounds each element stochastically to one of its two neighbours, the nearer one more often:
    /// [`Fp8::from_f32_stochastic`] with word `i` of `random`. Overflow and infinity give the largest finite value, NaN gives
    /// 0x7F. O(n).
    ///
    /// For f16 and bf16 use [`Codec::quantize_stochastic`] with scale 1.
    ///
    /// Equal arguments give equal bits. To convert a slice in parts, pass `random.at(i)` for the part that begins at element `i`.
    ///
    /// ```
    /// use fp8_format::{E4M3, philox::Philox, slice::Codec};
    ///
    /// let (x, random) = ([3.3; 10], Philox::new(42, 0));
    /// let mut codes = [[E4M3::ZERO; 10]; 2];
    /// Codec::new().from_f32_stochastic(&x, random, &mut codes[0])?;
    /// Codec::new().from_f32_stochastic(&x[4..], random.at(4), &mut codes[1][4..])?;
    /// assert_eq!(codes[0][4..], codes[1][4..]);
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
    pub fn from_f32_stochastic<T: Fp8>(&self, src: &[f32], random: Philox, dst: &mut [T]) -> Result<()> {
        equal_lengths("slice::from_f32_stochastic", src.len(), dst.len())?;
        self.round(src, 1.0, random, dst);
        Ok(())
    }

    /// Quantizes like [`Codec::quantize`], but rounds the products stochastically, with the random numbers of
    /// [`Codec::from_f32_stochastic`]. Saturates; NaN stays NaN. Returns the largest magnitude of `src`. O(n), two reads of `src`.
    ///
    /// ```
    /// use fp8_format::{E4M3, philox::Philox, slice::Codec};
    /// use half::bf16;
    ///
    /// let mut codes = [E4M3::ZERO; 1000];
    /// let x = [bf16::from_f32(3.3); 1000]; // 3.296875
    /// assert_eq!(Codec::new().quantize_stochastic(&x, 1.0, Philox::new(42, 0), &mut codes)?, 3.296875);
    /// assert!(codes.iter().all(|x| [3.25, 3.5].contains(&x.to_f32())));
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
    pub fn quantize_stochastic<T: Fp8, S: Source>(
        &self,
        src: &[S],
        scale: f32,
        random: Philox,
        dst: &mut [T],
    ) -> Result<f32> {
        equal_lengths("slice::quantize_stochastic", src.len(), dst.len())?;
        self.round(src, scale, random, dst);
        Ok(self.amax(src))
    }

    fn round<T: Fp8, S: Source>(&self, src: &[S], scale: f32, random: Philox, dst: &mut [T]) {
        let path = self.path;
        self.each(src, bytes_mut(dst), |first, src, dst| {
            let random = random.at(first as u64);
            arch::stochastic::<S, Saturating<T>>(path, src, scale, random, dst);
            0.0
        });
    }
}

/// Rounds each element stochastically to one of its two neighbours. Saturates; NaN gives 0x7F. O(n). See
/// [`Codec::from_f32_stochastic`].
///
/// ```
/// use fp8_format::{E4M3, philox::Philox, slice};
///
/// let mut codes = [E4M3::ZERO; 1000];
/// slice::from_f32_stochastic(&[3.3; 1000], Philox::new(42, 0), &mut codes)?;
/// assert!(codes.iter().all(|x| [3.25, 3.5].contains(&x.to_f32())));
/// let mean = codes.iter().map(|x| x.to_f32()).sum::<f32>() / 1000.0;
/// assert!((mean - 3.3).abs() < 0.01); // always 3.25 if rounded to nearest
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn from_f32_stochastic<T: Fp8>(src: &[f32], random: Philox, dst: &mut [T]) -> Result<()> {
    Codec::new().from_f32_stochastic(src, random, dst)
}

/// Quantizes like [`quantize`](crate::slice::quantize()), but rounds stochastically. Saturates; NaN stays NaN. Returns the largest
/// magnitude of `src`. O(n), two reads of `src`. Scale 1 converts f16 and bf16. See [`Codec::quantize_stochastic`].
///
/// ```
/// use fp8_format::{E4M3, philox::Philox, slice};
///
/// let mut codes = [E4M3::ZERO; 1000];
/// assert_eq!(slice::quantize_stochastic(&[3.3_f32; 1000], 2.0, Philox::new(42, 0), &mut codes)?, 3.3);
/// assert!(codes.iter().all(|x| [6.5, 7.0].contains(&x.to_f32())));
/// let mean = codes.iter().map(|x| x.to_f32()).sum::<f32>() / 1000.0;
/// assert!((mean - 6.6).abs() < 0.02); // always 6.5 if rounded to nearest
/// # Ok::<(), fp8_format::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn quantize_stochastic<T: Fp8, S: Source>(
    src: &[S],
    scale: f32,
    random: Philox,
    dst: &mut [T],
) -> Result<f32> {
    Codec::new().quantize_stochastic(src, scale, random, dst)
}
