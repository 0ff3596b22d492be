//! Quantization of matrices with a scale for each row or block. `rows` computes rowwise results, `columns` those of the
//! transpose and of tiles.
//!
//! The scales follow Transformer Engine's recipes and OCP MX 1.0: `v = f32(x)`, `amax = max |v|` of a block, ignoring NaN;
//! `code = satfinite(v · scale)`, an f32 product; `value = code · scale_inv`.

mod columns;
mod dequantize;
mod quantize;
mod rows;
mod scales;

pub use dequantize::{dequantize_blocks, dequantize_mx};
pub use quantize::{
    BlockOutput, MxOutput, quantize_blocks, quantize_blocks_transpose, quantize_mx, quantize_mx_transpose,
};
pub use scales::{BlockScaling, MxRounding};

use crate::arch::Path;
use crate::{Blocks, Error, Result};
use scales::Scales;

/// The settings that all parts of a call share.
#[derive(Clone, Copy)]
struct Job {
    path: Path,
    /// Results bypass the caches.
    streams: bool,
    blocks: Blocks,
}

/// The destination of the results of one direction: a matrix of codes and its scales.
struct Out<'a> {
    codes: &'a mut [u8],
    scales: Scales<'a>,
}

#[cfg(feature = "rayon")]
impl<'a> Out<'a> {
    /// The first `codes` codes with their `scales` scales, and the others.
    fn split(self, codes: usize, scales: usize) -> (Self, Self) {
        let (low, high) = self.codes.split_at_mut(codes);
        let (low_scales, high_scales) = self.scales.split(scales);
        (Self { codes: low, scales: low_scales }, Self { codes: high, scales: high_scales })
    }
}

/// Returns the number of scales of a matrix that is known to be in memory.
fn count(blocks: Blocks, rows: usize, cols: usize) -> usize {
    let [height, width] = blocks.grid(rows, cols);
    height.saturating_mul(width)
}

pub(super) fn expect_scales(
    op: &'static str,
    name: &'static str,
    blocks: Blocks,
    [rows, cols]: [usize; 2],
    len: usize,
) -> Result<()> {
    let [height, width] = blocks.grid(rows, cols);
    if height.checked_mul(width) == Some(len) {
        Ok(())
    } else {
        Err(Error::Scales { op, name, len, blocks, rows, cols })
    }
}
