//! `accumulate` on a GPU.

use super::{Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::Update;
use crate::{Result, Tensor};

pub(crate) fn store(gpu: &Gpu, out: &mut Tensor, x: &Tensor, how: Update, name: &str) -> Result<()> {
    let (values, len) = (x.cuda("accumulate")?, x.numel());
    let sum = out.cuda_mut(name)?;
    let kernel = gpu.load(kernels::ACCUMULATE)?;
    // SAFETY: out has n f32 that nobody else holds, x n elements of that type (checked by `ops::accumulate`).
    unsafe {
        kernel.launch(
            gpu,
            Grid::flat(gpu, len),
            &kernels::Accumulate {
                out: Out::f32(sum),
                x: In::void(values),
                n: len as u64,
                dtype: dtype_number(x.dtype()),
                add: i32::from(how == Update::Add),
            },
        )
    }
}
