//! `add`, `mul`, `bias` and `scale` on a GPU.

use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::{Result, Tensor};

/// Room for the elements of `x`.
fn like(gpu: &Gpu, x: &Tensor) -> Result<Buffer> {
    gpu.alloc(x.dtype(), x.numel())
}

pub(crate) fn add(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (left, right, len) = (a.cuda("add")?, b.cuda("add")?, a.numel());
    let y = like(gpu, a)?;
    let kernel = gpu.load(kernels::ELEMENTWISE_ADD)?;
    let args = kernels::Elementwise {
        a: In::void(left),
        b: In::void(right),
        y: Out::void(&y),
        n: len as u64,
        a_type: dtype_number(a.dtype()),
        b_type: dtype_number(b.dtype()),
    };
    // SAFETY: a, b and y have n elements each (checked by `ops::add`; y made above), of those types.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *a.shape(), a.device()))
}

pub(crate) fn mul(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (left, right, len) = (a.cuda("mul")?, b.cuda("mul")?, a.numel());
    let y = like(gpu, a)?;
    let kernel = gpu.load(kernels::ELEMENTWISE_MUL)?;
    let args = kernels::Elementwise {
        a: In::void(left),
        b: In::void(right),
        y: Out::void(&y),
        n: len as u64,
        a_type: dtype_number(a.dtype()),
        b_type: dtype_number(b.dtype()),
    };
    // SAFETY: a, b and y have n elements each (checked by `ops::mul`; y made above), of those types.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *a.shape(), a.device()))
}

pub(crate) fn bias(gpu: &Gpu, x: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (values, row, len) = (x.cuda("bias")?, bias.cuda("bias")?, x.numel());
    let y = like(gpu, x)?;
    let kernel = gpu.load(kernels::ELEMENTWISE_BIAS)?;
    let (x_type, bias_type) = (dtype_number(x.dtype()), dtype_number(bias.dtype()));
    let args = kernels::ElementwiseBias {
        x: In::void(values),
        bias: In::void(row),
        y: Out::void(&y),
        n: len as u64,
        cols: bias.numel() as u64,
        x_type,
        bias_type,
    };
    // SAFETY: x and y have n elements, a multiple of cols, the bias cols (checked by `ops::bias`), of those types.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

pub(crate) fn scale(gpu: &Gpu, x: &Tensor, factor: f32) -> Result<Tensor> {
    let (values, len) = (x.cuda("scale")?, x.numel());
    let y = like(gpu, x)?;
    let kernel = gpu.load(kernels::ELEMENTWISE_SCALE)?;
    let args = kernels::ElementwiseScale {
        x: In::void(values),
        y: Out::void(&y),
        n: len as u64,
        dtype: dtype_number(x.dtype()),
        factor,
    };
    // SAFETY: x and y have n elements of that type.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

pub(crate) fn scale_in_place(gpu: &Gpu, x: &mut Tensor, factor: f32, name: &str) -> Result<()> {
    launch_in_place(gpu, x, factor, 0, name)
}

pub(crate) fn clip_in_place(
    gpu: &Gpu,
    x: &mut Tensor,
    norm: &Tensor,
    max_norm: f32,
    name: &str,
) -> Result<()> {
    launch_in_place(gpu, x, max_norm, norm.cuda("clip_in_place")?.ptr(), name)
}

/// `norm` is the address of one f32, or 0.
fn launch_in_place(gpu: &Gpu, x: &mut Tensor, factor: f32, norm: u64, name: &str) -> Result<()> {
    let (len, dtype) = (x.numel(), dtype_number(x.dtype()));
    let values = x.cuda_mut(name)?;
    let kernel = gpu.load(kernels::ELEMENTWISE_SCALE_IN_PLACE)?;
    let args = kernels::ElementwiseScaleInPlace {
        x: Out::void(values),
        n: len as u64,
        dtype,
        factor,
        norm: In::f32(norm),
    };
    // SAFETY: x has n elements of that type, which nobody else holds; the norm is null or one f32.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }
}
