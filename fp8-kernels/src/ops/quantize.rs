//! Quantize a tensor to FP8 with one scale.
//!
//! `amax = max |x|` before scaling; `code = satfinite_rne(x · scale)`, one f32 multiplication; `scale_inv = 1 / scale`.
//! Input f32, bf16 or f16 of any shape, taken as the matrix `[product of the leading dimensions, last]`; the output has
//! the same shape, and its transpose when the slot wants one and the device makes it with the cast. One read of `x`, two
//! where the scale comes from the tensor itself. A tensor of no elements records no amax. Bits are equal on all backends.

use crate::backend::dispatch;
use crate::{Operand, Result, Slot, Tensor};

/// Quantizes `x` as `slot` says, or hands it through in high precision.
///
/// # Errors
/// A dtype that is not a float; a user's scale policy that returns no usable scale.
pub fn quantize(x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    x.expect_float("quantize", "x")?;
    slot.expect_device("quantize", x.device())?;
    dispatch!(x.device(), quantize::quantize(x, slot))
}

/// [`quantize`], and the column sums of the unquantized values: a Linear's bias gradient, `[cols]` in f32.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_dbias(dy: &Tensor, slot: &Slot<'_>) -> Result<(Operand, Tensor)> {
    let op = "quantize_dbias";
    dy.expect_float(op, "dy")?;
    slot.expect_device(op, dy.device())?;
    dispatch!(dy.device(), quantize::quantize_dbias(dy, slot))
}

/// [`quantize`] of several tensors of one device, each as its slot says: the same bits, and on a GPU one launch for all
/// those that are quantized. Where two share a cell that is not set yet, the first of them sets it.
///
/// # Errors
/// As [`quantize`], before anything is launched; tensors on different devices.
pub fn quantize_many(tensors: &[(&Tensor, Slot<'_>)]) -> Result<Vec<Operand>> {
    let op = "quantize_many";
    let Some((first, _)) = tensors.first() else { return Ok(Vec::new()) };
    for (x, slot) in tensors {
        x.expect_float(op, "x")?;
        first.device().expect_same(op, x.device())?;
        slot.expect_device(op, x.device())?;
    }
    dispatch!(first.device(), quantize::quantize_many(tensors))
}
