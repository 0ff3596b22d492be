//! The type [`E5M2`] and its constants.

use crate::codec;

/// 8-bit float with 5 exponent and 2 mantissa bits: the gradient format of FP8 training.
///
/// The upper byte of an f16: IEEE-like, with infinities (0x7C, 0xFC) and three NaN patterns per sign. It is a `u8`
/// in memory. Like an `f32` it is neither `Eq`, `Ord` nor `Hash`; `to_bits` gives a key that is.
///
/// ```
/// use fp8_format::E5M2;
///
/// assert_eq!(E5M2::from_f32_saturating(3.3).to_f32(), 3.5); // spacing is 0.5 in [2, 4)
/// assert_eq!(E5M2::from_f32_saturating(-1e9).to_f32(), -57344.0);
/// assert_eq!(E5M2::from_f32(61439.0), E5M2::MAX);
/// assert_eq!(E5M2::from_f32(61440.0), E5M2::INFINITY); // a tie, and 0x7B is odd
/// assert_eq!(E5M2::from_f32_stochastic(3.3, 0).to_f32(), 3.0); // r decides between 3.0 and 3.5
/// assert_eq!(E5M2::from_f32_stochastic(3.3, u32::MAX).to_f32(), 3.5);
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
pub struct E5M2(u8);

impl E5M2 {
    /// Largest finite value, 57344.
    pub const MAX: Self = Self(0x7B);
    /// Smallest finite value, −57344.
    pub const MIN: Self = Self(0xFB);
    /// Smallest positive normal value, 2⁻¹⁴.
    pub const MIN_POSITIVE: Self = Self(0x04);
    /// Smallest positive value, 2⁻¹⁶.
    pub const MIN_POSITIVE_SUBNORMAL: Self = Self(0x01);
    /// Largest subnormal value, 3 · 2⁻¹⁶.
    pub const MAX_SUBNORMAL: Self = Self(0x03);
    /// Gap between 1 and the next value, 2⁻².
    pub const EPSILON: Self = Self(0x34);
    /// 1.
    pub const ONE: Self = Self(0x3C);
    /// −1.
    pub const NEG_ONE: Self = Self(0xBC);
    /// ∞.
    pub const INFINITY: Self = Self(0x7C);
    /// −∞.
    pub const NEG_INFINITY: Self = Self(0xFC);

    /// Significand bits, the implicit one included.
    pub const MANTISSA_DIGITS: u32 = 3;
    /// Decimal digits that always survive a round trip through this type.
    pub const DIGITS: u32 = 0;
    /// `MAX < 2^MAX_EXP`, as in C.
    pub const MAX_EXP: i32 = 16;
    /// `MIN_POSITIVE = 2^(MIN_EXP - 1)`, as in C.
    pub const MIN_EXP: i32 = -13;
    /// Largest `x` with `10^x` in range.
    pub const MAX_10_EXP: i32 = 4;
    /// Smallest `x` with `10^x` a normal value.
    pub const MIN_10_EXP: i32 = -4;
}

impl_number!(E5M2, codec::E5M2, "±∞");
impl_operators!(E5M2);
