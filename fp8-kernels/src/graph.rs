//! A recorded step.

use crate::backend::Backend;
use crate::backend::cuda::CudaGraph;
use crate::{Device, Error, Result};
use std::fmt;
use std::sync::Arc;

/// What the host does with every launch of a graph: counters that a step advances, numbers that it gives the device.
///
/// Handed to [`Device::on_replay`] while a step is recorded, which has advanced the counters once
/// by itself. The graph holds it until its work is gone from the driver.
pub trait Replayed: Send + Sync + fmt::Debug {
    /// Before a launch other than the first: what one more step changes on the host.
    ///
    /// # Errors
    /// Then nothing is launched.
    fn advance(&self) -> Result<()> {
        Ok(())
    }

    /// Undoes what recording the step, or [`advance`](Self::advance), has done: nothing was launched.
    fn retreat(&self) {}

    /// After all of a launch's `advance`: brings what has changed to the device, in front of the launch.
    ///
    /// # Errors
    /// Then nothing is launched.
    fn upload(&self) -> Result<()> {
        Ok(())
    }

    /// After every launch, the first too: its work is queued, and none behind it.
    fn launched(&self) {}
}

/// What a step queued on a GPU, recorded by [`Device::capture`]: one launch instead of hundreds.
///
/// It holds all memory that lived while it was recorded, and reads and writes the same addresses each time: inputs are put
/// in place by [`Tensor::write`](crate::Tensor::write), results are the tensors that the recorded step returned. Numbers that
/// an operation takes as arguments (a factor, a scale of the loss, a normalizer) stay what they were; a count that the
/// operation makes itself, a scale and a step size are new each time.
pub struct Graph {
    graph: CudaGraph,
}

impl Graph {
    /// Runs the step again, behind the work queued so far. Waits for nothing.
    ///
    /// # Errors
    /// The device failed; a counter of the step that cannot go on. Nothing has run then.
    pub fn replay(&self) -> Result<()> {
        self.graph.replay()
    }
}

/// Prints the number of the capture and the device.
impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?})", self.graph)
    }
}

impl Device {
    /// Records what `step` queues on this GPU as one graph, and runs it once: the host's part of `step` runs here, as if
    /// it had been called, and the recorded part behind it.
    ///
    /// Run the step a few times before: kernels are compiled, products planned, optimizer state and arenas made and scales
    /// calibrated by first steps, which cannot be recorded. Other threads leave the device alone meanwhile.
    ///
    /// # Errors
    /// What `step` returns; an operation that cannot be recorded, since it reads from the device, or would do the same at
    /// each replay though it should not; a device that records nothing: the CPU. Nothing has run then, and counters are as
    /// they were.
    pub fn capture<T, E: From<Error>>(&self, step: impl FnOnce() -> Result<T, E>) -> Result<(Graph, T), E> {
        match self.backend() {
            Backend::Cpu => {
                let remedy = "call the step itself: the CPU has no launches to save";
                Err(Error::Unsupported { op: "capture", device: self.to_string(), remedy }.into())
            }
            Backend::Cuda(gpu) => gpu.capture(step).map(|(graph, output)| (Graph { graph }, output)),
        }
    }

    /// The number of the capture under way, different for each; `None` where work runs as it is queued.
    pub fn capture_number(&self) -> Option<u64> {
        match self.backend() {
            Backend::Cpu => None,
            Backend::Cuda(gpu) => gpu.capture_number(),
        }
    }

    /// An error if a step is being recorded, in which `op` cannot take part.
    ///
    /// # Errors
    /// That one.
    pub fn expect_eager(&self, op: &str, remedy: &'static str) -> Result<()> {
        match self.backend() {
            Backend::Cpu => Ok(()),
            Backend::Cuda(gpu) => gpu.expect_eager(op, remedy),
        }
    }

    /// Lets `replayed` take part in every launch of the graph that is being recorded; nothing if none is.
    pub fn on_replay(&self, replayed: Arc<dyn Replayed>) {
        match self.backend() {
            Backend::Cpu => {}
            Backend::Cuda(gpu) => gpu.on_replay(replayed),
        }
    }
}
