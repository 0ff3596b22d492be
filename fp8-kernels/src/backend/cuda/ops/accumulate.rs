//! `accumulate` on a GPU.

use super::{Gpu, Grid, Source, args, dtype_number};
use crate::{Result, Tensor};

pub(crate) fn accumulate(gpu: &Gpu, out: &mut Tensor, x: &Tensor, name: &str) -> Result<()> {
    let (values, len) = (x.cuda("accumulate")?, x.numel());
    let sum = out.cuda_mut(name)?;
    let kernel = gpu.kernel(Source::Accumulate, "accumulate")?;
    // SAFETY: the kernel's parameters (out, x, n, dtype); out has n f32 that nobody else holds, x n elements of that type
    // (checked by `ops::accumulate`).
    unsafe {
        kernel.launch(gpu, Grid::flat(gpu, len), &args![sum, values, len as u64, dtype_number(x.dtype())])
    }
}
