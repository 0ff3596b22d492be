//! A quantized tensor for GEMMs of different precisions.

use crate::Result;
use fp8_kernels::{DType, Operand, Tensor, ops};

/// A tensor that two GEMMs read. The recipe may run either of them in high precision.
#[derive(Debug)]
pub(crate) struct Quantized {
    /// The operand as it was quantized.
    operand: Operand,
    /// The values in high precision, if one GEMM needs them in addition to the codes.
    high: Option<Tensor>,
}

impl Quantized {
    /// Takes the quantized operand, and whether a GEMM that reads the tensor runs in high precision.
    ///
    /// `values` computes the same tensor in high precision. It is called only if a GEMM needs it. Its result is rounded, so
    /// it is never quantized: the codes must not depend on the precision of other GEMMs.
    pub(crate) fn new(
        operand: Operand,
        needs_values: bool,
        values: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        let high = (operand.is_fp8() && needs_values).then(values).transpose()?;
        Ok(Self { operand, high })
    }

    /// Takes both.
    pub(crate) const fn with_values(operand: Operand, high: Option<Tensor>) -> Self {
        Self { operand, high }
    }

    /// Returns the operand as it was quantized.
    pub(crate) fn operand(&self) -> &Operand {
        &self.operand
    }

    /// Returns the values, which were asked for, in `dtype`.
    pub(crate) fn values(&self, dtype: DType) -> Result<Tensor> {
        match &self.high {
            Some(high) => Ok(ops::cast(high, dtype)?),
            None => Ok(self.operand.dequantize(dtype)?),
        }
    }

    /// Returns the operand for a GEMM that runs in FP8, or in high precision.
    pub(crate) fn pick(&self, fp8: bool) -> Operand {
        match (&self.high, fp8) {
            (Some(high), false) => Operand::High(high.clone()),
            _ => self.operand.clone(),
        }
    }
}
