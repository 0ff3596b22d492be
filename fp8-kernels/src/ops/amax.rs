//! The largest absolute value of a tensor.

use crate::backend::dispatch;
use crate::{Result, Tensor};

/// Returns `max |x|` over all elements, as one f32 on the device of `x`.
///
/// `x` is f32, bf16 or f16 of any shape. NaN is skipped, an infinity counts, and a tensor without elements gives 0. The
/// result has the same bits on every backend. A slot records the same number when [`quantize`](super::quantize()) runs; call
/// `amax` to have it first, for example to reduce it over ranks before the scale is computed
/// ([`scale_from_amax`](super::scale_from_amax())).
///
/// # Errors
/// A dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, -3.5, f32::NAN], [3], &Device::cpu())?;
/// assert_eq!(ops::amax(&x)?.item()?, 3.5);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn amax(x: &Tensor) -> Result<Tensor> {
    x.expect_float("amax", "x")?;
    dispatch!(x.device(), amax::amax(x))
}
