//! Errors of one rank, and of all.

use crate::{Layer, Parameter, Result, parameters};
use fp8_dist::ProcessGroup;
use fp8_kernels::Device;

/// Returns `result`. If it is an error, which only this rank has, poisons the group so that the other ranks do not wait.
pub(crate) fn own<T>(group: &dyn ProcessGroup, result: Result<T>) -> Result<T> {
    result.inspect_err(|error| group.poison(&error.to_string()))
}

/// Returns the device of the first parameter, which is that of all parameters.
pub(super) fn first_device(model: &(impl Layer + ?Sized)) -> Option<Device> {
    parameters(model).first().map(|parameter| parameter.device().clone())
}

/// Returns an error while a step is being recorded.
pub(super) fn expect_eager(model: &(impl Layer + ?Sized), op: &str, remedy: &'static str) -> Result<()> {
    first_device(model).map_or(Ok(()), |device| Ok(device.expect_eager(op, remedy)?))
}

/// Returns an error if the parameter's gradient cannot be summed over the group with this id.
pub(super) fn expect_summable(parameter: &Parameter, group: &str) -> Result<()> {
    parameter.gradient().expect_summable(parameter.name(), group)?;
    if parameter.gradient().is_shared() {
        let remedy = "drop what shares the gradients' storage before";
        parameter.device().expect_eager("all_reduce_gradients", remedy)?;
    }
    Ok(())
}
