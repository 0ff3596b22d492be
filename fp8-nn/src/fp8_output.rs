//! GEMMs whose results stay in FP8 for the next operation, with slots of their own.

use crate::Result;
use fp8_kernels::ops::{self, Accumulation};
use fp8_kernels::{DType, Operand, Scale, Slot, Tensor};
use fp8_recipe::{Backward, Forward, Origin, SlotName};

/// The slot with which dgrad writes its result, and whether the result is FP8.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GradInput<'a> {
    /// A backward slot of the layer.
    pub(crate) slot: &'a SlotName,
    /// Whether the reader takes codes. If not, the gradient stays in high precision, and only its amax is recorded.
    pub(crate) in_fp8: bool,
}

/// Returns whether a slot makes codes with one scale, or records the amax of a tensor that stays in high precision.
pub(crate) fn is_used(slot: &Slot<'_>) -> bool {
    slot.has_one_scale() || slot.is_off() && slot.amax.is_some()
}

/// Computes `x · wᵀ + bias`, quantized with `output` where that has one scale.
pub(crate) fn fprop(
    cx: &mut Forward<'_>,
    output: Option<&SlotName>,
    [x, w]: &[Operand; 2],
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    let high = || ops::fprop(x, w, bias, dtype, accumulation);
    let Some(name) = output else { return Ok(Operand::High(high()?)) };
    let slot = cx.slot(name)?.rowwise_only();
    if !is_used(&slot) {
        return Ok(Operand::High(high()?));
    }
    let y = ops::fprop_quantize(x, w, bias, &slot, dtype, accumulation)?;
    if cx.measures_sqnr() && y.is_fp8() {
        cx.measure_sqnr(name, &high()?, &y)?;
    }
    Ok(y)
}

/// Quantizes a result that could not be written by the GEMM, as [`fprop`] does.
pub(crate) fn forward_result(cx: &mut Forward<'_>, output: Option<&SlotName>, y: Tensor) -> Result<Operand> {
    let Some(name) = output else { return Ok(Operand::High(y)) };
    let slot = cx.slot(name)?.rowwise_only();
    if !is_used(&slot) {
        return Ok(Operand::High(y));
    }
    let codes = ops::quantize(&y, &slot)?;
    if cx.measures_sqnr() && codes.is_fp8() {
        cx.measure_sqnr(name, &y, &codes)?;
    }
    Ok(codes)
}

/// Quantizes a gradient that could not be written by the GEMM, as [`dgrad`] does.
pub(crate) fn backward_result(
    cx: &mut Backward<'_>,
    origin: &Origin,
    grad_input: Option<GradInput<'_>>,
    dx: Tensor,
) -> Result<Operand> {
    let Some(GradInput { slot: name, in_fp8 }) = grad_input else { return Ok(Operand::High(dx)) };
    let mut slot = cx.slot(origin, name)?.rowwise_only();
    if !is_used(&slot) {
        return Ok(Operand::High(dx));
    }
    if !in_fp8 {
        slot.scale = Scale::Off;
    }
    let codes = ops::quantize(&dx, &slot)?;
    if cx.measures_sqnr(origin) && codes.is_fp8() {
        cx.measure_sqnr(origin, name, &dx, &codes)?;
    }
    Ok(codes)
}

/// Computes `dy · w`, quantized with the slot of `grad_input` where that has one scale.
pub(crate) fn dgrad(
    cx: &mut Backward<'_>,
    origin: &Origin,
    grad_input: Option<GradInput<'_>>,
    [dy, w]: [&Operand; 2],
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    let high = || ops::dgrad(dy, w, dtype, accumulation);
    let Some(GradInput { slot: name, in_fp8 }) = grad_input else { return Ok(Operand::High(high()?)) };
    let mut slot = cx.slot(origin, name)?.rowwise_only();
    if !is_used(&slot) {
        return Ok(Operand::High(high()?));
    }
    if !in_fp8 {
        slot.scale = Scale::Off;
    }
    let dx = ops::dgrad_quantize(dy, w, &slot, dtype, accumulation)?;
    if cx.measures_sqnr(origin) && dx.is_fp8() {
        cx.measure_sqnr(origin, name, &high()?, &dx)?;
    }
    Ok(dx)
}

/// The values of a result that no slot quantized.
pub(crate) fn in_high_precision(x: Operand) -> Result<Tensor> {
    match x {
        Operand::High(values) => Ok(values),
        Operand::Fp8(codes) => Ok(codes.dequantize(DType::F32)?),
    }
}
