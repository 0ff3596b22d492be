//! `cast` on a GPU.

use super::{Gpu, Grid, Source, args, dtype_number};
use crate::{DType, Result, Tensor};

pub(crate) fn cast(gpu: &Gpu, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let (values, len) = (x.cuda("cast")?, x.numel());
    let y = gpu.alloc(dtype, len)?;
    let kernel = gpu.kernel(Source::Cast, "cast")?;
    let args = args![values, &y, len as u64, dtype_number(x.dtype()), dtype_number(dtype)];
    // SAFETY: the kernel's parameters (x, y, n, from, to); x and y have n elements of those types, which are floats
    // (checked by `ops::cast`).
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}
