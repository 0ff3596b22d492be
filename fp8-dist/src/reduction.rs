//! The part of a collective that one place computes for all ranks.

use crate::message::{Message, Operation};
use crate::{ReduceOp, agreement, host};
use fp8_kernels::Tensor;

/// Reduces messages that agree to what the ranks need: for a reduction the result alone, as rank 0's part; for a comparison of
/// state the first difference. Where there is no result, for a dtype without the operation or a sum that does not fit, the parts
/// stay as they are, and each rank returns the error.
pub(crate) fn reduced(mut all: Vec<Message>) -> Vec<Message> {
    let op = match all.first().map(|first| first.call.operation) {
        Some(Operation::AllReduce(op) | Operation::ReduceScatter(op)) => op,
        Some(Operation::AllReduceArena) => ReduceOp::Max,
        Some(Operation::AgreeOnState) => {
            let mut verdict = Some(agreement::verdict(&all));
            all.iter_mut().for_each(|message| message.part = verdict.take());
            return all;
        }
        _ => return all,
    };
    let parts: Vec<&Tensor> = all.iter().filter_map(|message| message.part.as_ref()?.data.as_ref()).collect();
    let Ok(Some(result)) = host::reduce(&parts, op) else { return all };
    for (rank, message) in all.iter_mut().enumerate() {
        if let Some(part) = &mut message.part {
            part.data = (rank == 0).then(|| result.clone());
        }
    }
    all
}
