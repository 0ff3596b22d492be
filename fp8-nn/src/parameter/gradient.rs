//! A parameter's gradient, and what has happened to it since it was last cleared.
//!
//! Backward, reductions and optimizer steps note here what they do, so that `all_reduce_gradients` sums no gradient twice and
//! none that was computed with scales of one rank, and `checkpoint::save` drops none that no step has used. The notes belong to
//! the tensor: if the caller replaces it, they are gone. Each replay of a recorded step makes the notes of the step again.
//!
//! The memory of a gradient that is cleared keeps its contents until something is added, which replaces them, or somebody reads
//! the gradient ([`Cleared`]). A gradient that a recorded step may change is set to 0 at once.

use super::cleared::{Cleared, Shared};
use crate::{Error, Result};
use fp8_kernels::ops::Update;
use fp8_kernels::{DType, Device, MemoryKind, Replayed, Shape, Tensor};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct Gradient {
    /// Without elements while the gradient waits in `cleared`.
    tensor: Tensor,
    /// A place for it, once it was cleared.
    cleared: Option<Cleared>,
    is_cleared: bool,
    /// The storage of the tensor that stands here while the gradient itself is elsewhere.
    placeholder: Option<u64>,
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
    /// The place of a gradient that the event cleared.
    cleared: Option<Arc<Shared>>,
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
        self.cleared.iter().for_each(|cleared| cleared.keep());
    }
}

impl Gradient {
    /// Wraps a gradient of 0.
    pub(super) fn new(tensor: Tensor) -> Self {
        let notes = Notes { storage: tensor.storage_number(), ..Notes::default() };
        let notes = Arc::new(Mutex::new(notes));
        Self { tensor, cleared: None, is_cleared: false, placeholder: None, notes }
    }

    /// Returns the tensor, after it was set to 0 if that was put off. If the device fails at it, it returns a tensor without
    /// elements.
    pub(super) fn tensor(&self) -> &Tensor {
        match &self.cleared {
            Some(cleared) if self.is_cleared => cleared.read(&self.tensor),
            _ => &self.tensor,
        }
    }

    /// Returns whether another tensor shares its storage.
    pub(crate) fn is_shared(&self) -> bool {
        match &self.cleared {
            Some(cleared) if self.is_cleared => cleared.is_shared(),
            _ => self.tensor.holders() > 0,
        }
    }

    /// Returns the tensor for the caller, who may add to it or replace it.
    pub(super) fn tensor_mut(&mut self) -> &mut Tensor {
        self.note(Event::Added { lone_recipe: None });
        // After a failure it has no elements, as in `tensor`.
        drop(self.settle());
        &mut self.tensor
    }

    /// Sets the tensor to 0 if that was put off.
    fn settle(&mut self) -> Result<()> {
        if let (Some(cleared), true) = (&mut self.cleared, self.is_cleared) {
            if let Some(tensor) = cleared.take()? {
                self.tensor = tensor;
            }
            self.is_cleared = false;
        }
        Ok(())
    }

    /// Notes an event, now and in each replay if a step is being recorded.
    pub(crate) fn note(&self, event: Event) {
        let mut notes = self.notes();
        let before = notes.clone();
        notes.apply(&event);
        drop(notes);
        if self.tensor.device().capture_number().is_some() {
            let before = Mutex::new(before);
            let cleared =
                self.cleared.as_ref().filter(|_| self.is_cleared && matches!(event, Event::Cleared));
            let cleared = cleared.map(|cleared| cleared.shared().clone());
            let recorded = Recorded { notes: self.notes.clone(), event, before, cleared };
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
        self.settle()?;
        self.rewrite_as_is(f)
    }

    fn rewrite_as_is<T>(&mut self, f: impl FnOnce(&mut Tensor) -> Result<T>) -> Result<T> {
        drop(self.notes()); // notices a tensor that the caller has replaced before
        let result = f(&mut self.tensor);
        lock(&self.notes).storage = self.storage_number();
        result
    }

    /// Adds to the tensor by `f` and notes the event; or has `f` replace what it holds, if it was cleared.
    pub(super) fn store<T>(
        &mut self,
        event: Event,
        f: impl FnOnce(&mut Tensor, Update) -> Result<T>,
    ) -> Result<T> {
        let stale = self.cleared.as_mut().filter(|_| self.is_cleared).and_then(Cleared::take_stale);
        let Some(memory) = stale else { return self.change(event, |tensor| f(tensor, Update::Add)) };
        let empty = mem::replace(&mut self.tensor, memory);
        self.is_cleared = false;
        let result = match self.rewrite_as_is(|tensor| f(tensor, Update::Write)) {
            Ok(result) => result,
            Err(error) => {
                // It may have been written in part.
                self.put_off(empty);
                return Err(error);
            }
        };
        self.note(event);
        Ok(result)
    }

    /// Sets the tensor to 0 and notes it: later, if it can be put off. `parameter` is the name of the parameter.
    pub(super) fn clear(&mut self, parameter: &str) -> Result<()> {
        let device = self.tensor.device().clone();
        device.expect_usable()?;
        // A recorded step adds to what the memory holds, unless it begins by clearing the gradient itself.
        if device.has_graphs() && device.capture_number().is_none() {
            return self.change(Event::Cleared, |tensor| Ok(tensor.set_zero(parameter)?));
        }
        if self.is_cleared && self.cleared.as_ref().is_some_and(Cleared::is_stale) {
            self.note(Event::Cleared);
            return Ok(());
        }
        self.settle()?;
        let empty = no_gradient(&device)?;
        drop(self.notes());
        self.put_off(empty);
        self.note(Event::Cleared);
        Ok(())
    }

    /// Puts the tensor where it waits for whoever needs zeros, and one without elements in its place.
    fn put_off(&mut self, empty: Tensor) {
        let tensor = mem::replace(&mut self.tensor, empty);
        self.cleared.get_or_insert_with(|| Cleared::new(tensor.device())).put(tensor);
        self.is_cleared = true;
    }

    /// Returns the number of the tensor's storage.
    fn storage_number(&self) -> u64 {
        let waiting = self.cleared.as_ref().filter(|_| self.is_cleared).and_then(Cleared::storage_number);
        waiting.unwrap_or_else(|| self.tensor.storage_number())
    }

    /// Takes the gradient away, to be reduced. Until it comes back, a tensor without elements stands in its place.
    pub(crate) fn take(&mut self) -> Result<Tensor> {
        let none = no_gradient(self.tensor.device())?;
        self.placeholder = Some(none.storage_number());
        self.rewrite(|gradient| Ok(mem::replace(gradient, none)))
    }

    /// Puts the gradient back as its sum over the group with this id. If another has been put in its place, that one stays.
    pub(crate) fn put_back(&mut self, sum: Tensor, group: Arc<str>) -> Result<()> {
        if !self.is_away() {
            return Ok(());
        }
        self.placeholder = None;
        self.change(Event::Summed { group }, |gradient| {
            *gradient = sum;
            Ok(())
        })
    }

    /// Returns whether the gradient was taken away and is not back.
    pub(crate) fn is_away(&self) -> bool {
        self.placeholder.is_some_and(|storage| storage == self.storage_number())
    }

    /// Returns an error if the gradient is away; `parameter` is the name of the parameter.
    pub(crate) fn expect_here(&self, parameter: &Arc<str>) -> Result<()> {
        if self.is_away() { Err(Error::GradientAway { parameter: parameter.clone() }) } else { Ok(()) }
    }

    /// Returns whether something was added that no optimizer step has used.
    pub(crate) fn awaits_step(&self) -> bool {
        (self.is_cleared || self.tensor.numel() > 0 || self.is_away()) && self.notes().awaits_step
    }

    /// Returns an error if a sum over the group would be wrong; `parameter` is the name of the parameter.
    pub(crate) fn expect_summable(&self, parameter: &Arc<str>, group: &str) -> Result<()> {
        self.expect_here(parameter)?;
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

    /// Returns an error if something was added that was not summed over the group with this id.
    pub(crate) fn expect_summed(&self, parameter: &Arc<str>, group: &str) -> Result<()> {
        let notes = self.notes();
        if notes.awaits_step && !notes.summed_over.iter().any(|summed| **summed == *group) {
            return Err(Error::PartialGradient { parameter: parameter.clone(), group: group.to_owned() });
        }
        Ok(())
    }

    /// Returns the notes. A tensor that the caller has put in place of another one starts with new ones.
    fn notes(&self) -> MutexGuard<'_, Notes> {
        let mut notes = lock(&self.notes);
        let storage = self.storage_number();
        if notes.storage != storage {
            *notes = Notes { storage, awaits_step: true, ..Notes::default() };
        }
        notes
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates a gradient of 0.
pub(super) fn gradient_of(shape: Shape, device: &Device) -> Result<Tensor> {
    let _kind = MemoryKind::Gradients.enter();
    Ok(Tensor::zeros(shape, DType::F32, device)?)
}

/// The gradient of a frozen parameter.
pub(super) fn no_gradient(device: &Device) -> Result<Tensor> {
    Ok(Tensor::zeros([0], DType::F32, device)?)
}
