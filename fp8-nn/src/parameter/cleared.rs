//! A gradient that was cleared and whose memory is not yet set to 0.
//!
//! The next backward pass usually replaces all of it, so setting it to 0 would be a wasted pass over memory. Whoever reads the
//! gradient before that finds zeros, which are written then. What the memory held before is never read.

use crate::Result;
use fp8_kernels::{Deferred, Device, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The place of a gradient while it is cleared.
#[derive(Debug)]
pub(super) struct Cleared {
    shared: Arc<Shared>,
    /// The gradient once somebody has read it, or a tensor without elements if the device failed to set it to 0.
    read: OnceLock<Tensor>,
}

/// The part that the device knows: it sets the gradient to 0 before a step is recorded, and at the end of a recorded step.
#[derive(Debug, Default)]
pub(super) struct Shared(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The gradient while it waits here.
    tensor: Option<Tensor>,
    /// The number of its storage until the place is empty, also while a reader takes it out.
    storage: Option<u64>,
    memory: Memory,
}

/// The contents of the gradient's memory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// Values of another step.
    #[default]
    Stale,
    Zeros,
    /// The gradient: what would have cleared it was recorded and never ran.
    Kept,
}

impl State {
    fn settle(&mut self) -> fp8_kernels::Result<()> {
        if let (Some(tensor), Memory::Stale) = (&mut self.tensor, self.memory) {
            tensor.set_zero("gradient")?;
            self.memory = Memory::Zeros;
        }
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what the memory of a gradient that waits here holds, because the step that cleared it has not run.
    pub(super) fn keep(&self) {
        self.lock().memory = Memory::Kept;
    }
}

impl Deferred for Shared {
    fn settle(&self) -> fp8_kernels::Result<()> {
        self.lock().settle()
    }
}

impl Cleared {
    pub(super) fn new(device: &Device) -> Self {
        let shared = Arc::new(Shared::default());
        device.defer(&(shared.clone() as Arc<dyn Deferred>));
        Self { shared, read: OnceLock::new() }
    }

    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Puts a gradient here, as one that is 0 from now on.
    pub(super) fn put(&mut self, tensor: Tensor) {
        self.read = OnceLock::new();
        let storage = Some(tensor.storage_number());
        *self.shared.lock() = State { tensor: Some(tensor), storage, memory: Memory::Stale };
    }

    /// Returns the gradient for a reader, or `empty` if the device fails.
    pub(super) fn read(&self, empty: &Tensor) -> &Tensor {
        self.read.get_or_init(|| {
            let mut state = self.shared.lock();
            let settled = state.settle();
            settled.ok().and_then(|()| state.tensor.take()).unwrap_or_else(|| empty.clone())
        })
    }

    /// Returns the gradient, set to 0, and empties the place.
    pub(super) fn take(&mut self) -> Result<Option<Tensor>> {
        let mut state = self.shared.lock();
        state.settle()?;
        state.storage = None;
        Ok(state.tensor.take().or_else(|| self.read.take()))
    }

    /// Returns the gradient and empties the place, if the gradient is still to be set to 0. A step that is being recorded has cleared
    /// it then: what was cleared before was set to 0 before.
    pub(super) fn take_stale(&mut self) -> Option<Tensor> {
        let mut state = self.shared.lock();
        if state.memory != Memory::Stale {
            return None;
        }
        let stale = state.tensor.take()?;
        state.storage = None;
        Some(stale)
    }

    /// Returns whether the gradient is still to be set to 0.
    pub(super) fn is_stale(&self) -> bool {
        let state = self.shared.lock();
        state.tensor.is_some() && state.memory == Memory::Stale
    }

    /// Returns the number of the gradient's storage, unless the place is empty.
    pub(super) fn storage_number(&self) -> Option<u64> {
        self.shared.lock().storage
    }

    /// Returns whether another tensor shares the gradient's storage.
    pub(super) fn is_shared(&self) -> bool {
        self.read.get().is_some_and(|tensor| tensor.holders() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_kernels::DType;

    fn tensors() -> (Tensor, Tensor) {
        let full = |value, len: usize| Tensor::full(value, [len], DType::F32, &Device::cpu()).unwrap();
        (full(f32::NAN, 3), full(0.0, 0))
    }

    #[test]
    fn a_reader_finds_zeros_and_a_writer_the_memory() {
        let (stale, empty) = tensors();
        let mut cleared = Cleared::new(&Device::cpu());
        let storage = stale.storage_number();
        cleared.put(stale);
        assert_eq!((cleared.storage_number(), cleared.is_shared()), (Some(storage), false));
        let memory = cleared.take_stale().unwrap();
        assert_eq!((memory.storage_number(), cleared.storage_number()), (storage, None));
        cleared.put(memory);
        assert_eq!(cleared.read(&empty).to_f32_vec().unwrap(), [0.0; 3]);
        assert!(cleared.take_stale().is_none());
        let copy = cleared.read(&empty).clone();
        assert!(cleared.is_shared());
        assert_eq!(cleared.take().unwrap().unwrap().storage_number(), copy.storage_number());
    }

    #[test]
    fn the_device_sets_it_to_zero_and_a_recording_that_fails_keeps_it() {
        let (stale, empty) = tensors();
        let mut cleared = Cleared::new(&Device::cpu());
        cleared.put(stale);
        cleared.shared().settle().unwrap();
        assert!(cleared.take_stale().is_none());
        assert_eq!(cleared.take().unwrap().unwrap().to_f32_vec().unwrap(), [0.0; 3]);
        let (stale, _) = tensors();
        cleared.put(stale);
        cleared.shared().keep();
        assert!(cleared.take_stale().is_none());
        assert!(cleared.read(&empty).to_f32_vec().unwrap()[0].is_nan());
    }

    #[test]
    fn a_failure_leaves_no_elements_and_can_be_tried_again() {
        let (stale, empty) = tensors();
        let holder = stale.clone(); // so that it cannot be changed in place
        let mut cleared = Cleared::new(&Device::cpu());
        cleared.put(stale);
        assert_eq!(cleared.read(&empty).numel(), 0);
        assert!(cleared.take().is_err());
        drop(holder);
        assert_eq!(cleared.take().unwrap().unwrap().to_f32_vec().unwrap(), [0.0; 3]);
    }
}
