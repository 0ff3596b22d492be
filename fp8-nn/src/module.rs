//! The traits that every layer implements, and functions over a model's parameters.

use crate::{Error, Loras, Parameter, Result, SequenceInfo};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, Forward, Slots};
use std::any::type_name;
use std::fmt::Debug;

/// The part that all layers have in common: quantizer slots and parameters.
///
/// [`composite!`](crate::composite) implements it for a layer made of layers. A layer with parameters of its own implements
/// it by hand:
///
/// ```
/// use fp8_nn::prelude::*;
///
/// /// A factor per feature.
/// #[derive(Debug)]
/// struct Scale {
///     weight: Parameter,
/// }
///
/// impl Slots for Scale {
///     fn slots(&self, _: &mut dyn FnMut(&SlotName)) {} // it quantizes nothing
/// }
///
/// impl Layer for Scale {
///     fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
///         f(&self.weight);
///     }
///     fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
///         f(&mut self.weight);
///     }
/// }
///
/// let weight = Parameter::new("scale.weight", Tensor::full(1.0, [8], DType::F32, &Device::cpu())?)?;
/// assert_eq!(num_parameters(&Scale { weight }), 8);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub trait Layer: Slots + Debug + Send {
    /// Calls `f` with every parameter, in an order that never changes.
    ///
    /// The references are valid as long as the borrow of the layer, so `f` may collect them, as [`parameters`] does.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter));

    /// Calls `f` with a mutable reference to every parameter, in the order of [`visit`](Self::visit).
    ///
    /// `f` may collect the references, so that a caller has all parameters at once, as with [`parameters_mut`].
    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter));

    /// Calls `f` with the adapters of every [`Linear`](crate::Linear) in the layer, in the order of their weights.
    ///
    /// By default it calls nothing: for a layer without Linears. [`composite!`](crate::composite) implements it.
    fn visit_loras<'a>(&'a self, _f: &mut dyn FnMut(&'a Loras)) {}

    /// Calls `f` with the adapters of every [`Linear`](crate::Linear) in the layer, in the order of their weights, to add some.
    ///
    /// By default it calls nothing: for a layer without Linears. [`composite!`](crate::composite) implements it.
    ///
    /// ```
    /// use fp8_nn::LoraOptions;
    /// use fp8_nn::prelude::*;
    ///
    /// let (device, mut rng) = (Device::cpu(), fp8_nn::rand::rng());
    /// let options = LayerNormMlpOptions { hidden_size: 16, ffn_hidden_size: 32, ..Default::default() };
    /// let mut mlp = LayerNormMlp::new("mlp", options, &device, &mut rng)?;
    /// let options = LoraOptions { rank: 4, ..Default::default() };
    /// let mut added = Vec::new();
    /// mlp.visit_loras_mut(&mut |loras| {
    ///     if loras.path().ends_with("fc2") {
    ///         added.push(loras.add("all", 0..16, &options, &mut rng));
    ///     }
    /// });
    /// added.into_iter().collect::<Result<Vec<_>>>()?;
    /// assert_eq!(parameters(&mlp).iter().filter(|parameter| parameter.name().contains(".lora.")).count(), 2);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    fn visit_loras_mut<'a>(&'a mut self, _f: &mut dyn FnMut(&'a mut Loras)) {}
}

/// A layer that takes a tensor and returns a tensor.
///
/// `forward` returns everything that `backward` needs as a value, and `backward` consumes it. The compiler therefore proves
/// that it is used at most once.
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
/// let (_, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x))?;
/// let dy = Tensor::full(1.0, [5, 16], DType::F32, &device)?;
/// let refused = scaling.in_backward(|cx| fc.backward(cx, saved, &dy)).unwrap_err();
/// assert_eq!(refused.to_string(), "fc: dy of shape [5, 16]: expected [4, 16], the output's shape");
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// ```compile_fail,E0382
/// # use fp8_nn::prelude::*;
/// fn twice(fc: &mut Linear, scaling: &mut Scaling, recipe: &Recipe, x: &Tensor) -> Result<()> {
///     let (y, saved) = scaling.in_autocast(recipe, |cx| fc.forward(cx, x))?;
///     let mut cx = scaling.backward()?;
///     fc.backward(&mut cx, saved, &y)?;
///     fc.backward(&mut cx, saved, &y)?;
///     Ok(cx.commit()?)
/// }
/// ```
pub trait Module: Layer {
    /// The values of a forward pass that its backward pass needs.
    type Saved: Send + 'static;

    /// Returns the output, and the value that [`backward`](Self::backward) takes.
    ///
    /// # Errors
    /// An input whose shape, dtype or device does not fit; a layer that the scope's `Scaling` does not know.
    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)>;

    /// [`forward`](Self::forward) for an input of which [`SequenceInfo`] says more: with padding, packed sequences, or positions
    /// of its own.
    ///
    /// A layer that [is positionwise](Self::is_positionwise) does as without; layers with attention implement this method. A
    /// layer made of others passes `info` on to them. Backward needs no more than `saved`.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward); an `info` that does not fit the input; an `info` that says anything, for a layer that
    /// has no such method of its own and is not positionwise.
    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, Self::Saved)> {
        if info.is_plain() || self.is_positionwise() {
            self.forward(cx, x)
        } else {
            Err(Error::SequenceInfo { layer: kind_of::<Self>() })
        }
    }

    /// Returns whether each position of the output depends only on the same position of the input, as in linear layers, norms
    /// and MLPs. Default: false.
    fn is_positionwise(&self) -> bool {
        false
    }

    /// Returns the gradient of the input, and adds those of the parameters to their `main_grad`.
    ///
    /// # Errors
    /// A `dy` of another shape than the output's, on another device, or not a float; a `Saved` of another layer, another
    /// `Scaling`, an evaluation, or a forward scope that was not committed.
    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor>;
}

/// Sets every gradient of a model to 0 in place. A gradient that shares its storage with another tensor gets new storage.
///
/// The memory is set to 0 only if something reads the gradient before the next backward pass, which otherwise overwrites it; an
/// embedding's, to which rows are added, is set to 0 first. A recorded step that calls `zero_grad` overwrites the gradients in every replay. A recorded step that does not call it adds to the
/// gradients that it finds. Therefore, while a graph of the device exists, `zero_grad` outside of a recording sets gradients to 0 at
/// once.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 2, out_features: 1, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// *parameters_mut(&mut fc)[0].main_grad_mut() = Tensor::full(3.0, [1, 2], DType::F32, &Device::cpu())?;
/// zero_grad(&mut fc)?;
/// assert_eq!(fc.weight().main_grad().to_f32_vec()?, [0.0, 0.0]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// In a step that is being recorded, a gradient that shares its storage; the device is out of memory. No gradient has been
/// cleared then. The device failed.
pub fn zero_grad(model: &mut (impl Layer + ?Sized)) -> Result<()> {
    let mut parameters = trainable_mut(model);
    // New gradients are allocated before the first gradient is cleared, so that an error changes nothing.
    let new = parameters.iter().map(|parameter| parameter.new_grad()).collect::<Result<Vec<_>>>()?;
    for (parameter, new) in parameters.iter_mut().zip(new) {
        parameter.clear_grad(new)?;
    }
    Ok(())
}

/// Returns all parameters of a model, in the order of [`Layer::visit`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let mut rng = fp8_nn::rand::rng();
/// let options = LinearOptions { in_features: 8, out_features: 4, ..Default::default() };
/// let fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
/// let shapes: Vec<_> = parameters(&fc).iter().map(|p| format!("{} {}", p.name(), p.shape())).collect();
/// assert_eq!(shapes, ["fc.weight [4, 8]", "fc.bias [4]"]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub fn parameters(model: &(impl Layer + ?Sized)) -> Vec<&Parameter> {
    let mut all = Vec::new();
    model.visit(&mut |parameter| all.push(parameter));
    all
}

/// Returns mutable references to all parameters of a model, in the order of [`Layer::visit`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let mut rng = fp8_nn::rand::rng();
/// let options = LinearOptions { in_features: 8, out_features: 4, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
/// for parameter in parameters_mut(&mut fc) {
///     let ones = Tensor::full(1.0, *parameter.shape(), DType::F32, &Device::cpu())?;
///     parameter.set(ones)?;
/// }
/// assert_eq!(fc.weight().tensor().to_f32_vec()?, [1.0; 32]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub fn parameters_mut(model: &mut (impl Layer + ?Sized)) -> Vec<&mut Parameter> {
    let mut all = Vec::new();
    model.visit_mut(&mut |parameter| all.push(parameter));
    all
}

/// Returns the parameters that are not frozen.
pub(crate) fn trainable(model: &(impl Layer + ?Sized)) -> Vec<&Parameter> {
    parameters(model).into_iter().filter(|parameter| parameter.is_trainable()).collect()
}

/// Returns mutable references to the parameters that are not frozen.
pub(crate) fn trainable_mut(model: &mut (impl Layer + ?Sized)) -> Vec<&mut Parameter> {
    parameters_mut(model).into_iter().filter(|parameter| parameter.is_trainable()).collect()
}

/// Returns the number of values in the parameters of a model, frozen ones included. Where ranks have parts of parameters
/// ([tensor parallelism](crate::TensorParallel)), it counts those of this rank; [`Parameter::global_shape`] has the whole's.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let mut rng = fp8_nn::rand::rng();
/// let options = LinearOptions { in_features: 8, out_features: 4, ..Default::default() };
/// let fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
/// assert_eq!(num_parameters(&fc), 4 * 8 + 4);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub fn num_parameters(model: &(impl Layer + ?Sized)) -> usize {
    parameters(model).iter().map(|parameter| parameter.shape().numel()).sum()
}

impl<L: Layer + ?Sized> Layer for Box<L> {
    fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a Loras)) {
        (**self).visit_loras(f);
    }

    fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Loras)) {
        (**self).visit_loras_mut(f);
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        (**self).visit(f);
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        (**self).visit_mut(f);
    }
}

impl<L: Layer> Layer for Option<L> {
    fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a Loras)) {
        self.iter().for_each(|layer| layer.visit_loras(f));
    }

    fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Loras)) {
        self.iter_mut().for_each(|layer| layer.visit_loras_mut(f));
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        self.iter().for_each(|layer| layer.visit(f));
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        self.iter_mut().for_each(|layer| layer.visit_mut(f));
    }
}

impl<L: Layer> Layer for Vec<L> {
    fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a Loras)) {
        self.iter().for_each(|layer| layer.visit_loras(f));
    }

    fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Loras)) {
        self.iter_mut().for_each(|layer| layer.visit_loras_mut(f));
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        self.iter().for_each(|layer| layer.visit(f));
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        self.iter_mut().for_each(|layer| layer.visit_mut(f));
    }
}

/// Returns the type of a layer as errors name it: without the private modules of this crate.
pub(crate) fn kind_of<M: ?Sized>() -> &'static str {
    public_name(type_name::<M>())
}

fn public_name(path: &'static str) -> &'static str {
    match path.rsplit_once("::") {
        Some((module, name)) if module.starts_with("fp8_nn::") && !path.contains('<') => name,
        _ => path,
    }
}

/// Implements [`Slots`](crate::fp8_recipe::Slots) and [`Layer`](crate::Layer) for a struct made of layers. It takes the
/// fields that are layers, in the order in which parameters are visited, and behind `; skip` those that are not. A field that
/// is not listed does not compile, so that no layer is forgotten and never trained.
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
///
/// #[derive(Debug)]
/// struct Scaled {
///     mlp: Mlp,
///     factor: f32,
/// }
/// composite!(Scaled { mlp; skip factor });
/// ```
///
/// ```compile_fail
/// # use fp8_nn::prelude::*;
/// #[derive(Debug)]
/// struct Mlp {
///     norm: RmsNorm,
///     fc: Linear,
/// }
/// composite!(Mlp { fc }); // the norm would never train
/// ```
#[macro_export]
macro_rules! composite {
    ($layer:ident $(<$inner:ident>)? { $($child:tt),+ $(,)? $(; skip $($other:tt),+ $(,)?)? }) => {
        const _: () = {
            use $crate::fp8_recipe::{SlotName, Slots};
            use $crate::{Layer, Parameter};
            // A pattern without `..` names every field.
            fn _every_field_is_listed $(<$inner: $crate::Module>)? (layer: &$layer $(<$inner>)?) {
                let $layer { $($child: _,)+ $($($other: _,)+)? } = layer;
            }
            impl $(<$inner: $crate::Module>)? Slots for $layer $(<$inner>)? {
                fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
                    $(self.$child.slots(f);)+
                }
            }
            impl $(<$inner: $crate::Module>)? Layer for $layer $(<$inner>)? {
                fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
                    $(self.$child.visit(f);)+
                }
                fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
                    $(self.$child.visit_mut(f);)+
                }
                fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a $crate::Loras)) {
                    $(self.$child.visit_loras(f);)+
                }
                fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut $crate::Loras)) {
                    $(self.$child.visit_loras_mut(f);)+
                }
            }
        };
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_as_users_know_them() {
        assert_eq!(kind_of::<crate::Linear>(), "Linear");
        for path in ["app::model::Linear", "Linear", "fp8_nn::stack::Boxed<app::Mlp>"] {
            assert_eq!(public_name(path), path);
        }
    }
}
