//! The targets of conversions to FP8: the encoding, and the code at which results are clamped.

use crate::codec::Format;
use crate::traits::Fp8;
use core::marker::PhantomData;

/// A kind of conversion to FP8, known to the compiler.
pub(crate) trait Target {
    const FORMAT: Format;
    /// The largest code that comes out.
    const TOP: u8;
}

/// Overflow becomes the largest finite value.
pub(crate) struct Saturating<T>(PhantomData<T>);

impl<T: Fp8> Target for Saturating<T> {
    const FORMAT: Format = T::ENCODING.format();
    const TOP: u8 = Self::FORMAT.max;
}

/// Overflow becomes NaN or infinity.
pub(crate) struct Overflowing<T>(PhantomData<T>);

impl<T: Fp8> Target for Overflowing<T> {
    const FORMAT: Format = T::ENCODING.format();
    const TOP: u8 = Self::FORMAT.overflow;
}
