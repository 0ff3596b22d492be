//! A stack of layers of any kind.

use crate::data_parallel::Parts;
use crate::module::kind_of;
use crate::{Error, Layer, Module, Result, SequenceInfo, composite};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, Forward};
use std::any::Any;

/// The boxed `Saved` of a [`DynModule`].
#[derive(Debug)]
pub struct AnySaved {
    saved: Box<dyn Any + Send>,
    layer: &'static str,
}

/// An object-safe form of [`Module`], implemented for every `Module`: for models that choose their layers at run time.
///
/// Its `Saved` is boxed. The methods have other names than `Module`'s, so that calls on concrete layers are unambiguous.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = LinearOptions { in_features: 8, out_features: 4, ..Default::default() };
/// let mut layer: Box<dyn DynModule> = Box::new(Linear::new("fc", options, &device, &mut fp8_nn::rand::rng())?);
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let x = Tensor::full(1.0, [2, 8], DType::F32, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| layer.forward_dyn(cx, &x))?;
/// let dx = scaling.in_backward(|cx| layer.backward_dyn(0, cx, saved, &y))?;
/// assert_eq!(dx.shape(), x.shape());
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub trait DynModule: Layer {
    /// Calls [`Module::forward`] and boxes its `Saved`.
    ///
    /// # Errors
    /// The errors of the layer.
    fn forward_dyn(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, AnySaved)> {
        self.forward_with_info_dyn(cx, x, &SequenceInfo::default())
    }

    /// Calls [`Module::forward_with_info`] and boxes its `Saved`.
    ///
    /// # Errors
    /// The errors of the layer.
    fn forward_with_info_dyn(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, AnySaved)>;

    /// Calls [`Module::is_positionwise`].
    fn is_positionwise_dyn(&self) -> bool;

    /// Calls [`Module::backward`]. `index` is the layer's place in its stack, which an error names.
    ///
    /// # Errors
    /// A `Saved` of another kind of layer; the layer's errors.
    fn backward_dyn(
        &mut self,
        index: usize,
        cx: &mut Backward<'_>,
        saved: AnySaved,
        dy: &Tensor,
    ) -> Result<Tensor>;
}

impl<M: Module> DynModule for M {
    fn forward_with_info_dyn(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, AnySaved)> {
        let (y, saved) = self.forward_with_info(cx, x, info)?;
        Ok((y, AnySaved { saved: Box::new(saved), layer: kind_of::<M>() }))
    }

    fn is_positionwise_dyn(&self) -> bool {
        self.is_positionwise()
    }

    fn backward_dyn(
        &mut self,
        index: usize,
        cx: &mut Backward<'_>,
        saved: AnySaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let (found, expected) = (saved.layer, kind_of::<M>());
        let saved = saved.saved.downcast().map_err(|_| Error::Saved { index, found, expected })?;
        self.backward(cx, *saved, dy)
    }
}

/// Layers of any kind, one after the other: the output of each is the input of the next.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let (device, mut rng) = (Device::cpu(), fp8_nn::rand::rng());
/// let norm = NormLayerOptions { hidden_size: 16, ..Default::default() };
/// let fc = LinearOptions { in_features: 16, out_features: 4, ..Default::default() };
/// let mut model = Stack(vec![
///     Box::new(RmsNorm::new("norm", &norm, &device)?),
///     Box::new(Linear::new("fc", fc, &device, &mut rng)?),
/// ]);
/// let mut scaling = Scaling::new(&model, &device)?;
/// let x = Tensor::full(1.0, [2, 16], DType::F32, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| model.forward(cx, &x))?;
/// let dx = scaling.in_backward(|cx| model.backward(cx, saved, &y))?;
/// assert_eq!((&**y.shape(), dx.shape()), (&[2, 4][..], x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Stack(pub Vec<Box<dyn DynModule>>);

composite!(Stack { 0 });

impl Module for Stack {
    type Saved = Vec<AnySaved>;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn is_positionwise(&self) -> bool {
        self.0.iter().all(|layer| layer.is_positionwise_dyn())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, Self::Saved)> {
        cx.attempt(|cx| {
            let mut all = Vec::with_capacity(self.0.len());
            let mut x = x.clone();
            for layer in &self.0 {
                let (y, saved) = layer.forward_with_info_dyn(cx, &x, info)?;
                all.push(saved);
                x = y;
            }
            Ok((x, all))
        })
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        cx.attempt(|cx| {
            if saved.len() != self.0.len() {
                return Err(Error::StackSaved { layers: self.0.len(), found: saved.len() });
            }
            let mut parts = Parts::new(cx);
            let mut dy = dy.clone();
            for (index, (layer, saved)) in self.0.iter_mut().zip(saved).enumerate().rev() {
                dy = layer.backward_dyn(index, cx, saved, &dy)?;
                parts.finished(layer)?;
            }
            parts.end(cx);
            Ok(dy)
        })
    }
}
