//! The type [`E8M0`]: the scale of an MX block.

use crate::codec::{bf16_to_f32, f16_to_f32};
use crate::{Error, Result};
use core::cmp::Ordering;
use core::fmt;
use half::{bf16, f16};

/// 8-bit power of two, 2⁻¹²⁷ to 2¹²⁷: the scale of a block of 32 elements in MXFP8 (OCP MX 1.0).
///
/// The code is the exponent with a bias of 127. There is no sign, no zero and no infinity; 0xFF is NaN. The type is a `u8` in
/// memory. It is not an [`Fp8`](crate::Fp8): nothing is quantized to it but scales.
///
/// Like an `f32` it is neither `Eq`, `Ord` nor `Hash`, because NaN differs from itself; `to_bits` gives a key that is.
/// [`total_cmp`](Self::total_cmp) orders codes as their bits, with NaN last. The default is [`ONE`](Self::ONE).
///
/// ```
/// use fp8_format::E8M0;
///
/// let up = E8M0::from_f32_ceil(0.3);
/// assert_eq!((up.to_bits(), up.to_f32()), (126, 0.5));
/// assert_eq!(E8M0::from_f32_floor(0.3).to_f32(), 0.25);
/// assert_eq!((up.scale(), up.scale_inv()), (2.0, 0.5)); // before the cast, and to get the value back
/// assert!(E8M0::from_f32_ceil(f32::INFINITY).is_nan());
/// assert_eq!(E8M0::from_f32_ceil_saturating(f32::INFINITY), E8M0::MAX);
/// ```
#[derive(Clone, Copy)]
#[repr(transparent)]
#[cfg_attr(feature = "bytemuck", derive(bytemuck::Pod, bytemuck::Zeroable, bytemuck::TransparentWrapper))]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "zerocopy",
    derive(
        zerocopy::FromBytes,
        zerocopy::IntoBytes,
        zerocopy::Immutable,
        zerocopy::KnownLayout,
        zerocopy::Unaligned
    )
)]
pub struct E8M0(u8);

/// Conversions from a wider type.
macro_rules! from_wide {
    ($($ty:ty: $floor:ident $floor_saturating:ident $ceil:ident $ceil_saturating:ident, |$x:ident| $parts:expr;)*) => {$(
        /// Returns the largest power of two that is not greater than `x`, and 2⁻¹²⁷ for smaller numbers. Infinity, NaN and
        /// negative numbers give NaN; −0 counts as 0. From f64, 2¹²⁸ and greater numbers also give NaN.
        #[must_use]
        #[inline]
        pub const fn $floor($x: $ty) -> Self {
            $parts.floor(Self::NAN.0)
        }

        /// Returns the largest power of two that is not greater than `x`, between 2⁻¹²⁷ for smaller numbers and 2¹²⁷ for
        /// greater ones and infinity. NaN and negative numbers give NaN; −0 counts as 0.
        #[must_use]
        #[inline]
        pub const fn $floor_saturating($x: $ty) -> Self {
            $parts.floor(Self::MAX.0)
        }

        /// Returns the smallest power of two that is not less than `x`, and 2⁻¹²⁷ for smaller numbers. Numbers greater than
        /// 2¹²⁷, infinity, NaN and negative numbers give NaN; −0 counts as 0.
        #[must_use]
        #[inline]
        pub const fn $ceil($x: $ty) -> Self {
            $parts.ceil(Self::NAN.0)
        }

        /// Returns the smallest power of two that is not less than `x`, between 2⁻¹²⁷ for smaller numbers and 2¹²⁷ for
        /// greater ones and infinity. NaN and negative numbers give NaN; −0 counts as 0.
        #[must_use]
        #[inline]
        pub const fn $ceil_saturating($x: $ty) -> Self {
            $parts.ceil(Self::MAX.0)
        }
    )*};
}

impl E8M0 {
    /// Smallest value, 2⁻¹²⁷, which is a subnormal f32.
    pub const MIN: Self = Self(0x00);
    /// Largest value, 2¹²⁷.
    pub const MAX: Self = Self(0xFE);
    /// 1.
    pub const ONE: Self = Self(0x7F);
    /// The only NaN, 0xFF.
    pub const NAN: Self = Self(0xFF);
    /// The exponent bias: the code minus the exponent.
    pub const BIAS: i32 = 127;
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

    from_wide! {
        f32: from_f32_floor from_f32_floor_saturating from_f32_ceil from_f32_ceil_saturating, |x| Parts::of_f32(x);
        f64: from_f64_floor from_f64_floor_saturating from_f64_ceil from_f64_ceil_saturating, |x| Parts::of_f64(x);
        f16: from_f16_floor from_f16_floor_saturating from_f16_ceil from_f16_ceil_saturating,
            |x| Parts::of_f32(f16_to_f32(x.to_bits()));
        bf16: from_bf16_floor from_bf16_floor_saturating from_bf16_ceil from_bf16_ceil_saturating,
            |x| Parts::of_f32(bf16_to_f32(x.to_bits()));
    }

    /// Returns the value, which is exact; 2⁻¹²⁷ is subnormal. NaN gives 0x7FFF_FFFF.
    #[must_use]
    #[inline]
    pub const fn to_f32(self) -> f32 {
        let bits = (self.0 as u32) << 23;
        f32::from_bits(match self.0 {
            0x00 => 0x0040_0000,
            0xFF => 0x7FFF_FFFF,
            _ => bits,
        })
    }

    /// Returns the value, which is exact. NaN gives 0x7FFF_FFFF_FFFF_FFFF.
    #[must_use]
    #[inline]
    pub const fn to_f64(self) -> f64 {
        if self.is_nan() { f64::from_bits(0x7FFF_FFFF_FFFF_FFFF) } else { self.to_f32() as f64 }
    }

    /// Returns the value, which is exact; 2⁻¹²⁷ is subnormal. NaN gives 0x7FFF.
    #[must_use]
    #[inline]
    pub const fn to_bf16(self) -> bf16 {
        bf16::from_bits(crate::codec::low_half(self.to_f32().to_bits() >> 16))
    }

    /// Returns the value, which is exact from 2⁻²⁴ to 2¹⁵. Smaller powers give 0, greater ones infinity, NaN 0x7FFF.
    #[must_use]
    #[inline]
    pub const fn to_f16(self) -> f16 {
        f16::from_bits(match self.0 {
            0..103 => 0,
            e @ 103..113 => 1 << (e - 103),
            e @ 113..143 => (e as u16 - 112) << 10,
            143..=254 => 0x7C00,
            255 => 0x7FFF,
        })
    }

    /// Returns the factor that elements are multiplied by before they are cast: 2^(127 − bits), the inverse of the value, which is
    /// exact. NaN gives 0x7FFF_FFFF.
    ///
    /// ```
    /// use fp8_format::E8M0;
    ///
    /// assert_eq!(E8M0::from_f32_ceil(0.125).scale(), 8.0);
    /// assert_eq!(E8M0::MAX.scale(), 2_f32.powi(-127));
    /// ```
    #[must_use]
    #[inline]
    pub const fn scale(self) -> f32 {
        if self.is_nan() { self.to_f32() } else { Self(Self::MAX.0 - self.0).to_f32() }
    }

    /// Returns the factor that codes are multiplied by to get their values back: 2^(bits − 127), which is
    /// [`to_f32`](Self::to_f32).
    #[must_use]
    #[inline]
    pub const fn scale_inv(self) -> f32 {
        self.to_f32()
    }

    /// Returns the exponent, −127 to 127; `None` for NaN.
    ///
    /// ```
    /// use fp8_format::E8M0;
    ///
    /// assert_eq!(E8M0::from_bits(130).exponent(), Some(3));
    /// assert_eq!(E8M0::NAN.exponent(), None);
    /// ```
    #[must_use]
    #[inline]
    pub const fn exponent(self) -> Option<i32> {
        if self.is_nan() { None } else { Some(self.0 as i32 - Self::BIAS) }
    }

    /// Returns true if this is NaN.
    #[must_use]
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 == Self::NAN.0
    }

    /// Compares the bits: by value, with NaN greater than every number.
    #[must_use]
    #[inline]
    pub const fn total_cmp(&self, other: &Self) -> Ordering {
        if self.0 < other.0 {
            Ordering::Less
        } else if self.0 > other.0 {
            Ordering::Greater
        } else {
            Ordering::Equal
        }
    }
}

/// The properties of a number that the conversions use.
#[derive(Clone, Copy)]
struct Parts {
    /// The exponent with E8M0's bias, of the power of two below; 0 for all numbers below 2⁻¹²⁶, 255 beyond the range.
    floor: u8,
    /// Whether the number exceeds that power of two.
    is_above: bool,
    is_nan: bool,
}

impl Parts {
    #[inline(always)]
    const fn of_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let [_, _, _, floor] = (bits << 1).to_le_bytes();
        let fraction = bits & 0x007F_FFFF;
        // 2⁻¹²⁷ has no exponent of its own in an f32.
        let power = if floor == 0 { 0x0040_0000 } else { 0 };
        Self { floor, is_above: fraction > power, is_nan: x.is_nan() || x < 0.0 }
    }

    #[inline(always)]
    const fn of_f64(x: f64) -> Self {
        let field = x.to_bits() << 1 >> 53;
        let fraction = x.to_bits() & 0x000F_FFFF_FFFF_FFFF;
        let is_nan = x.is_nan() || x < 0.0;
        // The exponents of 2⁻¹²⁷ and of 2¹²⁸.
        const LEAST: u64 = 1023 - 127;
        const BEYOND: u64 = 1023 + 128;
        if field < LEAST {
            return Self { floor: 0, is_above: false, is_nan };
        }
        let [floor, ..] = (if field < BEYOND { field - LEAST } else { 255 }).to_le_bytes();
        Self { floor, is_above: fraction > 0, is_nan }
    }

    /// The power of two below, or `beyond`.
    #[inline(always)]
    const fn floor(self, beyond: u8) -> E8M0 {
        if self.is_nan {
            E8M0::NAN
        } else if self.floor == E8M0::NAN.0 {
            E8M0(beyond)
        } else {
            E8M0(self.floor)
        }
    }

    /// The power of two above, or `beyond`.
    #[inline(always)]
    const fn ceil(self, beyond: u8) -> E8M0 {
        if self.is_nan {
            E8M0::NAN
        } else if self.floor == E8M0::NAN.0 || (self.floor == E8M0::MAX.0 && self.is_above) {
            E8M0(beyond)
        } else {
            E8M0(self.floor + self.is_above as u8)
        }
    }
}

impl Default for E8M0 {
    /// 1.
    #[inline]
    fn default() -> Self {
        Self::ONE
    }
}

impl PartialEq for E8M0 {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0 && !self.is_nan()
    }
}

impl PartialOrd for E8M0 {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        (!self.is_nan() && !other.is_nan()).then(|| self.total_cmp(other))
    }
}

macro_rules! into {
    ($($ty:ty: $to:ident),*) => {$(
        impl From<E8M0> for $ty {
            /// Exact.
            #[inline]
            fn from(x: E8M0) -> $ty {
                x.$to()
            }
        }
    )*};
}

into!(f32: to_f32, f64: to_f64, bf16: to_bf16);

impl core::str::FromStr for E8M0 {
    type Err = Error;

    /// Reads what `f32` reads if it is a power of two from 2⁻¹²⁷ to 2¹²⁷ or NaN, and what `Display` writes.
    fn from_str(s: &str) -> Result<Self> {
        let parsed: f32 = s.parse().map_err(|_| Error::ParseE8M0 { len: s.len() })?;
        let value = Self::from_f32_floor(parsed);
        if value.to_f32() == parsed || parsed.is_nan() {
            Ok(value)
        } else {
            Err(Error::ParseE8M0 { len: s.len() })
        }
    }
}

macro_rules! format {
    ($value:ident: $($style:ident),*) => {$(
        impl fmt::$style for E8M0 {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::$style::fmt(&self.$value(), f)
            }
        }
    )*};
}

format!(to_f32: Display, Debug, LowerExp, UpperExp);
format!(to_bits: LowerHex, UpperHex, Binary, Octal);
