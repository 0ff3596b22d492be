//! `Fp8` and `Source`: code generic over the encoding, and over what is converted.

use crate::{E4M3, E5M2, Encoding, codec};
use core::fmt::Debug;
use half::{bf16, f16};

#[expect(unnameable_types, reason = "what cannot be named cannot be implemented: this seals Fp8 and Source")]
mod sealed {
    pub trait Sealed {}

    /// `bytemuck::Pod` where that feature is on, else nothing.
    #[cfg(feature = "bytemuck")]
    pub trait Plain: bytemuck::Pod {}
    #[cfg(feature = "bytemuck")]
    impl<T: bytemuck::Pod> Plain for T {}

    #[cfg(not(feature = "bytemuck"))]
    pub trait Plain {}
    #[cfg(not(feature = "bytemuck"))]
    impl<T> Plain for T {}

    /// The type of a source, as a value for code that treats the three types differently.
    #[derive(Clone, Copy, Debug)]
    pub enum Kind {
        F32,
        F16,
        BF16,
    }

    pub trait Wide {
        const KIND: Kind;

        /// The element with these bits, the last 16 of them where it has no more.
        fn of_bits(bits: u32) -> Self;
    }
}

pub(crate) use sealed::Kind;

/// The interface that [`E4M3`] and [`E5M2`] share, for code generic over the format. Sealed.
///
/// With feature `bytemuck`, `T: Fp8` implies `T: bytemuck::Pod`.
///
/// ```
/// use fp8_format::{E4M3, E5M2, Fp8};
///
/// fn rounding_error<T: Fp8>(x: f32) -> f32 {
///     (T::from_f32_saturating(x).to_f32() - x).abs()
/// }
/// assert_eq!(rounding_error::<E4M3>(3.375), 0.125); // 3.5; the tie goes to the even code
/// assert_eq!(rounding_error::<E5M2>(3.375), 0.125); // 3.5
/// assert_eq!(rounding_error::<E4M3>(3.25), 0.0);
/// assert_eq!(rounding_error::<E5M2>(3.25), 0.25); // 3.0
/// ```
pub trait Fp8:
    Copy + Debug + Default + PartialEq + PartialOrd + Send + Sync + sealed::Sealed + sealed::Plain + 'static
{
    /// The run-time tag of this type.
    const ENCODING: Encoding;
    /// The largest finite value, as an f32: 448 or 57344.
    const MAX: f32;
    /// The canonical NaN, 0x7F.
    const NAN: Self;

    /// Returns the value with this code.
    fn from_bits(bits: u8) -> Self;
    /// Returns the code of this value.
    fn to_bits(self) -> u8;
    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give NaN with the sign of `x` (E4M3) or infinity
    /// (E5M2); NaN gives 0x7F. O(1).
    fn from_f32(x: f32) -> Self;
    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give the largest finite value with the sign of `x`;
    /// NaN gives 0x7F. O(1).
    fn from_f32_saturating(x: f32) -> Self;
    /// Rounds stochastically to one of the two neighbours. With F the discarded fraction of an ulp in 0.32 fixed point, the
    /// magnitude is rounded up if F + `r` ≥ 2³²; a tie is rounded up for half of all `r`. Overflow and infinity give the largest
    /// finite value with the sign of `x`; NaN gives 0x7F. O(1).
    fn from_f32_stochastic(x: f32, r: u32) -> Self;
    /// Returns the nearest value, ties to even, rounded once from the double, not through f32. Overflow and infinity give NaN with
    /// the sign of `x` (E4M3) or infinity (E5M2); NaN gives 0x7F. O(1).
    fn from_f64(x: f64) -> Self;
    /// Returns the nearest value, ties to even, rounded once from the double, not through f32. Overflow and infinity give the largest
    /// finite value with the sign of `x`; NaN gives 0x7F. O(1).
    fn from_f64_saturating(x: f64) -> Self;
    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give NaN with the sign of `x` (E4M3) or infinity
    /// (E5M2); NaN gives 0x7F. O(1).
    fn from_f16(x: f16) -> Self;
    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give the largest finite value with the sign of `x`;
    /// NaN gives 0x7F. O(1).
    fn from_f16_saturating(x: f16) -> Self;
    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give NaN with the sign of `x` (E4M3) or infinity
    /// (E5M2); NaN gives 0x7F. O(1).
    fn from_bf16(x: bf16) -> Self;
    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give the largest finite value with the sign of `x`;
    /// NaN gives 0x7F. O(1).
    fn from_bf16_saturating(x: bf16) -> Self;
    /// Returns the value, which is exact. NaN gives 0x7FFF_FFFF. O(1).
    fn to_f32(self) -> f32;
    /// Returns the value, which is exact. NaN gives 0x7FFF_FFFF_FFFF_FFFF. O(1).
    fn to_f64(self) -> f64;
    /// Returns the value, which is exact. NaN gives 0x7FFF. O(1).
    fn to_f16(self) -> f16;
    /// Returns the value, which is exact. NaN gives 0x7FFF. O(1).
    fn to_bf16(self) -> bf16;
    /// Returns true if this is NaN.
    fn is_nan(self) -> bool;
    /// Returns true if this is neither NaN nor infinite.
    fn is_finite(self) -> bool;
}

macro_rules! delegate {
    ($fp8:ident { $(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }) => {
        impl sealed::Sealed for $fp8 {}
        impl Fp8 for $fp8 {
            const ENCODING: Encoding = Encoding::$fp8;
            const MAX: f32 = Encoding::$fp8.max();
            const NAN: Self = $fp8::NAN;
            #[inline(always)]
            fn to_bits(self) -> u8 {
                $fp8::to_bits(self)
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $fp8::to_f32(self)
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                $fp8::to_f64(self)
            }
            #[inline(always)]
            fn to_f16(self) -> f16 {
                $fp8::to_f16(self)
            }
            #[inline(always)]
            fn to_bf16(self) -> bf16 {
                $fp8::to_bf16(self)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                $fp8::is_nan(self)
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                $fp8::is_finite(self)
            }
            $(
                #[inline(always)]
                fn $name($($arg: $ty),*) -> $out {
                    $fp8::$name($($arg),*)
                }
            )*
        }
    };
    ($($fp8:ident),*) => {$(
        delegate!($fp8 {
            fn from_bits(bits: u8) -> Self;
            fn from_f32(x: f32) -> Self;
            fn from_f32_saturating(x: f32) -> Self;
            fn from_f32_stochastic(x: f32, r: u32) -> Self;
            fn from_f64(x: f64) -> Self;
            fn from_f64_saturating(x: f64) -> Self;
            fn from_f16(x: f16) -> Self;
            fn from_f16_saturating(x: f16) -> Self;
            fn from_bf16(x: bf16) -> Self;
            fn from_bf16_saturating(x: bf16) -> Self;
        });
    )*};
}

delegate!(E4M3, E5M2);

/// An element type that slices are quantized from and dequantized to: `f32`, [`half::f16`] or [`half::bf16`]. Sealed.
///
/// ```
/// use fp8_format::{E4M3, Fp8, Source};
///
/// fn quantized<S: Source>(x: S) -> f32 {
///     E4M3::from_f32_saturating(x.to_f32()).to_f32()
/// }
/// assert_eq!(quantized(3.3_f32), 3.25);
/// assert_eq!(quantized(half::bf16::from_f32(1e4)), 448.0);
/// ```
pub trait Source:
    Copy + Debug + Default + PartialEq + PartialOrd + Send + Sync + sealed::Sealed + sealed::Wide + 'static
{
    /// Returns the value, which is exact. NaN keeps its sign and payload. O(1).
    fn to_f32(self) -> f32;
    /// Returns the nearest value, ties to even. Overflow gives infinity. NaN stays NaN and keeps its sign and the upper bits of its
    /// payload, as in `half`. O(1).
    fn from_f32(x: f32) -> Self;
}

impl sealed::Sealed for f32 {}
impl sealed::Wide for f32 {
    const KIND: Kind = Kind::F32;

    #[inline(always)]
    fn of_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}
impl Source for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl sealed::Sealed for f16 {}
impl sealed::Wide for f16 {
    const KIND: Kind = Kind::F16;

    #[inline(always)]
    fn of_bits(bits: u32) -> Self {
        f16::from_bits(codec::low_half(bits))
    }
}
impl Source for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        codec::f16_to_f32(self.to_bits())
    }
    #[inline]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

impl sealed::Sealed for bf16 {}
impl sealed::Wide for bf16 {
    const KIND: Kind = Kind::BF16;

    #[inline(always)]
    fn of_bits(bits: u32) -> Self {
        bf16::from_bits(codec::low_half(bits))
    }
}
impl Source for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        codec::bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}
