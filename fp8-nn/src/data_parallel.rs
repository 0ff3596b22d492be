//! Training on several ranks with one batch each.
//!
//! Each rank divides its loss by the *global* batch; summed gradients are then those of one process with the joined
//! batch.

use crate::{Layer, Result};
use fp8_dist::{ProcessGroup, ReduceOp};

/// Replaces every parameter's gradient by its sum over the ranks, after backward and before the optimizer.
///
/// # Errors
/// A rank that is away, failed or has another model.
pub fn all_reduce_gradients(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    model.visit_mut(&mut |parameter| {
        let what = format!("gradient of {}", parameter.name());
        let sum = group.all_reduce(&what, parameter.main_grad(), ReduceOp::Sum)?;
        *parameter.main_grad_mut() = sum;
        Ok(())
    })
}

/// Gives every rank the parameters of rank 0, before the first step.
///
/// # Errors
/// A rank that is away, failed or has another model.
pub fn broadcast_parameters(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    model.visit_mut(&mut |parameter| {
        let value = group.broadcast(&format!("value of {}", parameter.name()), parameter.tensor(), 0)?;
        parameter.set(value)
    })
}
