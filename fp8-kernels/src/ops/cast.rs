//! Conversion between f32, bf16 and f16.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Converts `x` to `dtype`: to the nearest value, ties to even.
///
/// Both types are f32, bf16 or f16. Values are rounded once, and widening to f32 is exact; values beyond the range of f16
/// become infinite. A NaN becomes 0x7FFF in bf16 and f16, as in every operation that rounds to 16 bits, and keeps its sign and
/// payload in f32. If `x` already has the dtype, the result shares its storage.
///
/// # Errors
/// A dtype that is not a float.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, bf16, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 1.0 + 1.0 / 256.0], [2], &Device::cpu())?;
/// assert_eq!(ops::cast(&x, DType::BF16)?.to_vec::<bf16>()?, [bf16::ONE, bf16::ONE]); // a tie goes to even
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    x.expect_float("cast", "x")?;
    if !dtype.is_float() {
        return Err(Error::DType {
            op: "cast",
            what: "the output",
            found: dtype,
            expected: "f32, bf16 or f16",
        });
    }
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    dispatch!(x.device(), cast::cast(x, dtype))
}
