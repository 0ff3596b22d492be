//! Transpose a matrix: `[rows, cols]` → `[cols, rows]`, any element type. Leading dimensions count as rows.

use crate::device::Backend;
use crate::{Result, Tensor, cpu};

/// The transpose of `x`.
///
/// # Errors
/// None on the CPU.
pub fn transpose(x: &Tensor) -> Result<Tensor> {
    match x.device().backend() {
        Backend::Cpu => Ok(cpu::transpose::transpose(x)),
    }
}
