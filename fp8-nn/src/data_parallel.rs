//! Training on several ranks with one batch each.
//!
//! Each rank divides its loss by the *global* batch. Summed gradients are then those of one process with the joined batch,
//! up to the order of sums, and in FP8 up to first scales, which each rank takes from its own part of the batch.
//!
//! Ranks that start a step with equal state end it with equal state. [`agreement`] checks that they start with equal state.

mod agreement;
mod broadcast_state;

use crate::{Error, Layer, Parameter, Result, parameters, parameters_mut};
pub use agreement::agree;
pub(crate) use agreement::{Agreement, LoadedState};
pub use broadcast_state::broadcast_state;
use fp8_dist::{ProcessGroup, ReduceOp};
use fp8_kernels::Device;

/// Replaces every parameter's gradient by its sum over the ranks, after backward and before the optimizer. The sum is
/// written where the gradient was, so that a recorded step goes on with it; a gradient whose storage others hold too gets
/// a new place.
///
/// Before its first reduction over a group, and again after parameters were made, set or loaded, it compares the
/// parameters of all ranks, and the optimizer state that [`checkpoint::load`](crate::checkpoint::load) has loaded with
/// them: one more collective, for which all parameters are read back once. [`agree`] compares more.
///
/// # Errors
/// Parameters or loaded optimizer state that differ between the ranks, on every rank, with the first difference; a rank
/// that alone has set or loaded parameters. In a step that is being recorded, a gradient whose storage others hold too, or
/// parameters that have not been compared. Nothing has changed then. A rank that is away, failed or has another model: some
/// gradients may be sums already, so clear them ([`zero_grad`](crate::zero_grad)) before the next backward.
pub fn all_reduce_gradients(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    for parameter in parameters(model) {
        if parameter.main_grad().holders() > 0 {
            let remedy = "drop what shares the gradients' storage before";
            parameter.main_grad().device().expect_eager("all_reduce_gradients", remedy)?;
        }
    }
    agreement::before_reduction(model, group)?;
    for parameter in parameters_mut(model) {
        let what = format!("gradient of {}", parameter.name());
        if parameter.main_grad().holders() == 0 {
            group.all_reduce_in_place(&what, parameter.main_grad_mut(), ReduceOp::Sum)?;
        } else {
            *parameter.main_grad_mut() = group.all_reduce(&what, parameter.main_grad(), ReduceOp::Sum)?;
        }
    }
    Ok(())
}

/// Gives every rank the parameters of rank 0, before the first step. They keep their places in memory. All are received
/// before the first is replaced, which takes memory for a second copy of them.
///
/// Parameters alone are enough for a new training. After a checkpoint was loaded on rank 0, moments and scales must be
/// equal too: use [`broadcast_state`].
///
/// # Errors
/// A rank that is away, failed or has another model. No parameter has changed then.
pub fn broadcast_parameters(model: &mut (impl Layer + ?Sized), group: &dyn ProcessGroup) -> Result<()> {
    let mut parameters = parameters_mut(model);
    let receive = |parameter: &&mut Parameter| {
        group.broadcast(&format!("value of {}", parameter.name()), parameter.tensor(), 0)
    };
    let values = parameters.iter().map(receive).collect::<Result<Vec<_>, _>>()?;
    parameters.iter_mut().zip(values).try_for_each(|(parameter, value)| parameter.set(value))
}

/// Nothing but this rank can fail in `result`: it tells the others, who would wait for it.
fn own<T>(group: &dyn ProcessGroup, result: Result<T>) -> Result<T> {
    result.inspect_err(|error| group.poison(&error.to_string()))
}

/// A group's error as fp8-dist's, where it is one.
fn told<T>(result: fp8_recipe::Result<T>) -> Result<T> {
    result.map_err(|error| match error {
        fp8_recipe::Error::Group(error) => match error.downcast() {
            Ok(error) => Error::Dist(*error),
            Err(error) => Error::Recipe(fp8_recipe::Error::Group(error)),
        },
        error => Error::Recipe(error),
    })
}

/// The device of the first parameter, on which all others are.
fn first_device(model: &(impl Layer + ?Sized)) -> Option<Device> {
    parameters(model).first().map(|parameter| parameter.tensor().device().clone())
}

/// Fails while a step is being recorded.
fn expect_eager(model: &(impl Layer + ?Sized), op: &str, remedy: &'static str) -> Result<()> {
    first_device(model).map_or(Ok(()), |device| Ok(device.expect_eager(op, remedy)?))
}
