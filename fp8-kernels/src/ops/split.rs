//! Splits a tensor along its last dimension, and joins tensors along it.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// Splits `x`, `[.., n]`, along its last dimension into `[.., sizes[0]]`, `[.., sizes[1]]`, …
///
/// For example, this splits the output of a fused QKV projection. The elements, of any dtype, are copied.
///
/// # Errors
/// Sizes that do not add up to the last dimension.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3], &Device::cpu())?;
/// let parts = ops::split(&x, &[1, 2])?;
/// assert_eq!(parts[0].to_vec::<f32>()?, [1.0, 4.0]);
/// assert_eq!(parts[1].to_vec::<f32>()?, [2.0, 3.0, 5.0, 6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn split(x: &Tensor, sizes: &[usize]) -> Result<Vec<Tensor>> {
    let (last, sum) = (x.shape().last_dim(), sizes.iter().fold(0, |sum: usize, &s| sum.saturating_add(s)));
    if sum != last {
        let remedy = format!("sizes {sizes:?} add up to {sum}: expected {last}, the last dimension");
        return Err(Error::Shape { op: "split", shape: *x.shape(), remedy });
    }
    dispatch!(x.device(), split::split(x, sizes))
}

/// Joins `[.., n₀]`, `[.., n₁]`, … along their last dimension to `[.., n₀ + n₁ + …]`.
///
/// The elements, of any dtype, are copied.
///
/// # Errors
/// An empty list; parts with different leading dimensions, dtypes or devices; a result with more elements than a tensor can
/// have.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let a = Tensor::from_vec(vec![1.0f32, 4.0], [2, 1], &Device::cpu())?;
/// let b = Tensor::from_vec(vec![2.0f32, 3.0, 5.0, 6.0], [2, 2], &Device::cpu())?;
/// let x = ops::concat(&[&a, &b])?;
/// assert_eq!(x.shape().to_string(), "[2, 3]");
/// assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn concat(parts: &[&Tensor]) -> Result<Tensor> {
    let Some((&first, others)) = parts.split_first() else {
        return Err(Error::Option {
            op: "concat",
            option: "parts",
            value: "[]".to_owned(),
            remedy: "expected at least one tensor".to_owned(),
        });
    };
    let leading = first.shape().with_last(0);
    for other in others {
        first.device().expect_same("concat", other.device())?;
        other.expect_dtype("concat", "a part", first.dtype())?;
        if other.shape().with_last(0) != leading {
            let (lhs, rhs) = (*first.shape(), *other.shape());
            let remedy = "parts may differ in their last dimension only";
            return Err(Error::Shapes { op: "concat", what: "two parts", lhs, rhs, remedy });
        }
    }
    let cols = parts.iter().fold(0, |cols: usize, part| cols.saturating_add(part.shape().last_dim()));
    let shape = first.shape().with_last(cols);
    shape.check_size("concat")?;
    dispatch!(first.device(), split::concat(first, parts, shape))
}
