//! Quantize a tensor to FP8 with one scale.
//!
//! `amax = max |x|` before scaling; `code = satfinite_rne(x · scale)`, one f32 multiplication; `scale_inv = 1 / scale`.
//! Input f32, bf16 or f16 of any shape, taken as the matrix `[product of the leading dimensions, last]`; the output has
//! the same shape, and its transpose when the slot wants one and the device makes it with the cast. One read of `x`, two
//! where the scale comes from the tensor itself. A tensor of no elements records no amax. Bits are equal on all backends.

use crate::device::Backend;
use crate::{Operand, Result, Slot, Tensor, cpu};

/// Quantizes `x` as `slot` says, or hands it through in high precision.
///
/// # Errors
/// A dtype that is not a float; a user's scale policy that returns no usable scale.
pub fn quantize(x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    x.expect_float("quantize", "x")?;
    match x.device().backend() {
        Backend::Cpu => cpu::quantize::quantize(x, slot),
    }
}

/// [`quantize`], and the column sums of the unquantized values: a Linear's bias gradient, `[cols]` in f32.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_dbias(dy: &Tensor, slot: &Slot<'_>) -> Result<(Operand, Tensor)> {
    let op = "quantize_dbias";
    dy.expect_float(op, "dy")?;
    match dy.device().backend() {
        Backend::Cpu => Ok((cpu::quantize::quantize(dy, slot)?, cpu::reduce::column_sums(dy)?)),
    }
}
