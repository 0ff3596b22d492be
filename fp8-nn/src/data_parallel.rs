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
/// In a step that is being recorded, a gradient whose storage others hold too: nothing has changed then. A rank that is
/// away, failed or has another model: some gradients may be sums already, so clear them
/// ([`zero_grad`](crate::zero_grad)) before the next backward.
pub fn all_reduce_gradients(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    model.visit(&mut |parameter| match parameter.main_grad().holders() {
        0 => Ok(()),
        _ => {
            let remedy = "drop what shares the gradients' storage before";
            Ok(parameter.main_grad().device().expect_eager("all_reduce_gradients", remedy)?)
        }
    })?;
    model.visit_mut(&mut |parameter| {
        let what = format!("gradient of {}", parameter.name());
        if parameter.main_grad().holders() == 0 {
            return Ok(group.all_reduce_in_place(&what, parameter.main_grad_mut(), ReduceOp::Sum)?);
        }
        *parameter.main_grad_mut() = group.all_reduce(&what, parameter.main_grad(), ReduceOp::Sum)?;
        Ok(())
    })
}

/// Gives every rank the parameters of rank 0, before the first step. They keep their places in memory. All are received
/// before the first is replaced, which takes memory for a second copy of them.
///
/// # Errors
/// A rank that is away, failed or has another model. No parameter has changed then.
pub fn broadcast_parameters(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    let mut values = Vec::new();
    model.visit(&mut |parameter| {
        let what = format!("value of {}", parameter.name());
        values.push(group.broadcast(&what, parameter.tensor(), 0)?);
        Ok(())
    })?;
    let mut values = values.into_iter();
    model.visit_mut(&mut |parameter| values.next().map_or(Ok(()), |value| parameter.set(value)))
}
