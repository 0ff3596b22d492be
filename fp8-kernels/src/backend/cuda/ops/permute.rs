//! `permute` on a GPU.

use super::split::unit;
use super::{Gpu, Grid, In, Out, kernels};
use crate::ops::Order;
use crate::{Result, Shape, Tensor};

/// `shape` is the result's.
pub(crate) fn permute(gpu: &Gpu, x: &Tensor, order: &Order, shape: Shape) -> Result<Tensor> {
    let out = gpu.alloc(x.dtype(), x.numel())?;
    let size = x.dtype().size();
    let Order { mut dims, mut strides } = *order;
    // Where the last dimension stays the last, its rows are copied in the largest units that divide them. They then divide the
    // other strides, too, which are multiples of such a row.
    let mut bytes = size;
    if strides[5] == 1 {
        bytes = unit(&[dims[5] * size]);
        dims[5] = dims[5] * size / bytes;
        strides = strides.map(|stride| stride * size / bytes);
        strides[5] = 1;
    }
    let [_, d1, d2, d3, d4, d5] = dims.map(|dim| dim as u64);
    let [s0, s1, s2, s3, s4, s5] = strides.map(|stride| stride as u64);
    let units = x.numel() * size / bytes;
    let kernel = gpu.load(kernels::PERMUTE)?;
    let args = kernels::Permute {
        x: In::void(x.cuda("permute")?),
        y: Out::void(&out),
        n: units as u64,
        d1,
        d2,
        d3,
        d4,
        d5,
        s0,
        s1,
        s2,
        s3,
        s4,
        s5,
        unit: bytes as i32,
    };
    // SAFETY: both have n units of so many bytes, and the order names each unit of x once.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, units as u64), &args) }?;
    Ok(Tensor::from_cuda(out, shape, x.device()))
}
