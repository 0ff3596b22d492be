//! Transpose a matrix: `[rows, cols]` → `[cols, rows]`, any element type. Leading dimensions count as rows.

use crate::backend::dispatch;
use crate::{Result, Tensor};

/// The transpose of `x`.
///
/// # Errors
/// None on the CPU.
pub fn transpose(x: &Tensor) -> Result<Tensor> {
    dispatch!(x.device(), transpose::transpose(x))
}
