//! GEMMs whose results stay in FP8 for the next operation, with slots of their own.

use crate::Result;
use fp8_kernels::ops::{self, Accumulation};
use fp8_kernels::{DType, Operand, Scale, Slot, Tensor};
use fp8_recipe::{Backward, Forward, Origin, SlotName};

/// The destination of a forward product's output.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Destination<'a> {
    /// A tensor in high precision.
    High,
    /// Codes, quantized with this slot of the layer.
    Slot(&'a SlotName),
    /// The sum with this tensor, a residual connection. The sum has its dtype.
    Residual(&'a Tensor),
}

impl<'a> From<Option<&'a SlotName>> for Destination<'a> {
    fn from(slot: Option<&'a SlotName>) -> Self {
        slot.map_or(Self::High, Self::Slot)
    }
}

impl<'a> From<Option<&'a Tensor>> for Destination<'a> {
    fn from(residual: Option<&'a Tensor>) -> Self {
        residual.map_or(Self::High, Self::Residual)
    }
}

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

/// Computes `x · wᵀ + bias`, quantized with the slot of `output` where that has one scale, or plus its residual.
pub(crate) fn fprop(
    cx: &mut Forward<'_>,
    output: Destination<'_>,
    [x, w]: &[Operand; 2],
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    let high = || ops::fprop(x, w, bias, dtype, accumulation);
    let name = match output {
        Destination::High => return Ok(Operand::High(high()?)),
        Destination::Residual(residual) => {
            let dtype = residual.dtype();
            return Ok(Operand::High(ops::fprop_add(x, w, residual, bias, dtype, accumulation)?));
        }
        Destination::Slot(name) => name,
    };
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

/// Quantizes a result that could not be written by the GEMM, or adds the residual to it, as [`fprop`] does.
pub(crate) fn forward_result(cx: &mut Forward<'_>, output: Destination<'_>, y: Tensor) -> Result<Operand> {
    let name = match output {
        Destination::High => return Ok(Operand::High(y)),
        Destination::Residual(residual) => {
            return Ok(Operand::High(ops::add(residual, &ops::cast(&y, residual.dtype())?)?));
        }
        Destination::Slot(name) => name,
    };
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
