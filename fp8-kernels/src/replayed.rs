//! The host's part of a recorded step.

use crate::Result;
use std::fmt;

/// The host's part of every launch of a graph, such as counters that a step advances and numbers that it uploads.
///
/// Pass it to [`Device::on_replay`](crate::Device::on_replay) while a step is recorded. The recorded step itself has then advanced the counters once. The
/// graph keeps it alive until the driver has finished the graph's work.
///
/// ```
/// use fp8_kernels::{Device, Replayed, Result};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
///
/// /// Counts steps, replayed ones too.
/// #[derive(Debug, Default)]
/// struct Steps(AtomicU64);
///
/// impl Replayed for Steps {
///     fn advance(&self) -> Result<()> {
///         self.0.fetch_add(1, Relaxed);
///         Ok(())
///     }
///
///     fn retreat(&self) {
///         self.0.fetch_sub(1, Relaxed);
///     }
/// }
///
/// let (device, steps) = (Device::cpu(), Arc::new(Steps::default()));
/// steps.advance()?; // in each step
/// device.on_replay(steps.clone()); // does nothing unless the step is being recorded
/// assert_eq!(steps.0.load(Relaxed), 1);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub trait Replayed: Send + Sync + fmt::Debug {
    /// Runs before every launch but the first. Makes the changes of one more step on the host.
    ///
    /// # Errors
    /// A step that cannot run. Nothing is launched then.
    fn advance(&self) -> Result<()> {
        Ok(())
    }

    /// Undoes the effect of recording the step, or of [`advance`](Self::advance), because nothing was launched.
    fn retreat(&self) {}

    /// Runs before a launch, after all calls of `advance`. Queues the upload of what has changed.
    ///
    /// # Errors
    /// An upload that failed. Nothing is launched then.
    fn upload(&self) -> Result<()> {
        Ok(())
    }

    /// Runs after every launch, including the first, before any other work is queued.
    fn launched(&self) {}
}
