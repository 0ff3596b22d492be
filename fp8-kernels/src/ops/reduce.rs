//! Sums, means and maxima of a float tensor, in f32. Their order depends on the shape alone, not on the number of threads.

use super::GradientMut;
use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// Returns the sum of all elements, as one f32 on the device of `x`; 0 if there are none.
///
/// `x` is f32, bf16 or f16 of any shape. Use `sum` and [`mean`] for the loss of a head of your own. The order of the sum
/// depends on the shape alone, so a result is the same each time.
///
/// # Errors
/// A dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// assert_eq!(ops::sum(&x)?.item()?, 10.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn sum(x: &Tensor) -> Result<Tensor> {
    x.expect_float("sum", "x")?;
    dispatch!(x.device(), reduce::sum(x))
}

/// Returns the mean of all elements, as one f32 on the device of `x`.
///
/// `x` is f32, bf16 or f16 of any shape. The elements are added as [`sum`] adds them.
///
/// # Errors
/// A tensor without elements; a dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// assert_eq!(ops::mean(&x)?.item()?, 2.5);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn mean(x: &Tensor) -> Result<Tensor> {
    x.expect_float("mean", "x")?;
    expect_elements("mean", x)?;
    dispatch!(x.device(), reduce::mean(x))
}

/// Returns the largest element, as one f32 on the device of `x`; NaN if any element is NaN.
///
/// `x` is f32, bf16 or f16 of any shape. The largest element, unlike [`amax`](super::amax()), has its sign and does not skip
/// NaN: use it to watch logits or attention scores, whose growth announces a divergence.
///
/// # Errors
/// A tensor without elements; a dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let logits = Tensor::from_vec(vec![1.0f32, -7.0, 3.0], [3], &Device::cpu())?;
/// assert_eq!(ops::max(&logits)?.item()?, 3.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn max(x: &Tensor) -> Result<Tensor> {
    x.expect_float("max", "x")?;
    expect_elements("max", x)?;
    dispatch!(x.device(), reduce::max(x))
}

/// Returns the sum of each column of `x`, `[.., cols]`, as f32 `[cols]`; zeros if there are no rows.
///
/// `x` is f32, bf16 or f16. This is the gradient of a vector that [`bias`](super::bias()) added to each row.
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

/// Writes the sums that [`column_sums`] returns to `out`, or adds them to it.
///
/// # Errors
/// Those of [`column_sums`]; an `out` that is not f32 `[cols]`, is on another device or shares its storage.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// let mut main_grad = Tensor::full(1.0, [2], DType::F32, &Device::cpu())?;
/// ops::column_sums_into(&dy, &mut ops::GradientMut::new(&mut main_grad, "bias", ops::Update::Add))?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [5.0, 7.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn column_sums_into(x: &Tensor, out: &mut GradientMut<'_>) -> Result<()> {
    let op = "column_sums_into";
    x.expect_float(op, "x")?;
    out.expect(op, "out and the columns of x", x.shape().last_dim(), x.device())?;
    dispatch!(x.device(), reduce::column_sums_into(x, out))
}

fn expect_elements(op: &'static str, x: &Tensor) -> Result<()> {
    if x.numel() > 0 {
        return Ok(());
    }
    Err(Error::Shape { op, shape: *x.shape(), remedy: "has no elements: expected at least one".to_owned() })
}
