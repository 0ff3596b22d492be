//! `transpose` on a GPU, by the size of an element.

use super::tiles::{self, tiles};
use super::{Gpu, In, Out, kernels};
use crate::{Result, Shape, Tensor};

/// Rows and columns of a tile of elements of 2 or 4 bytes, as the kernels have them.
const SIDE: usize = 64;

pub(crate) fn transpose(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let [rows, cols] = x.shape().matrix();
    let out = gpu.alloc(x.dtype(), x.numel())?;
    let codes = tiles(rows, cols);
    let squares = rows.div_ceil(SIDE) * cols.div_ceil(SIDE);
    let turned = Shape::from([cols, rows]);
    let (values, rows, cols) = (x.cuda("transpose")?, rows as u64, cols as u64);
    match x.dtype().size() {
        1 => {
            let args = kernels::TransposeU8 { x: In::u8(values), rows, cols, out: Out::u8(&out) };
            let kernel = gpu.load(kernels::TRANSPOSE_U8)?;
            // SAFETY: x and out hold rows · cols elements of the kernel's size.
            unsafe { kernel.launch(gpu, tiles::grid(gpu, codes, 16), &args) }
        }
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
