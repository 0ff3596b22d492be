//! Cutting a tensor along its last dimension, and joining tensors along it. Any element type; bytes are copied.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// Cuts `[.., n]` into `[.., sizes[0]]`, `[.., sizes[1]]`, …
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

/// Joins `[.., n₀]`, `[.., n₁]`, … to `[.., n₀ + n₁ + …]`.
///
/// # Errors
/// No parts; parts of different leading dimensions, dtypes or devices; parts that together have more elements than a tensor
/// can have.
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
