//! The results of reductions, which all ranks find alike in the messages of an exchange.

use crate::message::{Message, call_of};
use crate::{Error, ReduceOp, Result, host};
use fp8_kernels::{DType, Tensor};

/// Returns the elements that came with the messages.
pub(super) fn data(all: &[Message]) -> Vec<&Tensor> {
    all.iter().filter_map(|message| message.part.as_ref()?.data.as_ref()).collect()
}

/// Returns the result of a reduction, or why there is none, which all ranks find alike.
pub(crate) fn reduced(all: &[Message], dtype: DType, op: ReduceOp) -> Result<Tensor> {
    if !host::is_reducible(dtype, op) {
        return Err(not_reducible(&call_of(all), dtype, op));
    }
    match data(all).as_slice() {
        [result] => Ok((*result).clone()),
        // There was no room for it, or no sum that fits.
        parts => host::reduce(parts, op)?.ok_or_else(|| Error::Overflow { call: call_of(all) }),
    }
}

/// The error for a dtype that does not have an operation.
pub(crate) fn not_reducible(call: &str, found: DType, op: ReduceOp) -> Error {
    let expected = match op {
        ReduceOp::Avg => "f32, bf16 or f16",
        ReduceOp::Sum | ReduceOp::Max => "f32, bf16, f16 or i32",
    };
    Error::DType { call: call.to_owned(), found, expected }
}
