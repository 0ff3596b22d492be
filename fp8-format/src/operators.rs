//! Arithmetic and text, for both types. Arithmetic is done in f32 and rounded back without saturation.
//!
//! The result is the correctly rounded one: the significands have 4 and 3 bits, f32 has 24, and a second rounding is
//! harmless once the first keeps 2p + 2 bits.

macro_rules! impl_operators {
    ($fp8:ident) => {
        impl_operators!(binary $fp8 {
            Add add AddAssign add_assign,
            Sub sub SubAssign sub_assign,
            Mul mul MulAssign mul_assign,
            Div div DivAssign div_assign,
            Rem rem RemAssign rem_assign,
        });

        impl core::ops::Neg for $fp8 {
            type Output = Self;
            #[inline]
            fn neg(self) -> Self {
                Self::from_bits(self.to_bits() ^ 0x80)
            }
        }

        impl core::ops::Neg for &$fp8 {
            type Output = $fp8;
            #[inline]
            fn neg(self) -> $fp8 {
                -*self
            }
        }

        impl core::iter::Sum for $fp8 {
            /// Adds in f32 and rounds once, at the end.
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                Self::from_f32(iter.map(Self::to_f32).sum())
            }
        }

        impl<'a> core::iter::Sum<&'a $fp8> for $fp8 {
            /// Adds in f32 and rounds once, at the end.
            fn sum<I: Iterator<Item = &'a Self>>(iter: I) -> Self {
                iter.copied().sum()
            }
        }

        impl core::iter::Product for $fp8 {
            /// Multiplies in f32 and rounds once, at the end.
            fn product<I: Iterator<Item = Self>>(iter: I) -> Self {
                Self::from_f32(iter.map(Self::to_f32).product())
            }
        }

        impl<'a> core::iter::Product<&'a $fp8> for $fp8 {
            /// Multiplies in f32 and rounds once, at the end.
            fn product<I: Iterator<Item = &'a Self>>(iter: I) -> Self {
                iter.copied().product()
            }
        }

        impl core::str::FromStr for $fp8 {
            type Err = $crate::Error;

            /// Reads what `f64` reads, rounded to nearest without saturation. The text is rounded to f64 first; only
            /// a decimal within half an f64 ulp of the middle between two values could come out one code off.
            fn from_str(s: &str) -> $crate::Result<Self> {
                let parsed = s.parse().map(Self::from_f64);
                parsed.map_err(|source| $crate::Error::Parse { encoding: $crate::Encoding::$fp8, source })
            }
        }

        impl_operators!(format $fp8 to_f32 { Display, Debug, LowerExp, UpperExp });
        impl_operators!(format $fp8 to_bits { LowerHex, UpperHex, Binary, Octal });
    };
    (binary $fp8:ident { $($op:ident $f:ident $op_assign:ident $f_assign:ident,)* }) => {$(
        impl core::ops::$op for $fp8 {
            type Output = Self;
            #[inline]
            fn $f(self, rhs: Self) -> Self {
                Self::from_f32(core::ops::$op::$f(self.to_f32(), rhs.to_f32()))
            }
        }

        impl core::ops::$op<&$fp8> for $fp8 {
            type Output = Self;
            #[inline]
            fn $f(self, rhs: &Self) -> Self {
                core::ops::$op::$f(self, *rhs)
            }
        }

        impl core::ops::$op<$fp8> for &$fp8 {
            type Output = $fp8;
            #[inline]
            fn $f(self, rhs: $fp8) -> $fp8 {
                core::ops::$op::$f(*self, rhs)
            }
        }

        impl core::ops::$op<&$fp8> for &$fp8 {
            type Output = $fp8;
            #[inline]
            fn $f(self, rhs: &$fp8) -> $fp8 {
                core::ops::$op::$f(*self, *rhs)
            }
        }

        impl core::ops::$op_assign for $fp8 {
            #[inline]
            fn $f_assign(&mut self, rhs: Self) {
                *self = core::ops::$op::$f(*self, rhs);
            }
        }

        impl core::ops::$op_assign<&$fp8> for $fp8 {
            #[inline]
            fn $f_assign(&mut self, rhs: &Self) {
                *self = core::ops::$op::$f(*self, *rhs);
            }
        }
    )*};
    (format $fp8:ident $value:ident { $($style:ident),* }) => {$(
        impl core::fmt::$style for $fp8 {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::$style::fmt(&self.$value(), f)
            }
        }
    )*};
}
