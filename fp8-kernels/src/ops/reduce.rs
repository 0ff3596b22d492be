//! Sums, means and maxima of a float tensor, in f32. Orders depend on the shape alone: equal on any number of threads.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// The sum of all elements, one f32; 0 for none.
///
/// # Errors
/// A dtype that is not a float.
pub fn sum(x: &Tensor) -> Result<Tensor> {
    x.expect_float("sum", "x")?;
    dispatch!(x.device(), reduce::sum(x))
}

/// The mean of all elements, one f32.
///
/// # Errors
/// No elements, a dtype that is not a float.
pub fn mean(x: &Tensor) -> Result<Tensor> {
    x.expect_float("mean", "x")?;
    expect_elements("mean", x)?;
    dispatch!(x.device(), reduce::mean(x))
}

/// The largest element, one f32; NaN if there is one.
///
/// # Errors
/// No elements, a dtype that is not a float.
pub fn max(x: &Tensor) -> Result<Tensor> {
    x.expect_float("max", "x")?;
    expect_elements("max", x)?;
    dispatch!(x.device(), reduce::max(x))
}

/// The sum of each column: `[.., cols]` → `[cols]` in f32, whatever the dtype of `x`. Zeros for no rows.
///
/// # Errors
/// A dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// assert_eq!(ops::column_sums(&x)?.to_vec::<f32>()?, [4.0, 6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn column_sums(x: &Tensor) -> Result<Tensor> {
    x.expect_float("column_sums", "x")?;
    dispatch!(x.device(), reduce::column_sums(x))
}

fn expect_elements(op: &'static str, x: &Tensor) -> Result<()> {
    if x.numel() > 0 {
        return Ok(());
    }
    Err(Error::Shape { op, shape: *x.shape(), remedy: "has no elements: expected at least one".to_owned() })
}
