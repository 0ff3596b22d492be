//! `out += x` in f32, or `out = x`.

use super::Update;
use crate::backend::dispatch;
use crate::{DType, Result, Tensor};

/// Adds `x` to `out` in place: `out += f32(x)`.
///
/// Use it for gradients that no GEMM accumulates, such as those of biases and norm weights. `out` is f32; `x` is f32, bf16 or
/// f16 and has the same shape. `name` identifies `out` in errors.
///
/// # Errors
/// Different shapes or devices; `out` that is not f32 or shares its storage; `x` that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let mut main_grad = Tensor::from_vec(vec![1.0f32, 2.0], [2], &Device::cpu())?;
/// let dbias = Tensor::from_vec(vec![0.5f32, -4.0], [2], &Device::cpu())?;
/// ops::accumulate(&mut main_grad, &dbias, "fc1.bias.main_grad")?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [1.5, -2.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn accumulate(out: &mut Tensor, x: &Tensor, name: &str) -> Result<()> {
    update("accumulate", out, x, Update::Add, name)
}

/// Stores `x` in `out` as f32: adds it, as [`accumulate`](accumulate()) does, or replaces what `out` holds.
///
/// # Errors
/// Those of [`accumulate`](accumulate()).
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let mut main_grad = Tensor::from_vec(vec![f32::NAN; 2], [2], &Device::cpu())?; // from another step
/// let dbias = Tensor::from_vec(vec![0.5f32, -4.0], [2], &Device::cpu())?;
/// ops::store(&mut main_grad, &dbias, ops::Update::Write, "fc1.bias.main_grad")?;
/// ops::store(&mut main_grad, &dbias, ops::Update::Add, "fc1.bias.main_grad")?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [1.0, -8.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn store(out: &mut Tensor, x: &Tensor, how: Update, name: &str) -> Result<()> {
    update("store", out, x, how, name)
}

fn update(op: &'static str, out: &mut Tensor, x: &Tensor, how: Update, name: &str) -> Result<()> {
    out.expect_dtype(op, "out", DType::F32)?;
    x.expect_float(op, "x")?;
    out.expect_same_shape(op, "out and x", x)?;
    out.device().expect_same(op, x.device())?;
    dispatch!(out.device(), accumulate::store(out, x, how, name))
}
