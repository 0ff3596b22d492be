//! `out += x` in f32: gradients of parameters that no GEMM accumulates.

use crate::backend::dispatch;
use crate::{DType, Result, Tensor};

/// Adds `x`, of any float type, to `out` in place. `name` is what an error calls `out`.
///
/// # Errors
/// Shapes that differ, `out` not f32 or shared, `x` not a float.
pub fn accumulate(out: &mut Tensor, x: &Tensor, name: &str) -> Result<()> {
    let op = "accumulate";
    out.expect_dtype(op, "out", DType::F32)?;
    x.expect_float(op, "x")?;
    out.expect_same_shape(op, "out and x", x)?;
    out.device().expect_same(op, x.device())?;
    dispatch!(out.device(), accumulate::accumulate(out, x, name))
}
