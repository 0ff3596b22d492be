//! `cast` on a GPU.

use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::{DType, Result, Tensor};

pub(crate) fn cast(gpu: &Gpu, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let (values, len) = (x.cuda("cast")?, x.numel());
    let y = gpu.alloc(dtype, len)?;
    let kernel = gpu.load(kernels::CAST)?;
    let args = kernels::Cast {
        x: In::void(values),
        y: Out::void(&y),
        n: len as u64,
        from: dtype_number(x.dtype()),
        to: dtype_number(dtype),
    };
    // SAFETY: x and y have n elements of those types, which are floats (checked by `ops::cast`).
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}
