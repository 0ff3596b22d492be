//! Codes with zeros around them, in extents that tensor cores take.

use super::{Gpu, Grid, In, Out, kernels};
use crate::{DType, Result, Tensor};

/// Extents that tensor cores take are multiples of this.
pub(super) const MULTIPLE: usize = 16;

/// With zeros behind rows and columns up to multiples of these numbers, themselves multiples of 16.
pub(super) fn padded(
    gpu: &Gpu,
    op: &'static str,
    codes: Tensor,
    [row_multiple, col_multiple]: [usize; 2],
) -> Result<Tensor> {
    let dims @ [rows, cols] = codes.shape().matrix();
    let [padded_rows, padded_cols] =
        [rows.next_multiple_of(row_multiple), cols.next_multiple_of(col_multiple)];
    if dims == [padded_rows, padded_cols] {
        return Ok(codes);
    }
    let out = gpu.alloc(DType::U8, padded_rows.saturating_mul(padded_cols))?;
    let kernel = gpu.load(kernels::GEMM_PAD)?;
    let args = kernels::GemmPad {
        x: In::u8(codes.cuda(op)?),
        rows: rows as u64,
        cols: cols as u64,
        y: Out::u8(&out),
        padded_rows: padded_rows as u64,
        padded_cols: padded_cols as u64,
    };
    // SAFETY: x has rows · cols codes, y was made for the padded ones, whose extents are multiples of 16.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, (padded_rows * padded_cols / 16) as u64), &args) }?;
    Ok(Tensor::from_cuda(out, [padded_rows, padded_cols].into(), codes.device()))
}
