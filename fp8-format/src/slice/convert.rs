//! Element-wise conversions: `dst[i] = convert(src[i])`.

use super::{Codec, equal_lengths};
use crate::arch::{self, Overflowing, Saturating, bytes, bytes_mut};
use crate::{Fp8, Result, Source};
use half::{bf16, f16};

impl Codec {
    fn encode<T: Fp8, S: Source>(&self, op: &'static str, src: &[S], dst: &mut [T]) -> Result<()> {
        equal_lengths(op, src.len(), dst.len())?;
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        self.each(src, bytes_mut(dst), |_, src, dst| {
            arch::encode::<S, Overflowing<T>>(path, src, dst, streams);
            0.0
        });
        Ok(())
    }

    fn encode_saturating<T: Fp8, S: Source>(&self, op: &'static str, src: &[S], dst: &mut [T]) -> Result<()> {
        equal_lengths(op, src.len(), dst.len())?;
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        self.each(src, bytes_mut(dst), |_, src, dst| {
            arch::encode::<S, Saturating<T>>(path, src, dst, streams);
            0.0
        });
        Ok(())
    }

    fn encode_f64<T: Fp8>(
        &self,
        op: &'static str,
        src: &[f64],
        dst: &mut [T],
        convert: impl Fn(f64) -> T + Sync,
    ) -> Result<()> {
        equal_lengths(op, src.len(), dst.len())?;
        self.each(src, dst, |_, src, dst| {
            for (d, s) in dst.iter_mut().zip(src) {
                *d = convert(*s);
            }
            0.0
        });
        Ok(())
    }

    fn decode<T: Fp8, D: Source>(&self, op: &'static str, src: &[T], dst: &mut [D]) -> Result<()> {
        equal_lengths(op, src.len(), dst.len())?;
        let (path, streams) = (self.path, self.streams(size_of_val(src) + size_of_val(dst)));
        self.each(bytes(src), dst, |_, src, dst| {
            arch::decode::<Saturating<T>, D>(path, src, dst, streams);
            0.0
        });
        Ok(())
    }
}

/// Methods of `Codec`, and functions that call them.
macro_rules! conversions {
    ($($(#[$doc:meta])* $name:ident<T>($source:ty, $destination:ty) = |$codec:ident, $op:ident, $src:ident, $dst:ident| $convert:expr;)*) => {
        impl Codec {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
            pub fn $name<T: Fp8>(&self, $src: &[$source], $dst: &mut [$destination]) -> Result<()> {
                let ($codec, $op) = (self, concat!("slice::", stringify!($name)));
                $convert
            }
        )*}
        $(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`Error::Length`](crate::Error::Length) if the lengths differ; nothing is written then.
            #[inline]
            pub fn $name<T: Fp8>(src: &[$source], dst: &mut [$destination]) -> Result<()> {
                Codec::new().$name(src, dst)
            }
        )*
    };
}

conversions! {
    /// [`Fp8::from_f32`] of each element: overflow gives NaN (E4M3) or infinity (E5M2).
    from_f32<T>(f32, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// [`Fp8::from_f32_saturating`] of each element: overflow gives the largest finite value.
    from_f32_saturating<T>(f32, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// [`Fp8::from_f64`] of each element, rounded once; on every path one element after the other.
    from_f64<T>(f64, T) = |codec, op, src, dst| codec.encode_f64(op, src, dst, T::from_f64);
    /// [`Fp8::from_f64_saturating`] of each element, rounded once; on every path one element after the other.
    from_f64_saturating<T>(f64, T) = |codec, op, src, dst| codec.encode_f64(op, src, dst, T::from_f64_saturating);
    /// [`Fp8::from_f16`] of each element: overflow gives NaN (E4M3) or infinity (E5M2).
    from_f16<T>(f16, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// [`Fp8::from_f16_saturating`] of each element: overflow gives the largest finite value.
    from_f16_saturating<T>(f16, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// [`Fp8::from_bf16`] of each element: overflow gives NaN (E4M3) or infinity (E5M2).
    from_bf16<T>(bf16, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// [`Fp8::from_bf16_saturating`] of each element: overflow gives the largest finite value.
    from_bf16_saturating<T>(bf16, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// The value of each element, exact; NaN becomes the canonical one, as in [`Fp8::to_f32`].
    to_f32<T>(T, f32) = |codec, op, src, dst| codec.decode(op, src, dst);
    /// The value of each element, exact; NaN becomes the canonical one, as in [`Fp8::to_f16`].
    to_f16<T>(T, f16) = |codec, op, src, dst| codec.decode(op, src, dst);
    /// The value of each element, exact; NaN becomes the canonical one, as in [`Fp8::to_bf16`].
    to_bf16<T>(T, bf16) = |codec, op, src, dst| codec.decode(op, src, dst);
}
