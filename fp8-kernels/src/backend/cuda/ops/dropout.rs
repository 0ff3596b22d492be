//! `dropout` on a GPU.

use super::{Gpu, Grid, Source, args, dtype_number};
use crate::ops::DropoutKey;
use crate::{Result, Tensor};

/// What decides the mask, as the kernel reads it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Key {
    seed: u64,
    offset: u64,
    threshold: u32,
    factor: f32,
}

pub(crate) fn dropout(gpu: &Gpu, x: &Tensor, p: f32, key: DropoutKey) -> Result<Tensor> {
    gpu.expect_eager("dropout", "its mask would be the same at each replay")?;
    let (values, len) = (x.cuda("dropout")?, x.numel());
    let y = gpu.alloc(x.dtype(), len)?;
    let DropoutKey { seed, offset } = key;
    // Exact: p has 24 significant bits, and p < 1.
    let threshold = (f64::from(p) * 2f64.powi(32)) as u32;
    let key = gpu.upload(&[Key { seed, offset, threshold, factor: 1.0 / (1.0 - p) }])?;
    let kernel = gpu.kernel(Source::Dropout, "dropout")?;
    let args = args![values, &y, len as u64, dtype_number(x.dtype()), &key];
    // SAFETY: the kernel's parameters (x, y, n, dtype, key); x and y have n elements of that type, the key is laid out as
    // the kernel's and freed behind the launch.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}
