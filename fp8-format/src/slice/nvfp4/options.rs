//! The choice of what is quantized to NVFP4, and how.

use crate::Blocks;
use crate::philox::BlockRandom;

/// The matrix that is quantized, made from a `[rows, cols]` source.
///
/// ```
/// use fp8_format::slice::Nvfp4Copy;
///
/// assert_eq!(Nvfp4Copy::Rowwise.shape(40, 64), [40, 64]);
/// assert_eq!(Nvfp4Copy::Columnwise.shape(40, 64), [64, 40]);
/// assert_eq!(Nvfp4Copy::Hadamard.shape(40, 64), [64, 48]); // padded to whole blocks
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Nvfp4Copy {
    /// The source.
    #[default]
    Rowwise,
    /// Its transpose.
    Columnwise,
    /// Its transpose, of which each 16 elements of a row are mixed by a Hadamard transform with fixed signs,
    /// [`HADAMARD_SIGNS`](crate::slice::HADAMARD_SIGNS): outliers of a token are shared out over 16. A product of two such copies
    /// along their rows is that of the copies without the transform, but for rounding.
    ///
    /// Rows are padded with zeros to a multiple of 16. The result is rounded to bf16 if the source is bf16, else it is kept in
    /// f32.
    Hadamard,
}

impl Nvfp4Copy {
    /// Returns the rows and columns of the copy.
    #[must_use]
    #[inline]
    pub const fn shape(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Self::Rowwise => [rows, cols],
            Self::Columnwise => [cols, rows],
            // At the end of the address space nothing can be padded, nor be in memory.
            Self::Hadamard => [cols, rows.div_ceil(16).saturating_mul(16)],
        }
    }
}

/// The settings of [`quantize_nvfp4`](crate::slice::quantize_nvfp4): which copy, which blocks, how it is rounded.
///
/// The default is a rowwise copy in blocks of 1 × 16, rounded to nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nvfp4Options {
    /// The matrix that is quantized. Default: [`Nvfp4Copy::Rowwise`].
    pub copy: Nvfp4Copy,
    /// [`Blocks::B1x16`] or [`Blocks::B16x16`] of the copy. Default: `B1x16`.
    pub blocks: Blocks,
    /// `Some`: codes are rounded stochastically, as [`E2M1::from_f32_stochastic`](crate::E2M1::from_f32_stochastic) does, with
    /// these bytes. Scales are rounded to nearest, always. `None`: codes, too. Default: `None`.
    pub random: Option<BlockRandom>,
}

impl Default for Nvfp4Options {
    fn default() -> Self {
        Self { copy: Nvfp4Copy::Rowwise, blocks: Blocks::B1x16, random: None }
    }
}
