//! Memory that callers give for results.

use crate::{Error, Result, host};
use fp8_kernels::{DType, Shape, Tensor};

/// Describes a tensor: "[4, 3] of f32".
pub(crate) fn of(shape: Shape, dtype: DType) -> String {
    format!("{shape} of {dtype}")
}

/// Returns an error unless a result of this shape and dtype fits into `out`.
pub(crate) fn expect(out: &Tensor, shape: Shape, dtype: DType, call: impl Fn() -> String) -> Result<()> {
    if *out.shape() == shape && out.dtype() == dtype {
        return Ok(());
    }
    let (expected, found) = (of(shape, dtype), of(*out.shape(), out.dtype()));
    Err(Error::Output { call: call(), expected, found })
}

/// Copies a result to `out`. `name` is that of `out` in errors.
pub(crate) fn store(result: &Tensor, out: &mut Tensor, call: impl Fn() -> String, name: &str) -> Result<()> {
    expect(out, *result.shape(), result.dtype(), call)?;
    host::store(&host::copy(result)?, out, name)
}
