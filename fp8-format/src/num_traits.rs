//! The traits of the `num-traits` crate (feature `num-traits`).
//!
//! Neither type has `Float` or `FloatCore`, which ask for an infinity that E4M3 does not have.

use crate::{E4M3, E5M2};
use half::{bf16, f16};
use num_traits::{AsPrimitive, Bounded, FromPrimitive, Num, NumCast, One, Signed, ToPrimitive, Zero};

macro_rules! impl_num_traits {
    ($fp8:ident) => {
        impl Bounded for $fp8 {
            /// The smallest finite value.
            #[inline]
            fn min_value() -> Self {
                Self::MIN
            }
            /// The largest finite value.
            #[inline]
            fn max_value() -> Self {
                Self::MAX
            }
        }

        impl Zero for $fp8 {
            #[inline]
            fn zero() -> Self {
                Self::ZERO
            }
            #[inline]
            fn is_zero(&self) -> bool {
                Self::is_zero(*self)
            }
        }

        impl One for $fp8 {
            #[inline]
            fn one() -> Self {
                Self::ONE
            }
        }

        impl Num for $fp8 {
            type FromStrRadixErr = <f64 as Num>::FromStrRadixErr;

            fn from_str_radix(s: &str, radix: u32) -> Result<Self, Self::FromStrRadixErr> {
                f64::from_str_radix(s, radix).map(Self::from_f64)
            }
        }

        impl Signed for $fp8 {
            #[inline]
            fn abs(&self) -> Self {
                Self::abs(*self)
            }
            fn abs_sub(&self, other: &Self) -> Self {
                if *self <= *other { Self::ZERO } else { *self - *other }
            }
            #[inline]
            fn signum(&self) -> Self {
                Self::signum(*self)
            }
            #[inline]
            fn is_positive(&self) -> bool {
                self.is_sign_positive()
            }
            #[inline]
            fn is_negative(&self) -> bool {
                self.is_sign_negative()
            }
        }

        impl ToPrimitive for $fp8 {
            #[inline]
            fn to_i64(&self) -> Option<i64> {
                Self::to_f32(*self).to_i64()
            }
            #[inline]
            fn to_u64(&self) -> Option<u64> {
                Self::to_f32(*self).to_u64()
            }
            #[inline]
            fn to_f32(&self) -> Option<f32> {
                Some(Self::to_f32(*self))
            }
            #[inline]
            fn to_f64(&self) -> Option<f64> {
                Some(Self::to_f64(*self))
            }
        }

        /// Rounds to nearest; a number out of range gives infinity where the type has one, else `None`.
        impl FromPrimitive for $fp8 {
            #[inline]
            fn from_i64(n: i64) -> Option<Self> {
                FromPrimitive::from_f64(n.to_f64()?)
            }
            #[inline]
            fn from_u64(n: u64) -> Option<Self> {
                FromPrimitive::from_f64(n.to_f64()?)
            }
            #[inline]
            fn from_f32(x: f32) -> Option<Self> {
                let y = Self::from_f32(x);
                (x.is_nan() || !y.is_nan()).then_some(y)
            }
            #[inline]
            fn from_f64(x: f64) -> Option<Self> {
                let y = Self::from_f64(x);
                (x.is_nan() || !y.is_nan()).then_some(y)
            }
        }

        impl NumCast for $fp8 {
            #[inline]
            fn from<T: ToPrimitive>(n: T) -> Option<Self> {
                FromPrimitive::from_f64(n.to_f64()?)
            }
        }

        impl_num_traits!(as $fp8: u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);
        impl_num_traits!(half $fp8: f16 to_f16 from_f16, bf16 to_bf16 from_bf16);

        impl AsPrimitive<$fp8> for $fp8 {
            #[inline]
            fn as_(self) -> $fp8 {
                self
            }
        }
    };
    (as $fp8:ident: $($ty:ident)*) => {$(
        /// As the language's `as`: towards zero and saturating for integers, exact for floats.
        impl AsPrimitive<$ty> for $fp8 {
            #[inline]
            fn as_(self) -> $ty {
                AsPrimitive::<$ty>::as_(self.to_f64())
            }
        }

        /// Rounds to nearest, without saturation. Beyond 2⁵³ an integer is out of every FP8 range anyway.
        impl AsPrimitive<$fp8> for $ty {
            #[inline]
            fn as_(self) -> $fp8 {
                $fp8::from_f64(AsPrimitive::<f64>::as_(self))
            }
        }
    )*};
    (half $fp8:ident: $($ty:ident $to:ident $from:ident),*) => {$(
        impl AsPrimitive<$ty> for $fp8 {
            #[inline]
            fn as_(self) -> $ty {
                self.$to()
            }
        }

        impl AsPrimitive<$fp8> for $ty {
            #[inline]
            fn as_(self) -> $fp8 {
                $fp8::$from(self)
            }
        }
    )*};
}

impl_num_traits!(E4M3);
impl_num_traits!(E5M2);

impl AsPrimitive<E5M2> for E4M3 {
    #[inline]
    fn as_(self) -> E5M2 {
        E5M2::from_f32(self.to_f32())
    }
}

impl AsPrimitive<E4M3> for E5M2 {
    #[inline]
    fn as_(self) -> E4M3 {
        E4M3::from_f32(self.to_f32())
    }
}
