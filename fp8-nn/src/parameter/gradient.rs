//! A parameter's gradient, and what has happened to it since it was last cleared.
//!
//! Backward, reductions and optimizer steps note here what they do, so that `all_reduce_gradients` sums no gradient twice and
//! none that was computed with scales of one rank, and `checkpoint::save` drops none that no step has used. The notes belong to
//! the tensor: if the caller replaces it, they are gone. Each replay of a recorded step makes the notes of the step again.

use super::{Parameter, gradient_of};
use crate::{Error, Result};
use fp8_kernels::{Replayed, Tensor, ops};
use fp8_recipe::Backward;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct Gradient {
    tensor: Tensor,
    /// Shared with recorded steps.
    notes: Arc<Mutex<Notes>>,
}

#[derive(Debug, Clone, Default)]
struct Notes {
    /// The storage of the tensor that the notes are about.
    storage: u64,
    /// Whether something was added that no optimizer step has used.
    awaits_step: bool,
    /// A recipe whose scales differed between ranks when something was added.
    lone_recipe: Option<Arc<str>>,
    /// The groups over which the gradient was summed.
    summed_over: Vec<Arc<str>>,
}

/// An event that changes the notes of a gradient.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// Something was added, under a recipe whose scales differ between ranks if there is one.
    Added { lone_recipe: Option<Arc<str>> },
    /// It was replaced by its sum over the group with this id.
    Summed { group: Arc<str> },
    /// An optimizer's step has used it.
    Stepped,
    /// It was set to 0.
    Cleared,
}

impl Notes {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Added { lone_recipe } => {
                self.awaits_step = true;
                self.lone_recipe = self.lone_recipe.take().or_else(|| lone_recipe.clone());
            }
            Event::Summed { group } => self.summed_over.push(group.clone()),
            Event::Stepped => self.awaits_step = false,
            Event::Cleared => *self = Self { storage: self.storage, ..Self::default() },
        }
    }
}

/// An event of a recorded step.
#[derive(Debug)]
struct Recorded {
    notes: Arc<Mutex<Notes>>,
    event: Event,
    /// The notes before the event.
    before: Mutex<Notes>,
}

impl Replayed for Recorded {
    fn advance(&self) -> fp8_kernels::Result<()> {
        let mut notes = lock(&self.notes);
        lock(&self.before).clone_from(&notes);
        notes.apply(&self.event);
        Ok(())
    }

    fn retreat(&self) {
        lock(&self.notes).clone_from(&lock(&self.before));
    }
}

impl Gradient {
    /// Wraps a gradient of 0.
    pub(super) fn new(tensor: Tensor) -> Self {
        let notes = Notes { storage: tensor.storage_number(), ..Notes::default() };
        Self { tensor, notes: Arc::new(Mutex::new(notes)) }
    }

    pub(super) const fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the tensor for the caller, who may add to it or replace it.
    fn tensor_mut(&mut self) -> &mut Tensor {
        self.note(Event::Added { lone_recipe: None });
        &mut self.tensor
    }

    /// Notes an event, now and in each replay if a step is being recorded.
    pub(crate) fn note(&self, event: Event) {
        let mut notes = self.notes();
        let before = notes.clone();
        notes.apply(&event);
        drop(notes);
        if self.tensor.device().capture_number().is_some() {
            let before = Mutex::new(before);
            let recorded = Recorded { notes: self.notes.clone(), event, before };
            self.tensor.device().on_replay(Arc::new(recorded));
        }
    }

    /// Changes the tensor by `f` and notes the event. `f` may give it other storage.
    pub(crate) fn change<T>(&mut self, event: Event, f: impl FnOnce(&mut Tensor) -> Result<T>) -> Result<T> {
        let result = self.rewrite(f)?;
        self.note(event);
        Ok(result)
    }

    /// Changes the tensor by `f`, after which it is the same gradient in other units or of another length.
    pub(crate) fn rewrite<T>(&mut self, f: impl FnOnce(&mut Tensor) -> Result<T>) -> Result<T> {
        drop(self.notes()); // notices a tensor that the caller has replaced before
        let result = f(&mut self.tensor);
        lock(&self.notes).storage = self.tensor.storage_number();
        result
    }

    /// Returns whether something was added that no optimizer step has used.
    pub(crate) fn awaits_step(&self) -> bool {
        self.tensor.numel() > 0 && self.notes().awaits_step
    }

    /// Returns an error if a sum over the group would be wrong; `parameter` is the name of the parameter.
    pub(crate) fn expect_summable(&self, parameter: &Arc<str>, group: &str) -> Result<()> {
        let notes = self.notes();
        let parameter = parameter.clone();
        if notes.summed_over.iter().any(|summed| **summed == *group) {
            return Err(Error::SummedTwice { parameter, group: group.to_owned() });
        }
        match &notes.lone_recipe {
            Some(recipe) => Err(Error::ScalesPerRank { parameter, recipe: recipe.to_string() }),
            None => Ok(()),
        }
    }

    /// Returns the notes. A tensor that the caller has put in place of another one starts with new ones.
    fn notes(&self) -> MutexGuard<'_, Notes> {
        let mut notes = lock(&self.notes);
        let storage = self.tensor.storage_number();
        if notes.storage != storage {
            *notes = Notes { storage, awaits_step: true, ..Notes::default() };
        }
        notes
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Parameter {
    /// Returns the accumulated gradient, f32. It has no elements if the parameter is frozen.
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
        self.fill(None, |grad, name| Ok(ops::accumulate(grad, gradient, name)?))
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
        self.fill(cx.lone_recipe(), |grad, name| Ok(ops::accumulate(grad, gradient, name)?))
    }

    /// Adds to the gradient by `add`, which takes it and the parameter's name, or does nothing if the parameter is frozen. All
    /// backward passes add in this way. `lone_recipe` is that of the scope ([`Backward::lone_recipe`]).
    pub(crate) fn fill(
        &mut self,
        lone_recipe: Option<Arc<str>>,
        add: impl FnOnce(&mut Tensor, &str) -> Result<()>,
    ) -> Result<()> {
        if !self.is_trainable {
            return Ok(());
        }
        self.gradient.change(Event::Added { lone_recipe }, |grad| add(grad, &self.name))
    }

    /// Sets the gradient to 0. A frozen parameter has none.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn zero_grad(&mut self) -> Result<()> {
        let new = self.new_grad()?;
        self.clear_grad(new)
    }

    /// Allocates a gradient of 0 if the present one shares its storage with a tensor that may still be read.
    pub(crate) fn new_grad(&self) -> Result<Option<Tensor>> {
        if self.main_grad().holders() == 0 {
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
        self.gradient.change(Event::Cleared, |grad| match new {
            Some(new) => {
                *grad = new;
                Ok(())
            }
            // In place, because recorded steps read it at this address.
            None => Ok(grad.set_zero(&self.name)?),
        })
    }

    /// Returns the gradient with what is noted of it.
    pub(crate) fn gradient(&self) -> &Gradient {
        &self.gradient
    }

    pub(crate) fn gradient_mut(&mut self) -> &mut Gradient {
        &mut self.gradient
    }
}
