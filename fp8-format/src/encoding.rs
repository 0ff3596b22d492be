//! The run-time tag of the formats.

mod parse;

use crate::codec;
use core::fmt;

/// The format of a code, for formats that are known only at run time. For formats known at compile time use
/// [`E4M3`](crate::E4M3), [`E5M2`](crate::E5M2) and [`E2M1`](crate::E2M1).
///
/// A code of E2M1 is in the low half of a byte here; memory holds two a byte ([`E2M1::pack`](crate::E2M1::pack)).
///
/// ```
/// use fp8_format::Encoding;
///
/// let encoding: Encoding = "E5M2".parse()?;
/// assert_eq!(encoding.max(), 57344.0);
/// assert_eq!(encoding.from_f32_saturating(1.1), 0x3C); // 1.0: the neighbours are 1.0 and 1.25
/// assert_eq!(encoding.to_f32(0x3D), 1.25);
/// # Ok::<(), fp8_format::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Encoding {
    /// 4 exponent bits, 3 mantissa bits, no infinity, largest value 448.
    E4M3,
    /// 5 exponent bits, 2 mantissa bits, with infinities, largest value 57344.
    E5M2,
    /// 2 exponent bits, 1 mantissa bit, no infinity, no NaN, largest value 6: an element of NVFP4.
    E2M1,
}

impl Encoding {
    pub(crate) const fn format(self) -> codec::Format {
        match self {
            Self::E4M3 => codec::E4M3,
            Self::E5M2 => codec::E5M2,
            Self::E2M1 => codec::E2M1,
        }
    }

    /// Returns the largest finite value: 448 (E4M3), 57344 (E5M2) or 6 (E2M1).
    #[must_use]
    #[inline]
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57344.0,
            Self::E2M1 => 6.0,
        }
    }

    /// Returns the largest f32 that rounds to [`max`](Self::max). Every larger magnitude overflows or saturates.
    ///
    /// The value half a step above the largest one is a tie. In E4M3 it is 464, which rounds to the even 448. In E5M2 it is
    /// 61440, which rounds up, so the limit is the preceding f32. So does 7 in E2M1.
    ///
    /// ```
    /// use fp8_format::Encoding;
    ///
    /// for encoding in [Encoding::E4M3, Encoding::E5M2] {
    ///     let limit = encoding.saturation_limit();
    ///     assert!(encoding.is_finite(encoding.from_f32(limit)));
    ///     assert!(!encoding.is_finite(encoding.from_f32(limit.next_up())));
    /// }
    /// ```
    #[must_use]
    #[inline]
    pub const fn saturation_limit(self) -> f32 {
        match self {
            Self::E4M3 => 464.0,
            Self::E5M2 => 61440.0f32.next_down(),
            Self::E2M1 => 7.0f32.next_down(),
        }
    }

    /// Returns the code of the largest finite value: 0x7E (E4M3), 0x7B (E5M2) or 0x7 (E2M1).
    #[must_use]
    #[inline]
    pub const fn max_bits(self) -> u8 {
        self.format().max
    }

    /// Returns `E4M3`, `E5M2` or `E2M1`, which `Display` writes and `FromStr` parses in either case.
    #[must_use]
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "E4M3",
            Self::E5M2 => "E5M2",
            Self::E2M1 => "E2M1",
        }
    }

    /// Returns the value of a code, which is exact. A NaN code gives the f32 with bits 0x7FFF_FFFF. O(1).
    #[must_use]
    #[inline]
    pub const fn to_f32(self, code: u8) -> f32 {
        match self {
            Self::E4M3 => codec::E4M3.decode_f32(code),
            Self::E5M2 => codec::E5M2.decode_f32(code),
            Self::E2M1 => codec::E2M1.decode_f32(codec::unpacked(code)),
        }
    }

    /// Returns the nearest code, ties to even, rounded once. Overflow and infinity give NaN with the sign of `x` (E4M3) or infinity
    /// (E5M2); NaN gives 0x7F. E2M1 has neither: see [`E2M1::from_f32`](crate::E2M1::from_f32). O(1).
    #[must_use]
    #[inline]
    pub const fn from_f32(self, x: f32) -> u8 {
        match self {
            Self::E4M3 => codec::E4M3.encode_f32(x, codec::E4M3.overflow),
            Self::E5M2 => codec::E5M2.encode_f32(x, codec::E5M2.overflow),
            Self::E2M1 => codec::packed(codec::E2M1.encode_f32(x, codec::E2M1.max)),
        }
    }

    /// Returns the nearest code, ties to even, rounded once. Overflow and infinity give the largest finite value with the sign of `x`;
    /// NaN gives 0x7F, in E2M1 0x7. O(1).
    #[must_use]
    #[inline]
    pub const fn from_f32_saturating(self, x: f32) -> u8 {
        match self {
            Self::E4M3 => codec::E4M3.encode_f32(x, codec::E4M3.max),
            Self::E5M2 => codec::E5M2.encode_f32(x, codec::E5M2.max),
            Self::E2M1 => codec::packed(codec::E2M1.encode_f32(x, codec::E2M1.max)),
        }
    }

    /// Returns the code of one of the two neighbours of `x`. With F the discarded fraction of an ulp in 0.32 fixed point, the
    /// magnitude is rounded up if F + `r` ≥ 2³²; a tie is rounded up for half of all `r`. Overflow and infinity give the largest
    /// finite value with the sign of `x`; NaN gives 0x7F, in E2M1 0x7. O(1).
    #[must_use]
    #[inline]
    pub const fn from_f32_stochastic(self, x: f32, r: u32) -> u8 {
        match self {
            Self::E4M3 => codec::E4M3.encode_f32_stochastic(x, r),
            Self::E5M2 => codec::E5M2.encode_f32_stochastic(x, r),
            Self::E2M1 => codec::packed(codec::E2M1.encode_f32_stochastic(x, r)),
        }
    }

    /// Returns true if a code is NaN: 0x7F and 0xFF in E4M3; 0x7D–0x7F and 0xFD–0xFF in E5M2. None of E2M1 is.
    #[must_use]
    #[inline]
    pub const fn is_nan(self, code: u8) -> bool {
        match self {
            Self::E4M3 | Self::E5M2 => self.format().is_nan(code),
            Self::E2M1 => false,
        }
    }

    /// Returns true if a code is neither NaN nor infinite.
    #[must_use]
    #[inline]
    pub const fn is_finite(self, code: u8) -> bool {
        match self {
            Self::E4M3 | Self::E5M2 => code & 0x7F <= self.format().max,
            Self::E2M1 => true,
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
