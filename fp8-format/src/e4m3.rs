//! The type [`E4M3`] and its constants.

use crate::codec;

/// 8-bit float with 4 exponent and 3 mantissa bits: the forward format of FP8 training.
///
/// The OCP "FN" variant: no infinities, one NaN pattern per sign (0x7F, 0xFF), every other code a number up to 448.
/// It is a `u8` in memory. Like an `f32` it is neither `Eq`, `Ord` nor `Hash`; `to_bits` gives a key that is.
///
/// ```
/// use fp8_format::E4M3;
///
/// assert_eq!(E4M3::from_f32_saturating(3.3).to_f32(), 3.25); // spacing is 0.25 in [2, 4)
/// assert_eq!(E4M3::from_f32_saturating(-1e4).to_f32(), -448.0);
/// assert_eq!(E4M3::from_f32(464.0), E4M3::MAX); // a tie, and 0x7E is even
/// assert!(E4M3::from_f32(464.1).is_nan());
/// assert_eq!(E4M3::from_f32_stochastic(3.3, 0).to_f32(), 3.25); // r decides between 3.25 and 3.5
/// assert_eq!(E4M3::from_f32_stochastic(3.3, u32::MAX).to_f32(), 3.5);
/// ```
#[derive(Clone, Copy, Default)]
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
pub struct E4M3(u8);

impl E4M3 {
    /// Largest finite value, 448.
    pub const MAX: Self = Self(0x7E);
    /// Smallest finite value, −448.
    pub const MIN: Self = Self(0xFE);
    /// Smallest positive normal value, 2⁻⁶.
    pub const MIN_POSITIVE: Self = Self(0x08);
    /// Smallest positive value, 2⁻⁹.
    pub const MIN_POSITIVE_SUBNORMAL: Self = Self(0x01);
    /// Largest subnormal value, 7 · 2⁻⁹.
    pub const MAX_SUBNORMAL: Self = Self(0x07);
    /// Gap between 1 and the next value, 2⁻³.
    pub const EPSILON: Self = Self(0x20);
    /// 1.
    pub const ONE: Self = Self(0x38);
    /// −1.
    pub const NEG_ONE: Self = Self(0xB8);

    /// Significand bits, the implicit one included.
    pub const MANTISSA_DIGITS: u32 = 4;
    /// Decimal digits that always survive a round trip through this type.
    pub const DIGITS: u32 = 0;
    /// `MAX < 2^MAX_EXP`, as in C.
    pub const MAX_EXP: i32 = 9;
    /// `MIN_POSITIVE = 2^(MIN_EXP - 1)`, as in C.
    pub const MIN_EXP: i32 = -5;
    /// Largest `x` with `10^x` in range.
    pub const MAX_10_EXP: i32 = 2;
    /// Smallest `x` with `10^x` a normal value.
    pub const MIN_10_EXP: i32 = -1;
}

impl_number!(E4M3, codec::E4M3, "NaN with the sign of `x`");
impl_operators!(E4M3);
