//! Sums and products element by element, in f32, rounded once.

use super::gemm::check_bias;
use crate::backend::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Returns `a + b`, as when a residual connection is added.
///
/// Both have the same shape and are f32, bf16 or f16, also different ones. They are added in f32 and rounded once to `a`'s
/// dtype.
///
/// # Errors
/// Different shapes or devices; dtypes that are not floats.
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

/// Returns the products `a · b` element by element, as when an activation is multiplied by a gate.
///
/// Both have the same shape and are f32, bf16 or f16, also different ones. They are multiplied in f32 and rounded once to `a`'s
/// dtype.
///
/// # Errors
/// Different shapes or devices; dtypes that are not floats.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let a = Tensor::from_vec(vec![1.5f32, -2.0], [2], &Device::cpu())?;
/// let b = Tensor::from_vec(vec![2.0f32, 4.0], [2], &Device::cpu())?;
/// assert_eq!(ops::mul(&a, &b)?.to_vec::<f32>()?, [3.0, -8.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.expect_float("mul", "a")?;
    b.expect_float("mul", "b")?;
    a.expect_same_shape("mul", "a and b", b)?;
    a.device().expect_same("mul", b.device())?;
    dispatch!(a.device(), elementwise::mul(a, b))
}

/// Adds `bias`, `[n]`, to each row of `x`, `[.., n]`.
///
/// Both are f32, bf16 or f16. They are added in f32 and rounded once to the dtype of `x`. [`fprop`](super::fprop) and the
/// other GEMMs take a bias themselves; use `bias` after a product whose bias has to be added later, such as that of a
/// row-parallel layer, which must be added once after the ranks' results have been summed.
///
/// # Errors
/// A bias whose length is not the last dimension; different devices; dtypes that are not floats.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// let b = Tensor::from_vec(vec![10.0f32, 20.0], [2], &Device::cpu())?;
/// assert_eq!(ops::bias(&x, &b)?.to_vec::<f32>()?, [11.0, 22.0, 13.0, 24.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn bias(x: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.expect_float("bias", "x")?;
    check_bias("bias", Some(bias), x.shape().last_dim(), x)?;
    dispatch!(x.device(), elementwise::bias(x, bias))
}

/// Returns `x · factor`, computed in f32 and rounded once to the dtype of `x`.
///
/// `factor` is an argument of the launch: a graph that records the call uses the same factor at each replay.
///
/// # Errors
/// A dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, -3.0], [2], &Device::cpu())?;
/// assert_eq!(ops::scale(&x, 0.5)?.to_vec::<f32>()?, [0.5, -1.5]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn scale(x: &Tensor, factor: f32) -> Result<Tensor> {
    x.expect_float("scale", "x")?;
    dispatch!(x.device(), elementwise::scale(x, factor))
}

/// Multiplies `x` by `factor` in place, for example to average accumulated gradients. `name` identifies `x` in errors.
///
/// The product is computed in f32 and rounded once. A graph that records the call uses the same factor at each replay.
///
/// # Errors
/// Shared storage; a dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let mut main_grad = Tensor::from_vec(vec![8.0f32, -4.0], [2], &Device::cpu())?;
/// ops::scale_in_place(&mut main_grad, 0.25, "fc1.weight.main_grad")?; // the mean over four micro-batches
/// assert_eq!(main_grad.to_vec::<f32>()?, [2.0, -1.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn scale_in_place(x: &mut Tensor, factor: f32, name: &str) -> Result<()> {
    x.expect_float("scale_in_place", "x")?;
    dispatch!(x.device(), elementwise::scale_in_place(x, factor, name))
}

/// Multiplies `x` by `max_norm / norm` in place if `norm` is finite and larger than `max_norm`; else leaves it unchanged.
///
/// Clips gradients: pass the [`grad_norm`](super::grad_norm()) of all of them and call this for each. `norm` is one f32 on the
/// device of `x`, which is not read to the host. `name` identifies `x` in errors.
///
/// # Errors
/// Shared storage; a dtype that is not a float; a norm that is not one f32; a `max_norm` that is not greater than 0.
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
