//! The crate's errors.

use crate::slice::Path;
use crate::{Blocks, Encoding};
use core::num::ParseFloatError;

/// The crate's result type.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Every error of this crate.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Source and destination of a slice conversion differ in length.
    #[error("{op}: src has {src} elements, dst has {dst}: pass a dst of exactly {src} elements")]
    Length {
        /// The function that was called.
        op: &'static str,
        /// Elements of the source.
        src: usize,
        /// Elements of the destination.
        dst: usize,
    },
    /// The length of a slice is not `rows · cols`.
    #[error(
        "{op}: {name} has {len} elements, a {rows} x {cols} matrix has {}: pass rows and cols whose product is the \
         length of every slice",
        Elements(.rows.checked_mul(*.cols))
    )]
    Shape {
        /// The function that was called.
        op: &'static str,
        /// The argument that does not fit.
        name: &'static str,
        /// Its elements.
        len: usize,
        /// Rows of the source.
        rows: usize,
        /// Columns of the source.
        cols: usize,
    },
    /// A slice of scales, or of amaxes, does not have one element for each block.
    #[error(
        "{op}: {name} has {len} elements, a {rows} x {cols} matrix has {} blocks ({blocks}): pass one element for each \
         block",
        Elements(blocks_of(*.blocks, *.rows, *.cols))
    )]
    Scales {
        /// The function that was called.
        op: &'static str,
        /// The argument that does not fit.
        name: &'static str,
        /// Its elements.
        len: usize,
        /// The blocks into which the matrix is divided.
        blocks: Blocks,
        /// Rows of the matrix; of the transpose for columnwise results.
        rows: usize,
        /// Columns of the matrix; of the transpose for columnwise results.
        cols: usize,
    },
    /// The length of a slice of packed codes is not that of a matrix.
    #[error(
        "{op}: {name} has {len} bytes, the codes of a {rows} x {cols} matrix have {}: two codes a byte, and whole bytes \
         for each row",
        Elements(.rows.checked_mul(.cols.div_ceil(2)))
    )]
    Packed {
        /// The function that was called.
        op: &'static str,
        /// The argument that does not fit.
        name: &'static str,
        /// Its bytes.
        len: usize,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// Blocks of FP8 where E2M1 was asked for.
    #[error("{op}: {blocks} blocks hold FP8: expected 1x16 or 16x16")]
    NotFp4 {
        /// The function that was called.
        op: &'static str,
        /// The blocks.
        blocks: Blocks,
    },
    /// A largest magnitude that is none.
    #[error(
        "{op}: amax is negative or NaN: expected the largest magnitude of the tensor, from slice::nvfp4_amax"
    )]
    Amax {
        /// The function that was called.
        op: &'static str,
    },
    /// Blocks whose scales have another type.
    #[error("{op}: {blocks} blocks do not have f32 scales: call slice::{instead}")]
    NotF32 {
        /// The function that was called.
        op: &'static str,
        /// The blocks.
        blocks: Blocks,
        /// The function for these blocks.
        instead: &'static str,
    },
    /// Text that is not a number.
    #[error("parse {encoding}: {source}: expected a decimal number such as -1.75 or 3e-2, inf or NaN")]
    Parse {
        /// The type that was asked for.
        encoding: Encoding,
        /// The error of the standard library's parser.
        source: ParseFloatError,
    },
    /// Text that is not a number, where an E2M1 was asked for.
    #[error("parse E2M1: {source}: expected a decimal number such as -1.5 or 0.5")]
    ParseE2M1 {
        /// The error of the standard library's parser.
        source: ParseFloatError,
    },
    /// A number that is no code of E2M1.
    #[error("E2M1: {code} is no code: expected 0 to 15")]
    CodeE2M1 {
        /// The number.
        code: u8,
    },
    /// Text that is no power of two in the range of E8M0.
    #[error(
        "parse E8M0: text of {len} bytes: expected a power of two from 5.877472e-39 (2^-127) to 1.7014118e38 (2^127), \
         such as 0.25, or NaN"
    )]
    ParseE8M0 {
        /// Length of the text in bytes.
        len: usize,
    },
    /// Text that names no path of this machine.
    #[error("parse Path: this machine has no path of this name ({len} bytes): expected one of {Paths}")]
    ParsePath {
        /// Length of the text in bytes.
        len: usize,
    },
    /// Text that names no encoding.
    #[error("parse Encoding: unknown name ({len} bytes): expected E4M3, E5M2 or E2M1, in either case")]
    ParseEncoding {
        /// Length of the text in bytes.
        len: usize,
    },
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl core::fmt::Debug for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

/// A number of elements; `None` if it exceeds `usize::MAX`.
struct Elements(Option<usize>);

impl core::fmt::Display for Elements {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            Some(n) => write!(f, "{n}"),
            None => f.write_str("more than usize::MAX"),
        }
    }
}

/// Returns the number of blocks of a matrix; `None` if it exceeds `usize::MAX`.
fn blocks_of(blocks: Blocks, rows: usize, cols: usize) -> Option<usize> {
    let [height, width] = blocks.grid(rows, cols);
    height.checked_mul(width)
}

/// The paths of this machine.
struct Paths;

impl core::fmt::Display for Paths {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (i, path) in Path::available().enumerate() {
            write!(f, "{}{path}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
