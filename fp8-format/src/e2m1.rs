//! The type [`E2M1`]: an element of NVFP4.

use crate::codec::{self, bf16_to_f32, f16_to_f32};
use crate::{Error, Result};
use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use half::{bf16, f16};

/// 4-bit float with 2 exponent bits and 1 mantissa bit: an element of NVFP4 and of MXFP4.
///
/// Its values are ±0, 0.5, 1, 1.5, 2, 3, 4 and 6: there is no infinity and no NaN. Every conversion saturates, and NaN becomes
/// +6, whatever its sign, as PTX's `cvt.rn.satfinite.e2m1x2` has it. In memory it is a `u8` whose high half is 0;
/// [`pack`](Self::pack) puts two of them into a byte, as matrices keep them. It is not an [`Fp8`](crate::Fp8).
///
/// Without a NaN it is `Eq`, `Ord` and `Hash`, by value: −0 equals 0.
///
/// ```
/// use fp8_format::E2M1;
///
/// assert_eq!(E2M1::from_f32(2.6).to_f32(), 3.0); // spacing is 1 in [2, 4)
/// assert_eq!(E2M1::from_f32(2.5).to_f32(), 2.0); // a tie, and the code of 2 is even
/// assert_eq!(E2M1::from_f32(-100.0), E2M1::MIN);
/// assert_eq!(E2M1::from_f32_stochastic(2.25, 191).to_f32(), 2.0); // r decides between 2 and 3
/// assert_eq!(E2M1::from_f32_stochastic(2.25, 192).to_f32(), 3.0);
/// assert_eq!(E2M1::pack(E2M1::ONE, E2M1::MAX), 0x72); // the first is the low half
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
#[cfg_attr(feature = "bytemuck", derive(bytemuck::Zeroable, bytemuck::NoUninit))]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u8", into = "u8"))]
#[cfg_attr(feature = "zerocopy", derive(zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::Unaligned))]
pub struct E2M1(u8);

/// The bits of a code.
const CODE: u8 = 0x0F;
/// The bit of the sign.
const SIGN: u8 = 0x08;

impl E2M1 {
    /// 0.
    pub const ZERO: Self = Self(0x0);
    /// −0.
    pub const NEG_ZERO: Self = Self(0x8);
    /// Largest value, 6.
    pub const MAX: Self = Self(0x7);
    /// Smallest value, −6.
    pub const MIN: Self = Self(0xF);
    /// Smallest positive normal value, 1.
    pub const MIN_POSITIVE: Self = Self(0x2);
    /// Smallest positive value and only subnormal one, 0.5.
    pub const MIN_POSITIVE_SUBNORMAL: Self = Self(0x1);
    /// Gap between 1 and the next value, 0.5.
    pub const EPSILON: Self = Self(0x1);
    /// 1.
    pub const ONE: Self = Self(0x2);
    /// −1.
    pub const NEG_ONE: Self = Self(0xA);

    /// Significand bits, the implicit one included.
    pub const MANTISSA_DIGITS: u32 = 2;
    /// The base of the exponent.
    pub const RADIX: u32 = 2;
    /// `MAX < 2^MAX_EXP`, as in C.
    pub const MAX_EXP: i32 = 3;
    /// `MIN_POSITIVE = 2^(MIN_EXP - 1)`, as in C.
    pub const MIN_EXP: i32 = 1;

    /// Returns the value with this code, of which the low four bits count.
    #[must_use]
    #[inline]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & CODE)
    }

    /// Returns the code, 0 to 15.
    #[must_use]
    #[inline]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Puts two codes into a byte: `first` is its low half.
    #[must_use]
    #[inline]
    pub const fn pack(first: Self, second: Self) -> u8 {
        first.0 | second.0 << 4
    }

    /// Returns the two codes of a byte, that of its low half first. All 256 bytes are valid.
    #[must_use]
    #[inline]
    pub const fn unpack(byte: u8) -> [Self; 2] {
        [Self(byte & CODE), Self(byte >> 4)]
    }

    #[inline(always)]
    const fn of_byte(byte: u8) -> Self {
        Self(codec::packed(byte))
    }

    /// Returns the nearest value, ties to even, rounded once. Overflow and infinity give ±6; NaN gives +6.
    #[must_use]
    #[inline]
    pub const fn from_f32(x: f32) -> Self {
        Self::of_byte(codec::E2M1.encode_f32(x, codec::E2M1.max))
    }

    /// Rounds `x` stochastically: to one of its two neighbours, chosen by the random number `r`. Overflow and infinity give ±6,
    /// NaN gives +6.
    ///
    /// With F the distance to the neighbour nearer zero in steps between them, the magnitude is rounded up if `⌊256 · F⌋ + r ≥
    /// 256`. A representable value is never changed. Over uniform `r` the mean of the result is `x`, but for the truncation: it is
    /// 1/512 of a step nearer zero on average.
    #[must_use]
    #[inline]
    pub const fn from_f32_stochastic(x: f32, r: u8) -> Self {
        Self::of_byte(codec::E2M1.encode_f32_stochastic(x, (r as u32) << 24))
    }

    /// [`E2M1::from_f32`] for a double, rounded once: never by way of f32.
    #[must_use]
    #[inline]
    pub const fn from_f64(x: f64) -> Self {
        Self::of_byte(codec::E2M1.encode_f64(x, codec::E2M1.max))
    }

    /// [`E2M1::from_f32_stochastic`] for a double.
    #[must_use]
    #[inline]
    pub const fn from_f64_stochastic(x: f64, r: u8) -> Self {
        Self::of_byte(codec::E2M1.encode_f64_stochastic(x, (r as u32) << 24))
    }

    /// [`E2M1::from_f32`] for an f16.
    #[must_use]
    #[inline]
    pub const fn from_f16(x: f16) -> Self {
        Self::from_f32(f16_to_f32(x.to_bits()))
    }

    /// [`E2M1::from_f32_stochastic`] for an f16.
    #[must_use]
    #[inline]
    pub const fn from_f16_stochastic(x: f16, r: u8) -> Self {
        Self::from_f32_stochastic(f16_to_f32(x.to_bits()), r)
    }

    /// [`E2M1::from_f32`] for a bf16.
    #[must_use]
    #[inline]
    pub const fn from_bf16(x: bf16) -> Self {
        Self::from_f32(bf16_to_f32(x.to_bits()))
    }

    /// [`E2M1::from_f32_stochastic`] for a bf16.
    #[must_use]
    #[inline]
    pub const fn from_bf16_stochastic(x: bf16, r: u8) -> Self {
        Self::from_f32_stochastic(bf16_to_f32(x.to_bits()), r)
    }

    /// Returns the value, which is exact.
    #[must_use]
    #[inline]
    pub const fn to_f32(self) -> f32 {
        codec::E2M1.decode_f32(codec::unpacked(self.0))
    }

    /// Returns the value, which is exact.
    #[must_use]
    #[inline]
    pub const fn to_f64(self) -> f64 {
        self.to_f32() as f64
    }

    /// Returns the value, which is exact.
    #[must_use]
    #[inline]
    pub const fn to_f16(self) -> f16 {
        f16::from_bits(codec::E2M1.decode_f16(codec::unpacked(self.0)))
    }

    /// Returns the value, which is exact.
    #[must_use]
    #[inline]
    pub const fn to_bf16(self) -> bf16 {
        bf16::from_bits(codec::low_half(self.to_f32().to_bits() >> 16))
    }

    /// Returns true if this is zero, of either sign.
    #[must_use]
    #[inline]
    pub const fn is_zero(self) -> bool {
        self.0 & !SIGN == 0
    }

    /// Returns true if this is ±0.5.
    #[must_use]
    #[inline]
    pub const fn is_subnormal(self) -> bool {
        self.0 & !SIGN == Self::MIN_POSITIVE_SUBNORMAL.0
    }

    /// Returns true if this is 1 or more in magnitude.
    #[must_use]
    #[inline]
    pub const fn is_normal(self) -> bool {
        self.0 & !SIGN >= Self::MIN_POSITIVE.0
    }

    /// Returns true if the sign bit is clear.
    #[must_use]
    #[inline]
    pub const fn is_sign_positive(self) -> bool {
        self.0 & SIGN == 0
    }

    /// Returns true if the sign bit is set.
    #[must_use]
    #[inline]
    pub const fn is_sign_negative(self) -> bool {
        self.0 & SIGN != 0
    }

    /// Returns this value with the sign bit cleared.
    #[must_use]
    #[inline]
    pub const fn abs(self) -> Self {
        Self(self.0 & !SIGN)
    }

    /// Returns the magnitude of this value with the sign of `sign`.
    #[must_use]
    #[inline]
    pub const fn copysign(self, sign: Self) -> Self {
        Self(self.0 & !SIGN | sign.0 & SIGN)
    }

    /// The place among the values in order: both zeros have the same.
    #[expect(clippy::cast_possible_wrap, reason = "codes are below 16")]
    #[inline]
    const fn rank(self) -> i8 {
        let magnitude = (self.0 & !SIGN) as i8;
        if self.is_sign_negative() { -magnitude } else { magnitude }
    }
}

impl PartialEq for E2M1 {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl Eq for E2M1 {}

impl PartialOrd for E2M1 {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for E2M1 {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl Hash for E2M1 {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.rank().hash(state);
    }
}

impl core::ops::Neg for E2M1 {
    type Output = Self;
    #[inline]
    fn neg(self) -> Self {
        Self(self.0 ^ SIGN)
    }
}

impl core::ops::Neg for &E2M1 {
    type Output = E2M1;
    #[inline]
    fn neg(self) -> E2M1 {
        -*self
    }
}

impl From<E2M1> for u8 {
    /// The code, 0 to 15.
    #[inline]
    fn from(x: E2M1) -> Self {
        x.0
    }
}

impl TryFrom<u8> for E2M1 {
    type Error = Error;

    /// The value with this code; an error above 15. [`E2M1::from_bits`] leaves the high bits out instead.
    #[inline]
    fn try_from(code: u8) -> Result<Self> {
        if code <= CODE { Ok(Self(code)) } else { Err(Error::CodeE2M1 { code }) }
    }
}

impl core::str::FromStr for E2M1 {
    type Err = Error;

    /// Reads what `f64` reads, rounded to nearest; NaN gives 6. The text is rounded to f64 first; only a decimal within half an
    /// f64 ulp of the middle between two values could come out one code off.
    fn from_str(s: &str) -> Result<Self> {
        s.parse().map(Self::from_f64).map_err(|source| Error::ParseE2M1 { source })
    }
}

macro_rules! from {
    ($($ty:ty: $to:ident),*) => {$(
        impl From<E2M1> for $ty {
            /// Exact.
            #[inline]
            fn from(x: E2M1) -> $ty {
                x.$to()
            }
        }
    )*};
}

from!(f32: to_f32, f64: to_f64, f16: to_f16, bf16: to_bf16);

macro_rules! format {
    ($value:ident: $($style:ident),*) => {$(
        impl fmt::$style for E2M1 {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::$style::fmt(&self.$value(), f)
            }
        }
    )*};
}

format!(to_f32: Display, Debug, LowerExp, UpperExp);
format!(to_bits: LowerHex, UpperHex, Binary, Octal);
