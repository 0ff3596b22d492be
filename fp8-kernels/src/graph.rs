//! Recording a training step on a GPU and replaying it as one launch.

use crate::backend::Backend;
use crate::backend::cuda::CudaGraph;
use crate::{Deferred, Device, Error, Replayed, Result};
use std::fmt;
use std::sync::Arc;

/// The work of a training step on a GPU, recorded by [`Device::capture`]. It replays as one launch instead of hundreds.
///
/// A graph keeps all memory alive that was allocated when the step was recorded, and each replay reads and writes the same
/// addresses. Replace inputs by [`Tensor::write`](crate::Tensor::write); the results are in the tensors that the recorded step
/// returned. Numbers that an operation takes as arguments (a factor, a loss scale, a normalizer) keep their recorded values.
/// Counts that the operations compute, scales, and the optimizer's step size are new in each replay.
///
/// ```
/// use fp8_kernels::{DType, Device, Result, Tensor, ops};
/// fn record_and_replay(gpu: &Device) -> Result<()> {
///     let mut x = Tensor::full(1.0, [8], DType::F32, gpu)?;
///     ops::sum(&x)?; // compiles the kernel, which cannot be done while recording
///     let (graph, sum) = gpu.capture(|| ops::sum(&x))?;
///     assert_eq!(sum.item()?, 8.0);
///     x.write(&[2.0f32; 8], "x")?;
///     graph.replay()?;
///     assert_eq!(sum.item()?, 16.0);
///     Ok(())
/// }
/// # let error = record_and_replay(&Device::cpu()).unwrap_err().to_string();
/// # assert!(error.contains("capture"), "{error}");
/// if let Ok(gpu) = Device::cuda(0) {
///     record_and_replay(&gpu)?;
/// }
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub struct Graph {
    graph: CudaGraph,
}

impl Graph {
    /// Queues the step again, after the work queued so far, and returns without waiting.
    ///
    /// # Errors
    /// The device failed; a counter of the step that cannot advance. Nothing has run then.
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
    /// Records the work that `step` queues on this GPU as one graph, and runs it once. The host's part of `step` runs during
    /// the call, and the recorded work after it.
    ///
    /// Run the step a few times before. The first steps compile kernels, plan matrix products and attention, allocate optimizer state and
    /// arenas and calibrate scales, which cannot be recorded. No other thread may use the device during the call.
    ///
    /// # Errors
    /// An error that `step` returns; an operation that cannot be recorded because it reads from the device, or because its
    /// arguments must change from step to step; the CPU, which records nothing. Nothing has run then, and counters have their
    /// old values.
    pub fn capture<T, E: From<Error>>(&self, step: impl FnOnce() -> Result<T, E>) -> Result<(Graph, T), E> {
        match self.backend() {
            Backend::Cpu => {
                let remedy = "call the step itself: the CPU has no launches to save";
                Err(Error::Unsupported { op: "capture", device: self.to_string(), remedy }.into())
            }
            Backend::Cuda(gpu) => gpu.capture(step).map(|(graph, output)| (Graph { graph }, output)),
        }
    }

    /// Returns a number that identifies the current capture, or `None` if no step is being recorded.
    pub fn capture_number(&self) -> Option<u64> {
        match self.backend() {
            Backend::Cpu => None,
            Backend::Cuda(gpu) => gpu.capture_number(),
        }
    }

    /// Checks that no step is being recorded, for an operation `op` that cannot be recorded.
    ///
    /// # Errors
    /// A step that is being recorded; the error contains `op` and `remedy`.
    pub fn expect_eager(&self, op: &str, remedy: &'static str) -> Result<()> {
        match self.backend() {
            Backend::Cpu => Ok(()),
            Backend::Cuda(gpu) => gpu.expect_eager(op, remedy),
        }
    }

    /// Checks that the device has not failed in a way after which its memory may be wrong. Waits for nothing.
    ///
    /// ```
    /// assert!(fp8_kernels::Device::cpu().expect_usable().is_ok());
    /// ```
    ///
    /// # Errors
    /// A device that failed before ([`Error::Poisoned`](crate::Error::Poisoned)); none on the CPU.
    pub fn expect_usable(&self) -> Result<()> {
        match self.backend() {
            Backend::Cpu => Ok(()),
            Backend::Cuda(gpu) => gpu.expect_usable(),
        }
    }

    /// Returns whether a recorded step exists that may run again. It is false on the CPU.
    ///
    /// ```
    /// assert!(!fp8_kernels::Device::cpu().has_graphs());
    /// ```
    pub fn has_graphs(&self) -> bool {
        match self.backend() {
            Backend::Cpu => false,
            Backend::Cuda(gpu) => gpu.has_graphs(),
        }
    }

    /// Registers `work`, which the device runs before a step is recorded, and at the end of the recorded step if it was put off
    /// during the recording. The same work may be registered more than once. Does nothing on the CPU. The device forgets `work` when
    /// it is dropped. See [`Deferred`].
    pub fn defer(&self, work: &Arc<dyn Deferred>) {
        match self.backend() {
            Backend::Cpu => {}
            Backend::Cuda(gpu) => gpu.deferred().add(work),
        }
    }

    /// Makes `replayed` a part of every launch of the graph that is being recorded. Does nothing if none is.
    pub fn on_replay(&self, replayed: Arc<dyn Replayed>) {
        match self.backend() {
            Backend::Cpu => {}
            Backend::Cuda(gpu) => gpu.on_replay(replayed),
        }
    }
}
