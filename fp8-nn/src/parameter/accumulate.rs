//! Adding to a parameter's gradient, and clearing it.

use super::gradient::gradient_of;
use super::{Event, Gradient, Parameter};
use crate::Result;
use fp8_kernels::ops::{GradientMut, Update};
use fp8_kernels::{Tensor, ops};
use fp8_recipe::Backward;
use std::sync::Arc;

impl Parameter {
    /// Returns the accumulated gradient, in f32. It has no elements if the parameter is frozen, between the backward pass and
    /// [`Gradients::finish`](crate::Gradients::finish), or if the device failed to set it to 0 after [`zero_grad`](Self::zero_grad).
    pub fn main_grad(&self) -> &Tensor {
        self.gradient.tensor()
    }

    /// Returns the accumulated gradient, for code that changes it after backward. In a backward of your own, add to it with
    /// [`accumulate_in`](Self::accumulate_in), which leaves frozen parameters alone.
    ///
    /// The call counts as an addition that no optimizer step has used yet: [`checkpoint::save`](crate::checkpoint::save) says
    /// what follows from it. A tensor that is assigned here replaces the gradient, and may be summed over a group again.
    pub fn main_grad_mut(&mut self) -> &mut Tensor {
        self.gradient.tensor_mut()
    }

    /// Adds `gradient` to the gradient outside of a scope, or does nothing if the parameter is frozen. A layer's backward calls
    /// [`accumulate_in`](Self::accumulate_in).
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let of = |value: f32| Tensor::full(value, [2], DType::F32, &Device::cpu());
    /// let mut w = Parameter::new("w", of(1.0)?)?;
    /// w.accumulate(&of(2.0)?)?;
    /// w.accumulate(&of(0.5)?)?;
    /// assert_eq!(w.main_grad().to_f32_vec()?, [2.5, 2.5]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Another shape or device than the gradient's; a dtype that is not a float; a gradient that shares its storage with another
    /// tensor.
    pub fn accumulate(&mut self, gradient: &Tensor) -> Result<()> {
        self.store(None, |grad, update, name| Ok(ops::store(grad, gradient, update, name)?))
    }

    /// Adds `gradient` to the gradient, or does nothing if the parameter is frozen. This is for the backward of a layer of your
    /// own. The gradient notes whether the recipe of the scope has scales of this rank alone
    /// ([`Backward::lone_recipe`]), which [`all_reduce_gradients`](crate::all_reduce_gradients) refuses.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// /// `y = x ⊙ w`, for an `x` of the shape of `w`.
    /// struct Gain {
    ///     w: Parameter,
    /// }
    ///
    /// impl Gain {
    ///     fn backward(&mut self, cx: &Backward<'_>, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    ///         if self.w.is_trainable() {
    ///             self.w.accumulate_in(cx, &ops::mul(dy, x)?)?; // the check saves the product
    ///         }
    ///         Ok(ops::mul(dy, self.w.tensor())?)
    ///     }
    /// }
    ///
    /// let of = |values: [f32; 2]| Tensor::from_vec(values.to_vec(), [2], &Device::cpu());
    /// let mut gain = Gain { w: Parameter::new("w", of([2.0, 3.0])?)? };
    /// let mut scaling = Scaling::new(&GemmSlots::new("other"), &Device::cpu())?;
    /// for (trainable, dw) in [(true, vec![4.0, 10.0]), (false, vec![])] {
    ///     gain.w.set_trainable(trainable)?;
    ///     let (x, dy) = (of([4.0, 5.0])?, of([1.0, 2.0])?);
    ///     let dx = scaling.in_backward(|cx| gain.backward(cx, &x, &dy))?;
    ///     assert_eq!(dx.to_f32_vec()?, [2.0, 6.0]);
    ///     assert_eq!(gain.w.main_grad().to_f32_vec()?, dw);
    /// }
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`accumulate`](Self::accumulate).
    pub fn accumulate_in(&mut self, cx: &Backward<'_>, gradient: &Tensor) -> Result<()> {
        self.store(cx.lone_recipe(), |grad, update, name| Ok(ops::store(grad, gradient, update, name)?))
    }

    /// Adds to the gradient by `store`, which takes it, whether to add to what it holds or to replace that, and the parameter's name;
    /// or does nothing if the parameter is frozen. The first of the backward passes since [`zero_grad`](Self::zero_grad) replaces. All
    /// add in this way, or by [`fill`](Self::fill). `lone_recipe` is that of the scope ([`Backward::lone_recipe`]).
    pub(crate) fn store(
        &mut self,
        lone_recipe: Option<Arc<str>>,
        store: impl FnOnce(&mut Tensor, Update, &str) -> Result<()>,
    ) -> Result<()> {
        if !self.is_trainable {
            return Ok(());
        }
        self.gradient.expect_here(&self.name)?;
        let name = &self.name;
        self.gradient.store(Event::Added { lone_recipe }, |grad, update| store(grad, update, name))
    }

    /// Calls `f` with the gradient of `parameter`, for an operation that computes it in the pass that has the data: one launch less than
    /// [`accumulate_in`](Self::accumulate_in). `f` gets `None` if there is no parameter, or it is frozen. See [`store`](Self::store).
    pub(crate) fn store_in_pass<T>(
        parameter: Option<&mut Self>,
        lone_recipe: Option<Arc<str>>,
        f: impl FnOnce(Option<&mut GradientMut<'_>>) -> Result<T>,
    ) -> Result<T> {
        let Some(parameter) = parameter.filter(|parameter| parameter.is_trainable) else { return f(None) };
        parameter.gradient.expect_here(&parameter.name)?;
        let name = &parameter.name;
        parameter.gradient.store(Event::Added { lone_recipe }, |grad, update| {
            f(Some(&mut GradientMut::new(grad, name, update)))
        })
    }

    /// Adds to the gradient by `add`, which cannot replace what it holds: see [`store`](Self::store).
    pub(crate) fn fill(
        &mut self,
        lone_recipe: Option<Arc<str>>,
        add: impl FnOnce(&mut Tensor, &str) -> Result<()>,
    ) -> Result<()> {
        if !self.is_trainable {
            return Ok(());
        }
        self.gradient.expect_here(&self.name)?;
        self.gradient.change(Event::Added { lone_recipe }, |grad| add(grad, &self.name))
    }

    /// Sets the gradient to 0. A frozen parameter has none.
    ///
    /// The memory is set to 0 only when it must be: see [`zero_grad`](crate::zero_grad()) of a model.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn zero_grad(&mut self) -> Result<()> {
        let new = self.new_grad()?;
        self.clear_grad(new)
    }

    /// Allocates a gradient of 0 if the present one shares its storage with a tensor that may still be read, or is away.
    pub(crate) fn new_grad(&self) -> Result<Option<Tensor>> {
        if !self.gradient.is_shared() && !self.gradient.is_away() {
            return Ok(None);
        }
        self.device().expect_eager("zero_grad", "drop what shares the gradient's storage before")?;
        gradient_of(*self.shape(), self.device()).map(Some)
    }

    /// Sets the gradient to 0, or to the result of [`new_grad`](Self::new_grad).
    pub(crate) fn clear_grad(&mut self, new: Option<Tensor>) -> Result<()> {
        if !self.is_trainable {
            return Ok(());
        }
        match new {
            Some(new) => self.gradient.change(Event::Cleared, |grad| {
                *grad = new;
                Ok(())
            }),
            // In place, because recorded steps read it at this address.
            None => self.gradient.clear(&self.name),
        }
    }

    /// Returns the gradient with what is noted of it.
    pub(crate) fn gradient(&self) -> &Gradient {
        &self.gradient
    }

    pub(crate) fn gradient_mut(&mut self) -> &mut Gradient {
        &mut self.gradient
    }
}
