//! The interface that both types share: conversions, classification, sign, comparison. One macro
//! implements it; each type's file calls the macro.

macro_rules! impl_number {
    ($fp8:ident, $format:expr, $overflow:literal) => {
        impl $fp8 {
            /// 0.
            pub const ZERO: Self = Self(0x00);
            /// −0.
            pub const NEG_ZERO: Self = Self(0x80);
            /// The canonical NaN, 0x7F. Every NaN input is encoded as this code.
            pub const NAN: Self = Self($crate::codec::NAN);
            /// The base of the exponent.
            pub const RADIX: u32 = 2;

            /// Returns the value with these bits. All 256 patterns are valid.
            #[must_use]
            #[inline]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// Returns the bits.
            #[must_use]
            #[inline]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Returns the nearest value, ties to even, rounded once.
            #[doc = concat!("Overflow and infinity give ", $overflow, ". NaN gives 0x7F.")]
            #[must_use]
            #[inline]
            pub const fn from_f32(x: f32) -> Self {
                Self($format.encode_f32(x, $format.overflow))
            }

            /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give the largest finite value with
            /// the sign of `x`, as CUDA's `satfinite` conversion does. NaN gives 0x7F.
            #[must_use]
            #[inline]
            pub const fn from_f32_saturating(x: f32) -> Self {
                Self($format.encode_f32(x, $format.max))
            }

            /// Rounds `x` stochastically: to one of its two neighbours, chosen by the random number `r`. Overflow and infinity
            /// give the largest finite value, NaN gives 0x7F.
            ///
            /// With F the distance to the neighbour nearer zero in ulps of the result, truncated to 0.32 fixed point, the
            /// magnitude is rounded up if `F + r ≥ 2³²`. A representable value is never changed, and over uniform `r` the
            /// mean of the result is `x`, except for the truncated bits.
            #[must_use]
            #[inline]
            pub const fn from_f32_stochastic(x: f32, r: u32) -> Self {
                Self($format.encode_f32_stochastic(x, r))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32`] for a double, rounded once: never by way of f32.")]
            #[must_use]
            #[inline]
            pub const fn from_f64(x: f64) -> Self {
                Self($format.encode_f64(x, $format.overflow))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32_saturating`] for a double, rounded once.")]
            #[must_use]
            #[inline]
            pub const fn from_f64_saturating(x: f64) -> Self {
                Self($format.encode_f64(x, $format.max))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32_stochastic`] for a double.")]
            #[must_use]
            #[inline]
            pub const fn from_f64_stochastic(x: f64, r: u32) -> Self {
                Self($format.encode_f64_stochastic(x, r))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32`] for an f16.")]
            #[must_use]
            #[inline]
            pub const fn from_f16(x: half::f16) -> Self {
                Self::from_f32($crate::codec::f16_to_f32(x.to_bits()))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32_saturating`] for an f16.")]
            #[must_use]
            #[inline]
            pub const fn from_f16_saturating(x: half::f16) -> Self {
                Self::from_f32_saturating($crate::codec::f16_to_f32(x.to_bits()))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32_stochastic`] for an f16.")]
            #[must_use]
            #[inline]
            pub const fn from_f16_stochastic(x: half::f16, r: u32) -> Self {
                Self::from_f32_stochastic($crate::codec::f16_to_f32(x.to_bits()), r)
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32`] for a bf16.")]
            #[must_use]
            #[inline]
            pub const fn from_bf16(x: half::bf16) -> Self {
                Self::from_f32($crate::codec::bf16_to_f32(x.to_bits()))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32_saturating`] for a bf16.")]
            #[must_use]
            #[inline]
            pub const fn from_bf16_saturating(x: half::bf16) -> Self {
                Self::from_f32_saturating($crate::codec::bf16_to_f32(x.to_bits()))
            }

            #[doc = concat!("[`", stringify!($fp8), "::from_f32_stochastic`] for a bf16.")]
            #[must_use]
            #[inline]
            pub const fn from_bf16_stochastic(x: half::bf16, r: u32) -> Self {
                Self::from_f32_stochastic($crate::codec::bf16_to_f32(x.to_bits()), r)
            }

            /// Returns the value, which is exact. NaN gives 0x7FFF_FFFF, whatever its sign and payload.
            #[must_use]
            #[inline]
            pub const fn to_f32(self) -> f32 {
                $format.decode_f32(self.0)
            }

            /// Returns the value, which is exact. NaN gives 0x7FFF_FFFF_FFFF_FFFF.
            #[must_use]
            #[inline]
            pub const fn to_f64(self) -> f64 {
                $format.decode_f64(self.0)
            }

            /// Returns the value, which is exact. NaN gives 0x7FFF.
            #[must_use]
            #[inline]
            pub const fn to_f16(self) -> half::f16 {
                half::f16::from_bits($format.decode_f16(self.0))
            }

            /// Returns the value, which is exact. NaN gives 0x7FFF.
            #[must_use]
            #[inline]
            pub const fn to_bf16(self) -> half::bf16 {
                half::bf16::from_bits($format.decode_bf16(self.0))
            }

            /// Returns true if this is NaN.
            #[must_use]
            #[inline]
            pub const fn is_nan(self) -> bool {
                $format.is_nan(self.0)
            }

            /// Returns true if this is an infinity. In E4M3, which has none, always false.
            #[must_use]
            #[inline]
            pub const fn is_infinite(self) -> bool {
                !self.is_finite() && !self.is_nan()
            }

            /// Returns true if this is a number: neither NaN nor infinite.
            #[must_use]
            #[inline]
            pub const fn is_finite(self) -> bool {
                self.0 & 0x7F <= $format.max
            }

            /// Returns true if this is a number with a full significand: not zero, subnormal, infinite or NaN.
            #[must_use]
            #[inline]
            pub const fn is_normal(self) -> bool {
                self.is_finite() && self.0 & 0x7F >= Self::MIN_POSITIVE.0
            }

            /// Returns true if this is below the smallest normal value, and not zero.
            #[must_use]
            #[inline]
            pub const fn is_subnormal(self) -> bool {
                !self.is_zero() && self.0 & 0x7F < Self::MIN_POSITIVE.0
            }

            /// Returns true if this is zero, of either sign.
            #[must_use]
            #[inline]
            pub const fn is_zero(self) -> bool {
                self.0 & 0x7F == 0
            }

            /// Returns the category of the value.
            #[must_use]
            pub const fn classify(self) -> core::num::FpCategory {
                if self.is_nan() {
                    core::num::FpCategory::Nan
                } else if self.is_infinite() {
                    core::num::FpCategory::Infinite
                } else if self.is_zero() {
                    core::num::FpCategory::Zero
                } else if self.is_subnormal() {
                    core::num::FpCategory::Subnormal
                } else {
                    core::num::FpCategory::Normal
                }
            }

            /// Returns true if the sign bit is clear, NaN included.
            #[must_use]
            #[inline]
            pub const fn is_sign_positive(self) -> bool {
                self.0 & 0x80 == 0
            }

            /// Returns true if the sign bit is set, NaN included.
            #[must_use]
            #[inline]
            pub const fn is_sign_negative(self) -> bool {
                self.0 & 0x80 != 0
            }

            /// Returns 1 or −1, by the sign bit. NaN stays NaN.
            #[must_use]
            #[inline]
            pub const fn signum(self) -> Self {
                if self.is_nan() { self } else { Self::ONE.copysign(self) }
            }

            /// Returns the magnitude of this value with the sign of `sign`.
            #[must_use]
            #[inline]
            pub const fn copysign(self, sign: Self) -> Self {
                Self(self.0 & 0x7F | sign.0 & 0x80)
            }

            /// Returns this value with the sign bit cleared.
            #[must_use]
            #[inline]
            pub const fn abs(self) -> Self {
                Self(self.0 & 0x7F)
            }

            /// Returns the larger of two values. If one is NaN, returns the other.
            #[must_use]
            #[inline]
            pub fn max(self, other: Self) -> Self {
                if self.is_nan() || other > self { other } else { self }
            }

            /// Returns the smaller of two values. If one is NaN, returns the other.
            #[must_use]
            #[inline]
            pub fn min(self, other: Self) -> Self {
                if self.is_nan() || other < self { other } else { self }
            }

            /// Restricts the value to `min..=max`. NaN stays NaN; a NaN bound has no effect. Unlike `f32::clamp` this never
            /// panics: if `min > max`, the result is `max`.
            #[must_use]
            #[inline]
            pub fn clamp(self, min: Self, max: Self) -> Self {
                let raised = if self < min { min } else { self };
                if raised > max { max } else { raised }
            }

            /// Compares by IEEE 754's total order: −NaN, −∞ or −MAX, …, −0, 0, …, MAX, ∞, NaN.
            #[must_use]
            #[inline]
            pub const fn total_cmp(&self, other: &Self) -> core::cmp::Ordering {
                /// Positive codes above the negative ones, and those in reverse.
                const fn rank(code: u8) -> u8 {
                    if code & 0x80 == 0 { code | 0x80 } else { !code }
                }
                let (a, b) = (rank(self.0), rank(other.0));
                if a < b {
                    core::cmp::Ordering::Less
                } else if a > b {
                    core::cmp::Ordering::Greater
                } else {
                    core::cmp::Ordering::Equal
                }
            }
        }

        impl_number!(consts $fp8 {
            /// Euler's number.
            E,
            /// π.
            PI,
            /// 1/π.
            FRAC_1_PI,
            /// 1/√2.
            FRAC_1_SQRT_2,
            /// 2/π.
            FRAC_2_PI,
            /// 2/√π.
            FRAC_2_SQRT_PI,
            /// π/2.
            FRAC_PI_2,
            /// π/3.
            FRAC_PI_3,
            /// π/4.
            FRAC_PI_4,
            /// π/6.
            FRAC_PI_6,
            /// π/8.
            FRAC_PI_8,
            /// ln 10.
            LN_10,
            /// ln 2.
            LN_2,
            /// log₁₀ e.
            LOG10_E,
            /// log₁₀ 2.
            LOG10_2,
            /// log₂ e.
            LOG2_E,
            /// log₂ 10.
            LOG2_10,
            /// √2.
            SQRT_2,
        });

        impl PartialEq for $fp8 {
            #[inline]
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $fp8 {
            #[inline]
            fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl_number!(from $fp8 {
            f32: to_f32, f64: to_f64, half::f16: to_f16, half::bf16: to_bf16
        });
    };
    (consts $fp8:ident { $(#[doc = $doc:literal] $name:ident,)* }) => {
        impl $fp8 {
            $(
                #[doc = concat!($doc, " Rounded to nearest.")]
                pub const $name: Self = Self::from_f64(core::f64::consts::$name);
            )*
        }

        #[cfg(feature = "num-traits")]
        impl num_traits::FloatConst for $fp8 {
            $(
                #[inline]
                fn $name() -> Self {
                    Self::$name
                }
            )*
        }
    };
    (from $fp8:ident { $($ty:ty: $to:ident),* }) => {$(
        impl From<$fp8> for $ty {
            /// Exact.
            #[inline]
            fn from(x: $fp8) -> $ty {
                x.$to()
            }
        }
    )*};
}
