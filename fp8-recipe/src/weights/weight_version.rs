//! The version of a weight, by which its FP8 copies know whether it has changed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The version of a weight's value, and the number of optimizer steps that the weight has seen.
///
/// A parameter and the cache of its FP8 copies share one: see [`Forward::quantize_parameter`](crate::Forward::quantize_parameter).
/// Versions are unique in the process: equal versions mean equal bytes, and a weight never returns to an earlier one.
///
/// ```
/// use fp8_recipe::WeightVersion;
/// let (w, other) = (WeightVersion::new(), WeightVersion::new());
/// let first = w.current();
/// assert_ne!(first, other.current());
/// w.advance(); // the value has changed
/// assert_ne!(w.current(), first);
/// w.end_step(); // an optimizer step is over, whether or not it changed the value
/// assert_eq!((w.steps(), other.steps()), (1, 0));
/// w.retreat(); // the step did not run
/// w.resume_step();
/// assert_eq!((w.current(), w.steps()), (first, 0));
/// ```
#[derive(Debug)]
pub struct WeightVersion {
    version: AtomicU64,
    /// The version before the last change.
    previous: AtomicU64,
    steps: AtomicU64,
}

impl WeightVersion {
    /// Returns a version that no other value in the process has.
    pub fn new() -> Self {
        let version = next();
        Self { version: AtomicU64::new(version), previous: AtomicU64::new(version), steps: AtomicU64::new(0) }
    }

    /// Returns the version of the present value.
    pub fn current(&self) -> u64 {
        self.version.load(Relaxed)
    }

    /// Gives the value a new version, after it has changed.
    pub fn advance(&self) {
        self.previous.store(self.version.swap(next(), Relaxed), Relaxed);
    }

    /// Takes the last [`advance`](Self::advance) back, after a recorded step or a replay that did not run.
    pub fn retreat(&self) {
        self.version.store(self.previous.load(Relaxed), Relaxed);
    }

    /// Returns the number of optimizer steps so far.
    pub fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    /// Counts an optimizer step, including one that leaves the value as it is because the weight is frozen or the step is
    /// skipped. Under Transformer Engine's rules, copies that were quantized before a scale was known serve until then.
    pub fn end_step(&self) {
        self.steps.fetch_add(1, Relaxed);
    }

    /// Takes the last [`end_step`](Self::end_step) back, after a recorded step or a replay that did not run.
    pub fn resume_step(&self) {
        self.steps.fetch_sub(1, Relaxed);
    }
}

impl Default for WeightVersion {
    fn default() -> Self {
        Self::new()
    }
}

fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Relaxed)
}
