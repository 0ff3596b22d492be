//! Collectives that go on while their caller computes.

use crate::{Error, Failure, Result};
use fp8_kernels::Tensor;
use std::fmt::Debug;
use std::sync::mpsc::{Receiver, TryRecvError};

/// A reduction that [`ProcessGroup::start_all_reduce`](crate::ProcessGroup::start_all_reduce) has started, and its tensors.
///
/// A `Pending` that is dropped gives up the results, not the work: the group completes it all the same, since the other ranks take
/// part in it.
///
/// ```
/// use fp8_dist::{ReduceOp, local};
/// use fp8_kernels::{Device, Tensor};
/// use std::time::Duration;
///
/// let alone = local("dp", 1, Duration::from_secs(10))?.remove(0);
/// let x = Tensor::scalar(2.0, &Device::cpu())?;
/// let mut pending = alone.start_all_reduce("x", vec![x], ReduceOp::Sum);
/// while !pending.is_done() {
///     // … compute …
/// }
/// assert_eq!(pending.wait()?[0].item()?, 2.0);
/// # Ok::<(), fp8_dist::Error>(())
/// ```
#[must_use = "the tensors come back from `wait`"]
#[derive(Debug)]
pub struct Pending(State);

#[derive(Debug)]
enum State {
    Done(Result<Vec<Tensor>>),
    /// The rank, its call, and its thread's answer.
    Thread(usize, String, Receiver<Result<Vec<Tensor>>>),
    /// Results that are on a device, in order with its other work from `wait` on.
    #[cfg(feature = "cuda")]
    Device(Box<dyn OnDevice>),
}

/// Tensors that a device's second queue fills.
#[cfg(feature = "cuda")]
pub(crate) trait OnDevice: Debug + Send {
    /// Lets all work of the device that is queued later follow, and returns the tensors.
    fn join(self: Box<Self>) -> Result<Vec<Tensor>>;
}

impl Pending {
    pub(crate) const fn done(result: Result<Vec<Tensor>>) -> Self {
        Self(State::Done(result))
    }

    pub(crate) const fn on_thread(rank: usize, call: String, answer: Receiver<Result<Vec<Tensor>>>) -> Self {
        Self(State::Thread(rank, call, answer))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(work: impl OnDevice + 'static) -> Self {
        Self(State::Device(Box::new(work)))
    }

    /// Returns whether `wait` would return at once. On GPUs it always does.
    pub fn is_done(&mut self) -> bool {
        if let State::Thread(rank, call, answer) = &self.0 {
            match answer.try_recv() {
                Ok(result) => self.0 = State::Done(result),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => self.0 = State::Done(Err(gone(*rank, call))),
            }
        }
        true
    }

    /// Waits for the reduction and returns the tensors in the order in which they were passed. They have the storage that they had.
    ///
    /// On GPUs the host does not wait: the results are in order with the device's other work from here on.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::all_reduce_in_place`](crate::ProcessGroup::all_reduce_in_place). The tensors are gone then.
    pub fn wait(self) -> Result<Vec<Tensor>> {
        match self.0 {
            State::Done(result) => result,
            State::Thread(rank, call, answer) => answer.recv().unwrap_or_else(|_| Err(gone(rank, &call))),
            #[cfg(feature = "cuda")]
            State::Device(work) => work.join(),
        }
    }
}

/// The reason of a rank whose thread has ended before its work.
pub(crate) const PANICKED: &str = "its thread panicked";

fn gone(rank: usize, call: &str) -> Error {
    let failure = Failure::GaveUp { rank, reason: PANICKED.to_owned() };
    Error::Failed { call: call.to_owned(), failure }
}
