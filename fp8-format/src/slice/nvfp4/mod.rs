//! NVFP4: matrices of E2M1 in blocks of 16 with two-level scales. `rows` computes the copy of the matrix, `columns` those of its
//! transpose.
//!
//! [`TensorScale`] has the formulas. A NaN makes the scale of its block NaN, as E2M1 has none. `rowwise` copies are of the matrix,
//! `columnwise` ones of its transpose, whose rows may be mixed by a Hadamard transform first.

mod columns;
mod dequantize;
mod hadamard;
mod options;
mod quantize;
mod rows;

pub use dequantize::dequantize_nvfp4;
pub use hadamard::{HADAMARD_SIGNS, hadamard};
pub use options::{Nvfp4Copy, Nvfp4Options};
pub use quantize::{Nvfp4Output, nvfp4_amax, quantize_nvfp4};

use crate::arch::Path;
use crate::philox::BlockRandom;
use crate::{Blocks, Error, Result, TensorScale};

/// Rows or columns of a tile, and elements of a block.
const SIDE: usize = crate::arch::FP4_BLOCK;

/// Bytes of the codes of a block.
const BYTES: usize = SIDE / 2;

/// The settings that all parts of a call share.
#[derive(Clone, Copy)]
struct Job {
    path: Path,
    blocks: Blocks,
    tensor: TensorScale,
    random: Option<BlockRandom>,
}

fn expect_fp4(op: &'static str, blocks: Blocks) -> Result<()> {
    if blocks.is_fp4() { Ok(()) } else { Err(Error::NotFp4 { op, blocks }) }
}

/// An error unless so many bytes hold the codes of a matrix.
fn expect_packed(op: &'static str, name: &'static str, rows: usize, cols: usize, len: usize) -> Result<()> {
    match rows.checked_mul(cols.div_ceil(2)) {
        Some(bytes) if bytes == len => Ok(()),
        _ => Err(Error::Packed { op, name, len, rows, cols }),
    }
}
