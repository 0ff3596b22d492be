//! Tables of the codes of products.

use crate::codec::Format;

/// Bytes of a vector.
const BYTES: usize = 64;

/// The codes of one scale's products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductTables {
    /// The exponent field of the lowest binade whose products are all normal.
    pub(super) normal: u8,
    /// Codes of that binade, of the one below it, and so on.
    pub(super) codes: [[[u8; BYTES]; 2]; Self::MOST],
}

impl ProductTables {
    /// The number of tables for E4M3. E5M2, whose significand has one bit less, needs one table less.
    pub(super) const MOST: usize = 6;

    /// Binades with codes of their own below the lowest whose products are all normal.
    pub(super) const fn below(format: Format) -> u8 {
        format.man.to_le_bytes()[0] + 2
    }
}
