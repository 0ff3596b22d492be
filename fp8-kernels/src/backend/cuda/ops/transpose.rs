//! `transpose` on a GPU, by the size of an element.

use super::tiles::{self, tiles};
use super::{Gpu, Source, args};
use crate::{Result, Shape, Tensor};

/// Rows and columns of a tile of elements of 2 or 4 bytes, as the kernels have them.
const SIDE: usize = 64;

pub(crate) fn transpose(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let [rows, cols] = x.shape().matrix();
    let out = gpu.alloc(x.dtype(), x.numel())?;
    let squares = rows.div_ceil(SIDE) * cols.div_ceil(SIDE);
    let (name, tiles) = match x.dtype().size() {
        1 => ("transpose_u8", tiles(rows, cols)),
        2 => ("transpose_u16", squares),
        _ => ("transpose_u32", squares),
    };
    let kernel = gpu.kernel(Source::Transpose, name)?;
    let args = args![x.cuda("transpose")?, rows as u64, cols as u64, &out];
    // SAFETY: the kernel's parameters (x, rows, cols, out); both hold rows · cols elements of its size.
    unsafe { kernel.launch(gpu, tiles::grid(gpu, tiles, 16), &args) }?;
    Ok(Tensor::from_cuda(out, Shape::from([cols, rows]), x.device()))
}
