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

    fn decode_f64<T: Fp8>(&self, op: &'static str, src: &[T], dst: &mut [f64]) -> Result<()> {
        equal_lengths(op, src.len(), dst.len())?;
        self.each(src, dst, |_, src, dst| {
            for (d, code) in dst.iter_mut().zip(src) {
                *d = code.to_f64();
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

/// Defines the methods of `Codec` and the functions that call them.
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
    /// Converts each element with [`Fp8::from_f32`]: to nearest, ties to even. Overflow and infinity give NaN (E4M3) or infinity (E5M2),
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
    /// Converts each element with [`Fp8::from_f32_saturating`]: to nearest, ties to even. Overflow and infinity give the largest finite
    /// value, NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut codes = [E4M3::ZERO; 4];
    /// slice::from_f32_saturating(&[0.3, -500.0, f32::INFINITY, f32::NAN], &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0xFE, 0x7E, 0x7F]); // 0.3125, -448, 448, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_f32_saturating<T>(f32, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// Converts each element with [`Fp8::from_f64`]: to nearest, ties to even, rounded once; one element at a time on every path.
    /// Overflow and infinity give NaN (E4M3) or infinity (E5M2), NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let above_tie = (1.0 + f64::EPSILON) / 1024.0; // rounded to f32 it would be the tie, and give 0
    /// let mut codes = [E4M3::ZERO; 3];
    /// slice::from_f64(&[0.3, above_tie, -1e300], &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0x01, 0xFF]); // 0.3125, 2⁻⁹, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_f64<T>(f64, T) = |codec, op, src, dst| codec.encode_f64(op, src, dst, T::from_f64);
    /// Converts each element with [`Fp8::from_f64_saturating`]: to nearest, ties to even, rounded once; one element at a time on
    /// every path. Overflow and infinity give the largest finite value, NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut codes = [E4M3::ZERO; 3];
    /// slice::from_f64_saturating(&[0.3, -1e300, f64::NAN], &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0xFE, 0x7F]); // 0.3125, -448, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_f64_saturating<T>(f64, T) = |codec, op, src, dst| codec.encode_f64(op, src, dst, T::from_f64_saturating);
    /// Converts each element with [`Fp8::from_f16`]: to nearest, ties to even. Overflow and infinity give NaN (E4M3) or infinity (E5M2),
    /// NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut codes = [E4M3::ZERO; 2];
    /// slice::from_f16(&[0.3, -500.0].map(half::f16::from_f32), &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0xFF]); // 0.3125, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_f16<T>(f16, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// Converts each element with [`Fp8::from_f16_saturating`]: to nearest, ties to even. Overflow and infinity give the largest finite
    /// value, NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut codes = [E4M3::ZERO; 2];
    /// slice::from_f16_saturating(&[0.3, -500.0].map(half::f16::from_f32), &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0xFE]); // 0.3125, -448
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_f16_saturating<T>(f16, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// Converts each element with [`Fp8::from_bf16`]: to nearest, ties to even. Overflow and infinity give NaN (E4M3) or infinity (E5M2),
    /// NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut codes = [E4M3::ZERO; 2];
    /// slice::from_bf16(&[0.3, -500.0].map(half::bf16::from_f32), &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0xFF]); // 0.3125, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_bf16<T>(bf16, T) = |codec, op, src, dst| codec.encode(op, src, dst);
    /// Converts each element with [`Fp8::from_bf16_saturating`]: to nearest, ties to even. Overflow and infinity give the largest finite
    /// value, NaN gives 0x7F. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut codes = [E4M3::ZERO; 2];
    /// slice::from_bf16_saturating(&[0.3, -500.0].map(half::bf16::from_f32), &mut codes)?;
    /// assert_eq!(codes.map(E4M3::to_bits), [0x2A, 0xFE]); // 0.3125, -448
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    from_bf16_saturating<T>(bf16, T) = |codec, op, src, dst| codec.encode_saturating(op, src, dst);
    /// Converts each element with [`Fp8::to_f32`]: exact, nothing is rounded or saturated; NaN becomes the canonical one. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut x = [0.0_f32; 3];
    /// slice::to_f32(&[0x2A, 0xFE, 0xFF].map(E4M3::from_bits), &mut x)?;
    /// assert_eq!(x[..2], [0.3125, -448.0]);
    /// assert_eq!(x[2].to_bits(), 0x7FFF_FFFF); // NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    to_f32<T>(T, f32) = |codec, op, src, dst| codec.decode(op, src, dst);
    /// Converts each element with [`Fp8::to_f64`]: exact, nothing is rounded or saturated; NaN becomes the canonical one; one element at a
    /// time on every path. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut x = [0.0_f64; 3];
    /// slice::to_f64(&[0x2A, 0xFE, 0xFF].map(E4M3::from_bits), &mut x)?;
    /// assert_eq!(x[..2], [0.3125, -448.0]);
    /// assert_eq!(x[2].to_bits(), 0x7FFF_FFFF_FFFF_FFFF); // NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    to_f64<T>(T, f64) = |codec, op, src, dst| codec.decode_f64(op, src, dst);
    /// Converts each element with [`Fp8::to_f16`]: exact, nothing is rounded or saturated; NaN becomes the canonical one. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut x = [half::f16::ZERO; 3];
    /// slice::to_f16(&[0x2A, 0xFE, 0xFF].map(E4M3::from_bits), &mut x)?;
    /// assert_eq!(x.map(half::f16::to_bits), [0x3500, 0xDF00, 0x7FFF]); // 0.3125, -448, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    to_f16<T>(T, f16) = |codec, op, src, dst| codec.decode(op, src, dst);
    /// Converts each element with [`Fp8::to_bf16`]: exact, nothing is rounded or saturated; NaN becomes the canonical one. O(n).
    ///
    /// ```
    /// use fp8_format::{E4M3, slice};
    ///
    /// let mut x = [half::bf16::ZERO; 3];
    /// slice::to_bf16(&[0x2A, 0xFE, 0xFF].map(E4M3::from_bits), &mut x)?;
    /// assert_eq!(x.map(half::bf16::to_bits), [0x3EA0, 0xC3E0, 0x7FFF]); // 0.3125, -448, NaN
    /// # Ok::<(), fp8_format::Error>(())
    /// ```
    to_bf16<T>(T, bf16) = |codec, op, src, dst| codec.decode(op, src, dst);
}
