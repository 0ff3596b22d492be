//! `transpose` on a GPU, by the size of an element.

use super::tiles::{self, tiles};
use super::{Buffer, Gpu, In, Out, kernels};
use crate::{Result, Shape, Tensor};

/// Rows and columns of a tile of elements of 2 or 4 bytes, as the kernels have them.
const SIDE: usize = 64;

pub(crate) fn transpose(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let [rows, cols] = x.shape().matrix();
    let out = gpu.alloc(x.dtype(), x.numel())?;
    let squares = rows.div_ceil(SIDE) * cols.div_ceil(SIDE);
    let turned = Shape::from([cols, rows]);
    let values = x.cuda("transpose")?;
    if x.dtype().size() == 1 {
        bytes(gpu, values, [rows, cols], &out)?;
        return Ok(Tensor::from_cuda(out, turned, x.device()));
    }
    let (rows, cols) = (rows as u64, cols as u64);
    match x.dtype().size() {
        2 => {
            let args = kernels::TransposeU16 { x: In::u16(values), rows, cols, out: Out::u16(&out) };
            let kernel = gpu.load(kernels::TRANSPOSE_U16)?;
            // SAFETY: x and out hold rows · cols elements of the kernel's size.
            unsafe { kernel.launch(gpu, tiles::grid(gpu, squares, 16), &args) }
        }
        _ => {
            let args = kernels::TransposeU32 { x: In::u32(values), rows, cols, out: Out::u32(&out) };
            let kernel = gpu.load(kernels::TRANSPOSE_U32)?;
            // SAFETY: x and out hold rows · cols elements of the kernel's size.
            unsafe { kernel.launch(gpu, tiles::grid(gpu, squares, 16), &args) }
        }
    }?;
    Ok(Tensor::from_cuda(out, turned, x.device()))
}

/// Writes the transpose of `x`, `[rows, cols]` of one byte each, to `out`.
pub(super) fn bytes(gpu: &Gpu, x: &Buffer, [rows, cols]: [usize; 2], out: &Buffer) -> Result<()> {
    let grid = tiles::grid(gpu, tiles(rows, cols), 16);
    let args = kernels::TransposeU8 { x: In::u8(x), rows: rows as u64, cols: cols as u64, out: Out::u8(out) };
    let kernel = gpu.load(kernels::TRANSPOSE_U8)?;
    // SAFETY: the caller's buffers hold rows · cols bytes each.
    unsafe { kernel.launch(gpu, grid, &args) }
}
