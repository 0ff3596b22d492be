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

/// Computes a result and copies it to `out`, for groups that do not write it there. If this rank's `out` is not fit for it, `poison`
/// tells the others.
pub(crate) fn store(
    out: &mut Tensor,
    name: &str,
    call: impl Fn() -> String,
    compute: impl FnOnce(&Tensor) -> Result<Tensor>,
    poison: impl Fn(&str),
) -> Result<()> {
    let tell = |error: &Error| poison(&error.to_string());
    expect_own(out, name).inspect_err(tell)?;
    let result = compute(out)?;
    let stored = expect(out, *result.shape(), result.dtype(), call)
        .and_then(|()| host::copy(&result))
        .and_then(|result| host::store(&result, out, name));
    stored.inspect_err(tell)
}

/// Returns an error if the storage is shared.
pub(crate) fn expect_own(x: &Tensor, name: &str) -> Result<()> {
    match x.holders() {
        0 => Ok(()),
        holders => Err(fp8_kernels::Error::Shared { name: name.to_owned(), holders }.into()),
    }
}
