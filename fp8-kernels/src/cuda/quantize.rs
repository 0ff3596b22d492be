//! `quantize` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::{DType, Fp8Tensor, Operand, Result, Slot, Tensor};

pub(crate) fn quantize(_: &Gpu, _: &Tensor, _: &Slot<'_>) -> Result<Operand> {
    unsupported("quantize")
}

pub(crate) fn quantize_dbias(_: &Gpu, _: &Tensor, _: &Slot<'_>) -> Result<(Operand, Tensor)> {
    unsupported("quantize_dbias")
}

pub(crate) fn dequantize(_: &Gpu, _: &Fp8Tensor, _: DType) -> Result<Tensor> {
    unsupported("dequantize")
}
