//! Quantization of a tensor with one scale.
//!
//! `v = f32(x)`; `amax = max |v|`, before scaling, NaN passed over; `code = satfinite(v · scale)`, one f32
//! multiplication; back, `f32(code) · scale_inv`. One read of the source does all of it. `inline(always)`: a caller
//! compiled for more CPU features gets loops for them.

use super::{BLOCK, equal_lengths};
use crate::{Fp8, Result, Source};

/// Independent running maxima, so that the reduction is vector code too: two of the widest registers.
const LANES: usize = 32;

/// Running maximum of magnitudes. `a > self` is false for NaN, which is thereby passed over.
#[derive(Clone, Copy)]
struct Amax([f32; LANES]);

impl Amax {
    const ZERO: Self = Self([0.0; LANES]);

    #[inline(always)]
    fn add_block(&mut self, block: &[f32; BLOCK]) {
        for group in block.as_chunks::<LANES>().0 {
            for (lane, v) in self.0.iter_mut().zip(group) {
                let a = v.abs();
                *lane = if a > *lane { a } else { *lane };
            }
        }
    }

    #[inline(always)]
    fn add(&mut self, v: f32) {
        let [first, ..] = &mut self.0;
        let a = v.abs();
        *first = if a > *first { a } else { *first };
    }

    #[inline(always)]
    fn total(self) -> f32 {
        self.0.into_iter().fold(0.0, |max, a| if a > max { a } else { max })
    }
}

/// Quantizes `src` with one scale and returns the largest magnitude of `src`, before scaling.
///
/// `dst[i] = T::from_f32_saturating(f32(src[i]) · scale)`. NaN is stored as NaN and passed over by the maximum (0 if
/// there is nothing else); ±inf is stored as ±[`Fp8::MAX`] and makes the maximum infinite. An empty slice gives 0.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline(always)]
pub fn quantize<T: Fp8, S: Source>(src: &[S], scale: f32, dst: &mut [T]) -> Result<f32> {
    equal_lengths("slice::quantize", src.len(), dst.len())?;
    Ok(quantize_equal(src, scale, dst))
}

/// [`quantize`] of slices known to be equally long.
#[inline(always)]
pub(super) fn quantize_equal<T: Fp8, S: Source>(src: &[S], scale: f32, dst: &mut [T]) -> f32 {
    let (blocks, tail) = src.as_chunks::<BLOCK>();
    let (dst_blocks, dst_tail) = dst.as_chunks_mut::<BLOCK>();
    let mut amax = Amax::ZERO;
    for (block, codes) in blocks.iter().zip(dst_blocks) {
        let v = block.map(S::to_f32);
        for (code, v) in codes.iter_mut().zip(&v) {
            *code = T::from_f32_saturating(*v * scale);
        }
        amax.add_block(&v);
    }
    for (code, x) in dst_tail.iter_mut().zip(tail) {
        let v = x.to_f32();
        *code = T::from_f32_saturating(v * scale);
        amax.add(v);
    }
    amax.total()
}

/// The largest magnitude: NaN is passed over, infinity counts, an empty slice gives 0.
#[must_use]
#[inline(always)]
pub fn amax<S: Source>(src: &[S]) -> f32 {
    let (blocks, tail) = src.as_chunks::<BLOCK>();
    let mut amax = Amax::ZERO;
    for block in blocks {
        amax.add_block(&block.map(S::to_f32));
    }
    for x in tail {
        amax.add(x.to_f32());
    }
    amax.total()
}

/// `dst[i] = f32(src[i]) · scale_inv`, one f32 multiplication, rounded to `D` where that is narrower.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
#[inline(always)]
pub fn dequantize<T: Fp8, D: Source>(src: &[T], scale_inv: f32, dst: &mut [D]) -> Result<()> {
    equal_lengths("slice::dequantize", src.len(), dst.len())?;
    for (d, code) in dst.iter_mut().zip(src) {
        *d = D::from_f32(code.to_f32() * scale_inv);
    }
    Ok(())
}
