//! An operand that a closure of the caller computes and quantizes.

use super::Quantized;
use crate::{Error, Result};
use fp8_kernels::{DType, Operand, Slot, Tensor, ops};

/// A tensor of a layer that a closure of the caller computes and quantizes.
pub(crate) struct Fused<'a> {
    pub(crate) layer: &'a str,
    /// The name of the tensor in errors.
    pub(crate) name: &'static str,
    /// The dtype that the layer computes in.
    pub(crate) dtype: DType,
    /// Whether a GEMM that reads the tensor runs in high precision.
    pub(crate) needs_values: bool,
    /// Whether the scope measures how exact the codes are, which needs the values, too.
    pub(crate) measures: bool,
}

/// The results of the caller's closure.
pub(crate) struct Ran<T> {
    pub(crate) quantized: Quantized,
    /// The values in the dtype of the layer, if they are measured.
    pub(crate) values: Option<Tensor>,
    pub(crate) rest: T,
}

impl Fused<'_> {
    /// Calls `quantize` with the slot. If only one of the two GEMMs runs in FP8, or the codes are measured, calls it again
    /// with a slot that is off. `check` refuses operands that do not fit the layer.
    pub(crate) fn run<T>(
        &self,
        slot: &Slot<'_>,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
        check: impl Fn(&Operand) -> Result<()>,
    ) -> Result<Ran<T>> {
        let mut checked = |slot: &Slot<'_>| self.checked(slot, &mut quantize, &check);
        let (operand, rest) = checked(slot)?;
        let mut compute = || Ok(checked(&Slot::off(slot.encoding))?.0.dequantize(self.dtype)?);
        let values = (self.measures && operand.is_fp8()).then(&mut compute).transpose()?;
        let quantized = Quantized::new(operand, self.needs_values, || match &values {
            Some(values) => Ok(values.clone()),
            None => compute(),
        })?;
        Ok(Ran { quantized, values, rest })
    }

    /// Calls `quantize` once. Values come in the layer's dtype.
    fn checked<T>(
        &self,
        slot: &Slot<'_>,
        quantize: &mut impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
        check: &impl Fn(&Operand) -> Result<()>,
    ) -> Result<(Operand, T)> {
        let (operand, rest) = self.raw(slot, quantize, check)?;
        Ok((self.in_dtype(operand)?, rest))
    }

    /// Calls `quantize` once. Values come in the dtype in which `quantize` computes them.
    pub(crate) fn raw<T>(
        &self,
        slot: &Slot<'_>,
        quantize: &mut impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
        check: &impl Fn(&Operand) -> Result<()>,
    ) -> Result<(Operand, T)> {
        let (operand, rest) = quantize(slot)?;
        check(&operand)?;
        self.check_slot(&operand, slot)?;
        Ok((operand, rest))
    }

    /// Returns an operand whose values, if it has some, are in the layer's dtype.
    pub(crate) fn in_dtype(&self, operand: Operand) -> Result<Operand> {
        match operand {
            Operand::High(values) => Ok(Operand::High(ops::cast(&values, self.dtype)?)),
            codes => Ok(codes),
        }
    }

    /// Refuses an operand in another format than the slot's, which another slot must have quantized.
    fn check_slot(&self, operand: &Operand, slot: &Slot<'_>) -> Result<()> {
        let found = operand.as_fp8().map(|codes| codes.encoding());
        let expected = (!slot.is_off()).then_some(slot.encoding);
        if found == expected {
            return Ok(());
        }
        let [found, expected] = [found, expected].map(|encoding| match encoding {
            Some(encoding) => encoding.to_string(),
            None => "high precision".to_owned(),
        });
        Err(Error::FusedOperand { layer: self.layer.to_owned(), argument: self.name, found, expected })
    }
}
