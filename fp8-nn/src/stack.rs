//! Layers of any kind, one after the other.

use crate::{Error, Layer, Module, Result, composite};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, Forward};
use std::any::{Any, type_name};

/// A `Saved` whose type only its layer knows.
#[derive(Debug)]
pub struct AnySaved {
    saved: Box<dyn Any + Send>,
    layer: &'static str,
}

/// Every [`Module`], as an object. Its methods have names of their own, else calls on concrete layers would be ambiguous.
pub trait DynModule: Layer {
    /// [`Module::forward`], its `Saved` boxed.
    ///
    /// # Errors
    /// The layer's.
    fn forward_dyn(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, AnySaved)>;

    /// [`Module::backward`]; `index` is the layer's place, for the error.
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
    fn forward_dyn(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, AnySaved)> {
        let (y, saved) = self.forward(cx, x)?;
        Ok((y, AnySaved { saved: Box::new(saved), layer: type_name::<M>() }))
    }

    fn backward_dyn(
        &mut self,
        index: usize,
        cx: &mut Backward<'_>,
        saved: AnySaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let (found, expected) = (saved.layer, type_name::<M>());
        let saved = saved.saved.downcast().map_err(|_| Error::Saved { index, found, expected })?;
        self.backward(cx, *saved, dy)
    }
}

/// Layers of any kind, one after the other.
#[derive(Debug)]
pub struct Stack(pub Vec<Box<dyn DynModule>>);

composite!(Stack { 0 });

impl Module for Stack {
    type Saved = Vec<AnySaved>;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        cx.attempt(|cx| {
            let mut all = Vec::with_capacity(self.0.len());
            let mut x = x.clone();
            for layer in &self.0 {
                let (y, saved) = layer.forward_dyn(cx, &x)?;
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
            let mut dy = dy.clone();
            for (index, (layer, saved)) in self.0.iter_mut().zip(saved).enumerate().rev() {
                dy = layer.backward_dyn(index, cx, saved, &dy)?;
            }
            Ok(dy)
        })
    }
}
