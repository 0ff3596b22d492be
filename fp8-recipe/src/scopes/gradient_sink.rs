//! Gradients that leave the model while backward goes on.

use crate::{Backward, Result};
use fp8_kernels::Tensor;
use std::fmt::Debug;
use std::sync::Arc;

/// Takes the gradients of parameters as soon as a backward pass has finished with them, to reduce them over ranks while it goes on.
///
/// fp8-nn's `Gradients` is one. [`Backward::set_gradient_sink`] gives it to a scope, and models hand it their gradients.
pub trait GradientSink: Debug + Send {
    /// Returns the id of the group over which gradients are reduced.
    fn group(&self) -> &str;

    /// Takes the gradient of the parameter called `name`. All ranks hand over the same parameters in the same order.
    ///
    /// # Errors
    /// Those of the sink.
    fn take(&mut self, name: &Arc<str>, gradient: Tensor) -> Result<()>;
}

impl Backward<'_> {
    /// Gives this scope a sink for gradients, instead of the one that it has.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{DType, Device, Tensor};
    /// use fp8_recipe::{GemmSlots, GradientSink, Result, Scaling};
    /// use std::sync::{Arc, Mutex};
    ///
    /// /// Notes the names of gradients.
    /// #[derive(Debug, Clone, Default)]
    /// struct Names(Arc<Mutex<Vec<Arc<str>>>>);
    ///
    /// impl GradientSink for Names {
    ///     fn group(&self) -> &str {
    ///         "dp"
    ///     }
    ///     fn take(&mut self, name: &Arc<str>, _gradient: Tensor) -> Result<()> {
    ///         self.0.lock().unwrap().push(name.clone());
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let device = Device::cpu();
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &device)?;
    /// let names = Names::default();
    /// let mut cx = scaling.backward()?;
    /// cx.set_gradient_sink(Box::new(names.clone()));
    /// if let Some(sink) = cx.gradient_sink() {
    ///     sink.take(&"fc.weight".into(), Tensor::zeros([2, 2], DType::F32, &device)?)?; // a layer that is done
    /// }
    /// cx.commit()?;
    /// assert_eq!(*names.0.lock().unwrap(), ["fc.weight".into()]);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn set_gradient_sink(&mut self, sink: Box<dyn GradientSink>) {
        self.sink = Some(sink);
    }

    /// Returns the sink of this scope, if it has one.
    pub fn gradient_sink(&mut self) -> Option<&mut (dyn GradientSink + 'static)> {
        self.sink.as_deref_mut()
    }

    /// Takes the sink out of this scope. A model does so while it runs its parts, which then hand over nothing themselves: only the
    /// model knows when it has finished with a part.
    pub fn take_gradient_sink(&mut self) -> Option<Box<dyn GradientSink>> {
        self.sink.take()
    }
}
