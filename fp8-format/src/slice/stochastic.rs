//! Stochastic rounding of slices, with the words of a Philox stream: element `i` takes the stream's word `i`.

use super::{Codec, equal_lengths};
use crate::arch::{self, Saturating, bytes_mut};
use crate::philox::Philox;
use crate::{Fp8, Result, Source};

impl Codec {
    /// [`Fp8::from_f32_stochastic`] of each element, with its word of `random`: one of the two neighbours, the nearer one more
    /// often. Overflow and infinity give the largest finite value, NaN gives 0x7F. O(n).
    ///
    /// f16 and bf16 are converted by [`Codec::quantize_stochastic`] with scale 1, which changes no value.
    ///
    /// Equal arguments give equal bits; a part of a slice that begins at element `i` gets the same ones with
    /// `random.at(i)`, however a slice is cut.
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

    /// [`Codec::quantize`] with stochastic instead of nearest rounding of the product; saturating; NaN stays NaN. Returns the
    /// same maximum. O(n), two reads of `src`. With scale 1 it converts f16 and bf16 as they are.
    ///
    /// The random numbers are those of [`Codec::from_f32_stochastic`].
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

/// [`Codec::from_f32_stochastic`] on the fastest path: one of the two neighbours of each element; saturating, NaN gives 0x7F. O(n).
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

/// [`Codec::quantize_stochastic`] on the fastest path: [`Codec::quantize`] with stochastic rounding; saturating, NaN stays NaN.
/// O(n), two reads of `src`. With scale 1 it converts f16 and bf16 as they are.
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
