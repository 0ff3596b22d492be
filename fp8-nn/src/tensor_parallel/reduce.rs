//! Sums of the parts of a product that ranks have computed, and gathers in high precision.

use super::TensorParallel;
use crate::Result;
use fp8_dist::{ReduceOp, quantized_all_gather};
use fp8_kernels::{DType, Encoding, Slot, Tensor, ops};

impl TensorParallel {
    /// Adds the ranks' parts of a product, `[.., n]`, in the dtype that they have, and returns the sum in `dtype`: all of it, or with
    /// sequence parallelism this rank's tokens, `[tokens / ranks, n]`.
    pub(crate) fn sum(&self, what: &str, part: Tensor, dtype: DType) -> Result<Tensor> {
        let sum = if self.is_sequence_parallel() {
            self.reduce_scatter(what, &part)?
        } else {
            let mut part = part;
            self.group().all_reduce_in_place(what, &mut part, ReduceOp::Sum)?;
            part
        };
        Ok(ops::cast(&sum, dtype)?)
    }

    /// Adds the ranks' parts of a tensor of all tokens, and returns this rank's tokens of the sum.
    pub(crate) fn reduce_scatter(&self, what: &str, part: &Tensor) -> Result<Tensor> {
        let part = part.reshape(part.shape().matrix())?;
        Ok(self.group().reduce_scatter(what, &part, ReduceOp::Sum)?)
    }

    /// Joins the rows of all ranks in high precision. Once a name and shape are known, no host takes part.
    pub(crate) fn gather(&self, what: &str, rows: &Tensor) -> Result<Tensor> {
        let whole = quantized_all_gather(&**self.group(), what, rows, &Slot::off(Encoding::E4M3))?;
        Ok(whole.dequantize(rows.dtype())?)
    }
}
