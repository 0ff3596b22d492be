//! Stochastic rounding of a slice: element `i` takes word `i % 4` of Philox4x32-10 with counter `offset + i / 4`.

use super::equal_lengths;
use crate::philox::philox4x32_10;
use crate::{Fp8, Result, Source};

/// [`Fp8::from_f32_stochastic`] of each element, with random numbers from (`seed`, `offset`).
///
/// Element `i` takes word `i % 4` of [`philox4x32_10`] with counter `offset + i / 4` and key `seed`: equal arguments
/// give equal bits, and a slice cut at a multiple of 4 goes on with `offset + start / 4`.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn from_f32_stochastic<T: Fp8>(src: &[f32], seed: u64, offset: u64, dst: &mut [T]) -> Result<()> {
    equal_lengths("slice::from_f32_stochastic", src.len(), dst.len())?;
    round(src, 1.0, seed, offset, dst);
    Ok(())
}

/// [`quantize`](super::quantize) with stochastic instead of nearest rounding; returns the same maximum.
///
/// The random numbers are those of [`from_f32_stochastic`].
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline]
pub fn quantize_stochastic<T: Fp8, S: Source>(
    src: &[S],
    scale: f32,
    seed: u64,
    offset: u64,
    dst: &mut [T],
) -> Result<f32> {
    equal_lengths("slice::quantize_stochastic", src.len(), dst.len())?;
    round(src, scale, seed, offset, dst);
    Ok(super::amax(src))
}

#[inline(always)]
fn round<T: Fp8, S: Source>(src: &[S], scale: f32, seed: u64, offset: u64, dst: &mut [T]) {
    let mut counter = offset;
    for (xs, codes) in src.chunks(4).zip(dst.chunks_mut(4)) {
        for ((code, x), r) in codes.iter_mut().zip(xs).zip(philox4x32_10(counter, seed)) {
            *code = T::from_f32_stochastic(x.to_f32() * scale, r);
        }
        counter = counter.wrapping_add(1);
    }
}
