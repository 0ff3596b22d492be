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
    /// [`Fp8::from_f32`] of each element: to nearest, ties to even. Overflow and infinity give NaN (E4M3) or infinity (E5M2),
    /// NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, E5M2, slice};
    ///
    /// let x = [0.3_f32, -17.0, 1e6, f32::NAN];
    /// let (mut a, mut b) = ([E4M3::ZERO; 4], [E5M2::ZERO; 4]);
    /// slice::from_f32(&x, &mut a)?;
    /// slice::from_f32(&x, &mut b)?;
    /// assert_eq!(a.map(E4M3::to_bits), [0x2A, 0xD8, 0x7F, 0x7F]); // 0.3125, -16 (a tie, to the even code), NaN, NaN
    /// assert_eq!(b.map(E5M2::to_bits), [0x35, 0xCC, 0x7C, 0x7F]); // 0.3125, -16, infinity, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_f32<T>(f32, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// [`Fp8::from_f32_saturating`] of each element: to nearest, ties to even. Overflow and infinity give the largest finite
    /// value, NaN gives 0x7F. O(n).
    from_f32_saturating<T>(f32, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// [`Fp8::from_f64`] of each element: to nearest, ties to even, rounded once; on every path one element after the other.
    /// Overflow and infinity give NaN (E4M3) or infinity (E5M2), NaN gives 0x7F. O(n).
    from_f64<T>(f64, T) = |codec, op, src, dst| codec.encode_f64(op, src, dst, T::from_f64);
    /// [`Fp8::from_f64_saturating`] of each element: to nearest, ties to even, rounded once; on every path one element after the
    /// other. Overflow and infinity give the largest finite value, NaN gives 0x7F. O(n).
    from_f64_saturating<T>(f64, T) = |codec, op, src, dst| codec.encode_f64(op, src, dst, T::from_f64_saturating);
    /// [`Fp8::from_f16`] of each element: to nearest, ties to even. Overflow and infinity give NaN (E4M3) or infinity (E5M2),
    /// NaN gives 0x7F. O(n).
    from_f16<T>(f16, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// [`Fp8::from_f16_saturating`] of each element: to nearest, ties to even. Overflow and infinity give the largest finite
    /// value, NaN gives 0x7F. O(n).
    from_f16_saturating<T>(f16, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// [`Fp8::from_bf16`] of each element: to nearest, ties to even. Overflow and infinity give NaN (E4M3) or infinity (E5M2),
    /// NaN gives 0x7F. O(n).
    from_bf16<T>(bf16, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// [`Fp8::from_bf16_saturating`] of each element: to nearest, ties to even. Overflow and infinity give the largest finite
    /// value, NaN gives 0x7F. O(n).
    from_bf16_saturating<T>(bf16, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// [`Fp8::to_f32`] of each element: exact, so that nothing is rounded or saturated; NaN becomes the canonical one. O(n).
    to_f32<T>(T, f32) = |codec, op, src, dst| codec.decode(op, src, dst);
    /// [`Fp8::to_f16`] of each element: exact, so that nothing is rounded or saturated; NaN becomes the canonical one. O(n).
    to_f16<T>(T, f16) = |codec, op, src, dst| codec.decode(op, src, dst);
    /// [`Fp8::to_bf16`] of each element: exact, so that nothing is rounded or saturated; NaN becomes the canonical one. O(n).
    to_bf16<T>(T, bf16) = |codec, op, src, dst| codec.decode(op, src, dst);
}
