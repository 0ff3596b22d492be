//! Training on several ranks with one batch each.
//!
//! Each rank divides its loss by the *global* batch; summed gradients are then those of one process with the joined
//! batch.

use crate::{Layer, Result};
use fp8_dist::{ProcessGroup, ReduceOp};

/// Replaces every parameter's gradient by its sum over the ranks, after backward and before the optimizer. The sum lies
/// where the gradient lay, so that a recorded step goes on with it; a gradient whose storage others hold too moves away.
///
/// # Errors
/// A rank that is away, failed or has another model; in a step that is being recorded, a gradient whose storage others hold
/// too.
pub fn all_reduce_gradients(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    model.visit_mut(&mut |parameter| {
        let what = format!("gradient of {}", parameter.name());
        if parameter.main_grad().holders() == 0 {
            return Ok(group.all_reduce_in_place(&what, parameter.main_grad_mut(), ReduceOp::Sum)?);
        }
        let remedy = "drop what shares the gradients' storage before";
        parameter.main_grad().device().expect_eager("all_reduce_gradients", remedy)?;
        *parameter.main_grad_mut() = group.all_reduce(&what, parameter.main_grad(), ReduceOp::Sum)?;
        Ok(())
    })
}

/// Gives every rank the parameters of rank 0, before the first step. They stay where they lie.
///
/// # Errors
/// A rank that is away, failed or has another model.
pub fn broadcast_parameters(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    model.visit_mut(&mut |parameter| {
        let value = group.broadcast(&format!("value of {}", parameter.name()), parameter.tensor(), 0)?;
        parameter.set(value)
    })
}
