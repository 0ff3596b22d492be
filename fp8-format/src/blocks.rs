//! The shapes of blocks whose elements share a scale.

use core::fmt;

/// The shape of the blocks into which a row-major matrix is divided. The elements of a block share a scale, which is finer
/// than one scale for the whole matrix.
///
/// A matrix is cut along its rows. Its size need not be a multiple of the block's: the last blocks of a row, or of a column,
/// are smaller.
///
/// | | block | scales of a `[rows, cols]` matrix | type of a scale |
/// |---|---|---|---|
/// | `Row` | 1 × cols | `[rows, 1]` | f32 |
/// | `B1x128` | 1 × 128 | `[rows, ⌈cols / 128⌉]` | f32 |
/// | `B128x128` | 128 × 128 | `[⌈rows / 128⌉, ⌈cols / 128⌉]` | f32 |
/// | `Mx32` | 1 × 32 | `[rows, ⌈cols / 32⌉]` | [`E8M0`](crate::E8M0) |
/// | `B1x16` | 1 × 16 | `[rows, ⌈cols / 16⌉]` | [`E4M3`](crate::E4M3), and a [`TensorScale`](crate::TensorScale) |
/// | `B16x16` | 16 × 16 | `[⌈rows / 16⌉, ⌈cols / 16⌉]` | the same |
///
/// ```
/// use fp8_format::Blocks;
///
/// assert_eq!(Blocks::B1x128.grid(64, 1000), [64, 8]);
/// assert_eq!(Blocks::B128x128.grid(64, 1000), [1, 8]);
/// assert_eq!(Blocks::Mx32.grid(64, 1000), [64, 32]);
/// assert_eq!(Blocks::B16x16.grid(64, 1000), [4, 63]);
/// assert_eq!(Blocks::Row.grid(64, 1000), [64, 1]);
/// assert_eq!(Blocks::Row.size(1000), [1, 1000]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Blocks {
    /// A row: a token of activations, or an output channel of a weight.
    Row,
    /// 128 elements of a row.
    B1x128,
    /// A tile of 128 rows and 128 columns.
    B128x128,
    /// 32 elements of a row, as in MXFP8.
    Mx32,
    /// 16 elements of a row, as in NVFP4.
    B1x16,
    /// A tile of 16 rows and 16 columns: weights in NVFP4, whose blocks are the same in the transpose.
    B16x16,
}

impl Blocks {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Row, Self::B1x128, Self::B128x128, Self::Mx32, Self::B1x16, Self::B16x16];

    /// Returns true if the elements are [`E2M1`](crate::E2M1), two in a byte, with scales of two levels; of the others they are
    /// [`E4M3`](crate::E4M3) or [`E5M2`](crate::E5M2).
    #[must_use]
    #[inline]
    pub const fn is_fp4(self) -> bool {
        matches!(self, Self::B1x16 | Self::B16x16)
    }

    /// Returns the rows and columns of a whole block in a matrix of `cols` columns.
    #[must_use]
    #[inline]
    pub const fn size(self, cols: usize) -> [usize; 2] {
        match self {
            Self::Row => [1, cols],
            Self::B1x128 => [1, 128],
            Self::B128x128 => [128, 128],
            Self::Mx32 => [1, 32],
            Self::B1x16 => [1, 16],
            Self::B16x16 => [16, 16],
        }
    }

    /// Returns the rows and columns of the matrix of scales that belongs to a `rows` × `cols` matrix. `Row` has one scale for
    /// each row even if `cols` is 0.
    #[must_use]
    #[inline]
    pub const fn grid(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Self::Row => [rows, 1],
            Self::B1x128 => [rows, cols.div_ceil(128)],
            Self::B128x128 => [rows.div_ceil(128), cols.div_ceil(128)],
            Self::Mx32 => [rows, cols.div_ceil(32)],
            Self::B1x16 => [rows, cols.div_ceil(16)],
            Self::B16x16 => [rows.div_ceil(16), cols.div_ceil(16)],
        }
    }

    /// Returns `row`, `1x128`, `128x128`, `mx32`, `1x16` or `16x16`, which `Display` writes.
    #[must_use]
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::B1x128 => "1x128",
            Self::B128x128 => "128x128",
            Self::Mx32 => "mx32",
            Self::B1x16 => "1x16",
            Self::B16x16 => "16x16",
        }
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
