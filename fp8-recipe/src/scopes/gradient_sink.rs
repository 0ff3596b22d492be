//! Gradients that leave the model while backward goes on.

use crate::Result;
use fp8_kernels::Tensor;
use std::fmt::Debug;
use std::sync::Arc;

/// Takes the gradients of parameters as soon as a backward pass has finished with them, to reduce them over ranks while it goes on.
///
/// fp8-nn's `Gradients` is one. [`Backward::set_gradient_sink`](crate::Backward::set_gradient_sink), whose example implements it, gives it
/// to a scope, and models hand it their gradients.
pub trait GradientSink: Debug + Send {
    /// Returns the id of the group over which gradients are reduced.
    fn group(&self) -> &str;

    /// Takes the gradient of the parameter called `name`. All ranks hand over the same parameters in the same order.
    ///
    /// # Errors
    /// Those of the sink.
    fn take(&mut self, name: &Arc<str>, gradient: Tensor) -> Result<()>;

    /// Tells the other ranks that this one cannot hand over a gradient, so that they do not wait for it. Does nothing by default.
    fn fail(&mut self, _reason: &str) {}
}
