//! The traits that every layer implements, and functions over a model's parameters.

use crate::{Parameter, Result};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, Forward, Slots};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

/// What every layer has, whatever its forward looks like: slots and parameters. Object-safe.
pub trait Layer: Slots + Debug + Send {
    /// Calls `f` with every parameter, in a fixed order.
    ///
    /// # Errors
    /// The first one that `f` returns.
    fn visit(&self, f: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()>;

    /// Calls `f` with every parameter, to change it.
    ///
    /// # Errors
    /// The first one that `f` returns.
    fn visit_mut(&mut self, f: &mut dyn FnMut(&mut Parameter) -> Result<()>) -> Result<()>;
}

/// A layer from tensor to tensor.
///
/// What backward needs is a value: `forward` returns it, `backward` takes it, so the compiler sees that each is used
/// once.
///
/// The layers of this crate check their input and `dy` before they compute anything: `dy` must be a float tensor of the
/// output's shape, on its device. Its dtype may differ from the output's. A refused `dy` changes no gradient.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
///
/// let device = Device::cpu();
/// let options = LinearOptions { in_features: 32, out_features: 16, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &device, &mut StdRng::seed_from_u64(1))?;
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let x = Tensor::full(1.0, [4, 32], DType::F32, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (_, saved) = scaling.autocast_with(&recipe, |cx| fc.forward(cx, &x))?;
/// let dy = Tensor::full(1.0, [5, 16], DType::F32, &device)?;
/// let refused = scaling.backward_with(|cx| fc.backward(cx, saved, &dy)).unwrap_err();
/// assert_eq!(refused.to_string(), "fc: dy of shape [5, 16]: expected [4, 16], the output's shape");
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// ```compile_fail,E0382
/// # use fp8_nn::prelude::*;
/// fn twice(fc: &mut Linear, scaling: &mut Scaling, recipe: &Recipe, x: &Tensor) -> Result<()> {
///     let (y, saved) = scaling.autocast_with(recipe, |cx| fc.forward(cx, x))?;
///     let mut cx = scaling.backward()?;
///     fc.backward(&mut cx, saved, &y)?;
///     fc.backward(&mut cx, saved, &y)?;
///     Ok(cx.commit()?)
/// }
/// ```
pub trait Module: Layer {
    /// What backward needs.
    type Saved: Send + 'static;

    /// The output, and what backward needs.
    ///
    /// # Errors
    /// An input whose shape, dtype or device does not fit; a layer that the scope's `Scaling` does not know.
    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)>;

    /// The gradient of the input; those of the parameters are added to their `main_grad`.
    ///
    /// # Errors
    /// A `dy` of another shape than the output's, on another device, or not a float; a `Saved` of another layer, another
    /// `Scaling`, an evaluation, or a forward scope that was not committed.
    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor>;
}

/// Clears every gradient, in place. One whose storage others hold too moves away from them.
///
/// # Errors
/// In a step that is being recorded, a gradient whose storage others hold too; the device is out of memory. No gradient has
/// been cleared then. The device failed.
pub fn zero_grad(model: &mut (impl Layer + ?Sized)) -> Result<()> {
    let mut new = BTreeMap::new();
    model.visit(&mut |parameter| {
        if let Some(grad) = parameter.new_grad()? {
            new.insert(parameter.name().clone(), grad);
        }
        Ok(())
    })?;
    model.visit_mut(&mut |parameter| match new.remove(parameter.name()) {
        Some(grad) => {
            *parameter.main_grad_mut() = grad;
            Ok(())
        }
        None => parameter.zero_grad(),
    })
}

/// Names and values of all parameters, in the order of the visit. Values share the parameters' storage: drop them
/// before the optimizer's step.
///
/// # Errors
/// None so far.
pub fn parameters(model: &(impl Layer + ?Sized)) -> Result<Vec<(Arc<str>, Tensor)>> {
    let mut all = Vec::new();
    model.visit(&mut |parameter| {
        all.push((parameter.name().clone(), parameter.tensor().clone()));
        Ok(())
    })?;
    Ok(all)
}

/// The number of trainable values.
///
/// # Errors
/// None so far.
pub fn num_parameters(model: &(impl Layer + ?Sized)) -> Result<usize> {
    let mut count = 0;
    model.visit(&mut |parameter| {
        count += parameter.tensor().numel();
        Ok(())
    })?;
    Ok(count)
}

impl<L: Layer + ?Sized> Layer for Box<L> {
    fn visit(&self, f: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        (**self).visit(f)
    }

    fn visit_mut(&mut self, f: &mut dyn FnMut(&mut Parameter) -> Result<()>) -> Result<()> {
        (**self).visit_mut(f)
    }
}

impl<L: Layer> Layer for Option<L> {
    fn visit(&self, f: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        self.iter().try_for_each(|layer| layer.visit(f))
    }

    fn visit_mut(&mut self, f: &mut dyn FnMut(&mut Parameter) -> Result<()>) -> Result<()> {
        self.iter_mut().try_for_each(|layer| layer.visit_mut(f))
    }
}

impl<L: Layer> Layer for Vec<L> {
    fn visit(&self, f: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        self.iter().try_for_each(|layer| layer.visit(f))
    }

    fn visit_mut(&mut self, f: &mut dyn FnMut(&mut Parameter) -> Result<()>) -> Result<()> {
        self.iter_mut().try_for_each(|layer| layer.visit_mut(f))
    }
}

/// `Slots` and `Layer` of a layer made of layers: names the fields that are layers.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// #[derive(Debug)]
/// struct Mlp {
///     fc1: Linear,
///     fc2: Linear,
/// }
/// composite!(Mlp { fc1, fc2 });
/// ```
#[macro_export]
macro_rules! composite {
    ($layer:ident $(<$inner:ident>)? { $($child:tt),+ $(,)? }) => {
        const _: () = {
            use $crate::fp8_recipe::{SlotName, Slots};
            use $crate::{Layer, Parameter, Result};
            impl $(<$inner: $crate::Module>)? Slots for $layer $(<$inner>)? {
                fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
                    $(self.$child.slots(f);)+
                }
            }
            impl $(<$inner: $crate::Module>)? Layer for $layer $(<$inner>)? {
                fn visit(&self, f: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
                    $(self.$child.visit(f)?;)+
                    Ok(())
                }
                fn visit_mut(&mut self, f: &mut dyn FnMut(&mut Parameter) -> Result<()>) -> Result<()> {
                    $(self.$child.visit_mut(f)?;)+
                    Ok(())
                }
            }
        };
    };
}
