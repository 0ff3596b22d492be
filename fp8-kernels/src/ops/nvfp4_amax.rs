//! The amaxes from which the factors of a tensor in NVFP4 come.

use crate::backend::dispatch;
use crate::{Result, Tensor};

/// Returns the amaxes of the copies of `x` in NVFP4, f32 `[2]` on its device: `max |x|`, and that of the columnwise copy, which has its
/// own if it is Hadamard-transformed.
///
/// `x` is f32, bf16 or f16 of any shape. NaN is skipped, and so is what a transform makes of one; an infinity counts, and a tensor
/// without elements gives 0. The result has the same bits on every backend. [`quantize`](super::quantize()) computes it by itself; call
/// `nvfp4_amax` for a part of a tensor, and pass the maximum over all parts as [`Nvfp4Rule::amax`](crate::Nvfp4Rule::amax).
///
/// # Errors
/// A dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let x = Tensor::from_vec(vec![4.0f32, 0.0, 0.0, -8.0], [2, 2], &Device::cpu())?; // two tokens
/// assert_eq!(ops::nvfp4_amax(&x, false)?.to_vec::<f32>()?, [8.0, 8.0]);
/// assert_eq!(ops::nvfp4_amax(&x, true)?.to_vec::<f32>()?, [8.0, 2.0]); // a quarter of it, 16 times
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn nvfp4_amax(x: &Tensor, hadamard: bool) -> Result<Tensor> {
    x.expect_float("nvfp4_amax", "x")?;
    dispatch!(x.device(), nvfp4::amax(x, hadamard))
}
