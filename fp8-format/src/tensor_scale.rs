//! The type [`TensorScale`]: the upper level of two-level scales.

use crate::E4M3;

/// The two factors that all blocks of an NVFP4 tensor share, above the [`E4M3`] scale of each block.
///
/// ```text
/// encode = min(2688 / amax, f32::MAX), and 1 if amax is 0 or infinite; 2688 = 6 · 448
/// decode = 1 / encode
/// S = E4M3(min(amax of the block · (encode · f32(1 / 6)), f32::MAX)), to nearest, saturating
/// code = E2M1(x · min(1 / (S · decode), f32::MAX))
/// value = (code · S) · decode
/// ```
///
/// Each f32 operation is rounded once. A block whose amax is less than amax / 458,752 has the scale 0 and the value 0 throughout.
///
/// ```
/// use fp8_format::{E2M1, E4M3, TensorScale};
///
/// let tensor = TensorScale::from_amax(2688.0);
/// let scale = tensor.block_scale(300.0);
/// assert_eq!((tensor.encode(), scale.to_f32()), (1.0, 48.0)); // of 50, a tie
/// let code = E2M1::from_f32(100.0 * tensor.block_factor(scale));
/// assert_eq!(tensor.value(code, scale), 96.0); // 2 · 48
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorScale {
    encode: f32,
    decode: f32,
}

impl TensorScale {
    /// The largest product of a code and a block's scale.
    const MOST: f32 = 2688.0;

    /// Returns the factors for the largest magnitude of a tensor. NaN counts as 0, a negative number as its magnitude.
    #[must_use]
    #[inline]
    pub const fn from_amax(amax: f32) -> Self {
        let amax = if amax.is_nan() { 0.0 } else { amax.abs() };
        let encode = Self::MOST / amax;
        let encode = if encode > f32::MAX { f32::MAX } else { encode };
        Self::from_encode(if amax == 0.0 || encode == 0.0 { 1.0 } else { encode })
    }

    /// Returns the factors of which this is the first, as checkpoints keep it.
    #[must_use]
    #[inline]
    pub const fn from_encode(encode: f32) -> Self {
        Self { encode, decode: 1.0 / encode }
    }

    /// Returns the factors of a tensor of which only the second is known, as other checkpoints keep it.
    #[must_use]
    #[inline]
    pub const fn from_decode(decode: f32) -> Self {
        Self { encode: 1.0 / decode, decode }
    }

    /// Returns the factor that brings the tensor's amax to 2688.
    #[must_use]
    #[inline]
    pub const fn encode(self) -> f32 {
        self.encode
    }

    /// Returns the factor that brings the product of a code and its block's scale back.
    #[must_use]
    #[inline]
    pub const fn decode(self) -> f32 {
        self.decode
    }

    /// Returns the scale of a block with this largest magnitude: 0 to 448. `amax` is not negative.
    #[must_use]
    #[inline(always)]
    pub const fn block_scale(self, amax: f32) -> E4M3 {
        let scale = amax * (self.encode * (1.0 / 6.0));
        E4M3::from_f32_saturating(if scale > f32::MAX { f32::MAX } else { scale })
    }

    /// Returns the factor by which the elements of a block with this scale are multiplied.
    #[must_use]
    #[inline(always)]
    pub const fn block_factor(self, scale: E4M3) -> f32 {
        let factor = 1.0 / (scale.to_f32() * self.decode);
        if factor > f32::MAX { f32::MAX } else { factor }
    }

    /// Returns the value of a code in a block with this scale. A scale that is NaN gives NaN.
    #[must_use]
    #[inline(always)]
    pub const fn value(self, code: crate::E2M1, scale: E4M3) -> f32 {
        code.to_f32() * scale.to_f32() * self.decode
    }
}
