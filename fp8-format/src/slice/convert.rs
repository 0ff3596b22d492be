//! Element-wise conversions: `dst[i] = convert(src[i])`.

use super::equal_lengths;
use crate::{Fp8, Result, Source};
use half::{bf16, f16};

/// The loop of all conversions. The closures are branch-free, so it is compiled to vector code.
#[inline(always)]
fn map<S: Copy, D>(op: &'static str, src: &[S], dst: &mut [D], convert: impl Fn(S) -> D) -> Result<()> {
    equal_lengths(op, src.len(), dst.len())?;
    for (d, s) in dst.iter_mut().zip(src) {
        *d = convert(*s);
    }
    Ok(())
}

macro_rules! encode {
    ($($(#[$doc:meta])* $name:ident($source:ty) = |$x:ident| $convert:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
        #[inline]
        pub fn $name<T: Fp8>(src: &[$source], dst: &mut [T]) -> Result<()> {
            map(concat!("slice::", stringify!($name)), src, dst, |$x| $convert)
        }
    )*};
}

encode! {
    /// [`Fp8::from_f32`] of each element: overflow gives NaN (E4M3) or infinity (E5M2).
    from_f32(f32) = |x| T::from_f32(x);
    /// [`Fp8::from_f32_saturating`] of each element: overflow gives the largest finite value.
    from_f32_saturating(f32) = |x| T::from_f32_saturating(x);
    /// [`Fp8::from_f64`] of each element, rounded once.
    from_f64(f64) = |x| T::from_f64(x);
    /// [`Fp8::from_f64_saturating`] of each element, rounded once.
    from_f64_saturating(f64) = |x| T::from_f64_saturating(x);
    /// [`Fp8::from_f16`] of each element: overflow gives NaN (E4M3) or infinity (E5M2).
    from_f16(f16) = |x| T::from_f32(Source::to_f32(x));
    /// [`Fp8::from_f16_saturating`] of each element: overflow gives the largest finite value.
    from_f16_saturating(f16) = |x| T::from_f32_saturating(Source::to_f32(x));
    /// [`Fp8::from_bf16`] of each element: overflow gives NaN (E4M3) or infinity (E5M2).
    from_bf16(bf16) = |x| T::from_f32(Source::to_f32(x));
    /// [`Fp8::from_bf16_saturating`] of each element: overflow gives the largest finite value.
    from_bf16_saturating(bf16) = |x| T::from_f32_saturating(Source::to_f32(x));
}

// `inline(always)`: a caller compiled for more CPU features gets loops for them.
macro_rules! decode {
    ($($name:ident($destination:ty);)*) => {$(
        /// The value of each element, exact; NaN becomes the canonical one, as in
        #[doc = concat!("[`Fp8::", stringify!($name), "`].")]
        ///
        /// # Errors
        /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
        #[inline(always)]
        pub fn $name<T: Fp8>(src: &[T], dst: &mut [$destination]) -> Result<()> {
            map(concat!("slice::", stringify!($name)), src, dst, T::$name)
        }
    )*};
}

decode! {
    to_f32(f32);
    to_f16(f16);
    to_bf16(bf16);
}
