//! The gradients of layers with which backward has finished, on their way to the ranks' sum.

use crate::module::trainable_mut;
use crate::{Layer, Result};
use fp8_recipe::{Backward, GradientSink};

/// Hands the gradients of `layer` over to be summed over ranks, if the scope belongs to a step of [`Gradients`](crate::Gradients).
/// The backward of a model of your own calls it for each of its parts, in the same order on all ranks, as soon as nothing more will be
/// added to their gradients. [`Gpt`](crate::Gpt) and [`Stack`](crate::Stack) do.
///
/// A gradient that shares its storage with another tensor stays, and [`Gradients::finish`](crate::Gradients::finish) sums it. So do
/// all gradients of a scope that [delays weight gradients](Backward::delay_wgrad).
///
/// ```
/// use fp8_nn::hand_over_gradients;
/// use fp8_nn::prelude::*;
///
/// #[derive(Debug)]
/// struct Two {
///     first: Linear,
///     second: Linear,
/// }
/// composite!(Two { first, second });
///
/// impl Module for Two {
///     type Saved = [fp8_nn::LinearSaved; 2];
///
///     fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
///         let (x, first) = self.first.forward(cx, x)?;
///         let (x, second) = self.second.forward(cx, &x)?;
///         Ok((x, [first, second]))
///     }
///     fn backward(&mut self, cx: &mut Backward<'_>, [first, second]: Self::Saved, dy: &Tensor) -> Result<Tensor> {
///         let dy = self.second.backward(cx, second, dy)?;
///         hand_over_gradients(cx, &mut self.second)?; // summed while `first` is computed
///         let dx = self.first.backward(cx, first, &dy)?;
///         hand_over_gradients(cx, &mut self.first)?;
///         Ok(dx)
///     }
/// }
/// ```
///
/// # Errors
/// Those of [`all_reduce_gradients`](crate::all_reduce_gradients).
pub fn hand_over_gradients(cx: &mut Backward<'_>, layer: &mut (impl Layer + ?Sized)) -> Result<()> {
    if cx.delayed_wgrads().is_some() {
        return Ok(());
    }
    cx.gradient_sink().map_or(Ok(()), |sink| hand_over(sink, layer))
}

fn hand_over(sink: &mut dyn GradientSink, layer: &mut (impl Layer + ?Sized)) -> Result<()> {
    // An error may be that of this rank alone, and the others wait for what it has.
    take(sink, layer).inspect_err(|error| sink.fail(&error.to_string()))
}

fn take(sink: &mut dyn GradientSink, layer: &mut (impl Layer + ?Sized)) -> Result<()> {
    for parameter in trainable_mut(layer) {
        if parameter.gradient().is_away() {
            continue; // a part of the layer has handed it over
        }
        let name = parameter.name().clone();
        parameter.gradient().expect_summable(&name, sink.group())?;
        if parameter.main_grad().holders() == 0 {
            sink.take(&name, parameter.gradient_mut().take()?)?;
        }
    }
    Ok(())
}

/// Hands over the parts of a model one by one. The parts themselves hand over nothing meanwhile: a model may use parts of a part
/// twice.
#[derive(Debug)]
pub(crate) struct Parts(Option<Box<dyn GradientSink>>);

impl Parts {
    pub(crate) fn new(cx: &mut Backward<'_>) -> Self {
        Self(if cx.delayed_wgrads().is_some() { None } else { cx.take_gradient_sink() })
    }

    /// Hands over a part with which backward has finished.
    pub(crate) fn finished(&mut self, part: &mut (impl Layer + ?Sized)) -> Result<()> {
        self.0.as_deref_mut().map_or(Ok(()), |sink| hand_over(sink, part))
    }

    /// Lets a part hand over its own parts, each of which it uses once.
    pub(crate) fn lend(&mut self, cx: &mut Backward<'_>) {
        if let Some(sink) = self.0.take() {
            cx.set_gradient_sink(sink);
        }
    }

    /// Ends what [`lend`](Self::lend) has begun.
    pub(crate) fn take_back(&mut self, cx: &mut Backward<'_>) {
        *self = Self::new(cx);
    }

    /// Ends the backward pass of the model.
    pub(crate) fn end(mut self, cx: &mut Backward<'_>) {
        self.lend(cx);
    }
}
