//! The transpose of a matrix.

use crate::backend::dispatch;
use crate::{Result, Tensor};

/// Returns the transpose of the matrix `x`: `[rows, cols]` → `[cols, rows]`.
///
/// Leading dimensions count as rows. The elements, of any dtype, are copied.
///
/// # Errors
/// The device is out of memory or failed.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6], [2, 3], &Device::cpu())?;
/// let y = ops::transpose(&x)?;
/// assert_eq!(y.shape().to_string(), "[3, 2]");
/// assert_eq!(y.to_vec::<i32>()?, [1, 4, 2, 5, 3, 6]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn transpose(x: &Tensor) -> Result<Tensor> {
    dispatch!(x.device(), transpose::transpose(x))
}
