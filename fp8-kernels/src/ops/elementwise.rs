//! Sums and products element by element, in f32, rounded once.
//!
//! `add`: `f32(a) + f32(b)`. `bias`: `f32(x) + f32(bias)` on every row. `scale`: `f32(x) · factor`. Arguments f32, bf16 or
//! f16, also of different types; the output has the first one's shape and dtype.

use super::gemm::check_bias;
use crate::backend::dispatch;
use crate::{DType, Error, Result, Tensor};

/// `a + b` in `a`'s dtype.
///
/// # Errors
/// Different shapes, dtypes that are not floats.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let a = Tensor::from_vec(vec![1.0f32, 2.0], [2], &Device::cpu())?;
/// assert_eq!(ops::add(&a, &a)?.to_vec::<f32>()?, [2.0, 4.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.expect_float("add", "a")?;
    b.expect_float("add", "b")?;
    a.expect_same_shape("add", "a and b", b)?;
    a.device().expect_same("add", b.device())?;
    dispatch!(a.device(), elementwise::add(a, b))
}

/// `x` plus `bias` on each row: `[.., n]` and `[n]`, in `x`'s dtype.
///
/// # Errors
/// A bias of another length than the last dimension, dtypes that are not floats.
pub fn bias(x: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.expect_float("bias", "x")?;
    check_bias("bias", Some(bias), x.shape().last_dim(), x)?;
    dispatch!(x.device(), elementwise::bias(x, bias))
}

/// `x · factor` in `x`'s dtype.
///
/// # Errors
/// A dtype that is not a float.
pub fn scale(x: &Tensor, factor: f32) -> Result<Tensor> {
    x.expect_float("scale", "x")?;
    dispatch!(x.device(), elementwise::scale(x, factor))
}

/// `x *= factor`. `name` is what an error calls `x`.
///
/// # Errors
/// Shared storage, a dtype that is not a float.
pub fn scale_in_place(x: &mut Tensor, factor: f32, name: &str) -> Result<()> {
    x.expect_float("scale_in_place", "x")?;
    dispatch!(x.device(), elementwise::scale_in_place(x, factor, name))
}

/// `x *= max_norm / norm` where the `norm`, one f32 on the device of `x`, is larger than `max_norm` and finite; else nothing.
/// The host does not wait for it. `name` is what an error calls `x`.
///
/// # Errors
/// Shared storage, a dtype that is not a float, a norm that is not one f32, a `max_norm` that is not greater than 0.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let mut x = Tensor::from_vec(vec![3.0f32, 4.0], [2], &Device::cpu())?;
/// let norm = ops::grad_norm(&[&x])?;
/// ops::clip_in_place(&mut x, &norm, 1.0, "x")?;
/// assert_eq!(x.to_vec::<f32>()?, [3.0 * 0.2, 4.0 * 0.2]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn clip_in_place(x: &mut Tensor, norm: &Tensor, max_norm: f32, name: &str) -> Result<()> {
    let op = "clip_in_place";
    x.expect_float(op, "x")?;
    norm.expect_dtype(op, "norm", DType::F32)?;
    x.device().expect_same(op, norm.device())?;
    if norm.numel() != 1 {
        let remedy = "expected one number".to_owned();
        return Err(Error::Shape { op, shape: *norm.shape(), remedy });
    }
    if max_norm.is_nan() || max_norm <= 0.0 {
        let (option, value) = ("max_norm", max_norm.to_string());
        return Err(Error::Option { op, option, value, remedy: "expected greater than 0".to_owned() });
    }
    dispatch!(x.device(), elementwise::clip_in_place(x, norm, max_norm, name))
}
