//! The memory of tensors by what it is used for, counted per device.

use parking_lot::Mutex;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::thread::{self, ThreadId};

/// The use of a tensor's memory, in a [`MemoryReport`].
///
/// New tensors have the kind that the thread is in ([`enter`](Self::enter)), and are [`Temporary`](Self::Temporary) outside.
/// [`Tensor::set_memory_kind`](crate::Tensor::set_memory_kind) changes the kind of a tensor that exists.
///
/// ```
/// use fp8_kernels::{DType, Device, MemoryKind, Tensor};
/// let device = Device::cpu();
/// let before = device.memory_report().now.optimizer;
/// let moments = {
///     let _kind = MemoryKind::Optimizer.enter();
///     Tensor::zeros([256], DType::F32, &device)?
/// };
/// assert_eq!(device.memory_report().now.optimizer - before, moments.numel() * 4);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MemoryKind {
    /// Parameters of a model, and the quantized copies of weights that are kept between steps.
    Parameters,
    /// Gradients of parameters.
    Gradients,
    /// Moments and f32 copies of an optimizer.
    Optimizer,
    /// Memory that a forward pass allocates. Between forward and backward, this is what backward needs and the model's output.
    Saved,
    /// Everything else: gradients of activations, activations that are computed again, workspaces, histories of scales. Default.
    #[default]
    Temporary,
}

const KINDS: usize = 5;

thread_local! {
    static CURRENT: Cell<MemoryKind> = const { Cell::new(MemoryKind::Temporary) };
}

impl MemoryKind {
    const ALL: [Self; KINDS] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Saved, Self::Temporary];

    /// Gives tensors that this thread makes this kind until the guard is dropped.
    #[must_use = "the kind ends with the guard"]
    pub fn enter(self) -> MemoryKindGuard {
        MemoryKindGuard { outer: CURRENT.replace(self), thread: thread::current().id() }
    }

    fn of(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }
}

/// Ends a [`MemoryKind`] of this thread when it is dropped.
///
/// ```
/// use fp8_kernels::{DType, Device, MemoryKind, Tensor};
/// let kind = MemoryKind::Gradients.enter();
/// let grad = Tensor::zeros([16], DType::F32, &Device::cpu())?; // counted as a gradient
/// drop(kind);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct MemoryKindGuard {
    outer: MemoryKind,
    thread: ThreadId,
}

impl Drop for MemoryKindGuard {
    fn drop(&mut self) {
        // On another thread the guard has nothing to end.
        if thread::current().id() == self.thread {
            CURRENT.set(self.outer);
        }
    }
}

/// Bytes by what they are used for.
///
/// ```
/// use fp8_kernels::MemoryUse;
/// let bytes = MemoryUse { parameters: 2048, saved: 1024, ..Default::default() };
/// assert_eq!(bytes.total(), 3072);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Bytes of [`MemoryKind::Parameters`]. Default: 0.
    pub parameters: usize,
    /// Bytes of [`MemoryKind::Gradients`]. Default: 0.
    pub gradients: usize,
    /// Bytes of [`MemoryKind::Optimizer`]. Default: 0.
    pub optimizer: usize,
    /// Bytes of [`MemoryKind::Saved`]. Default: 0.
    pub saved: usize,
    /// Bytes of [`MemoryKind::Temporary`]. Default: 0.
    pub temporary: usize,
}

impl MemoryUse {
    /// Returns the sum.
    pub const fn total(&self) -> usize {
        self.parameters + self.gradients + self.optimizer + self.saved + self.temporary
    }

    fn of(&mut self, kind: MemoryKind) -> &mut usize {
        match kind {
            MemoryKind::Parameters => &mut self.parameters,
            MemoryKind::Gradients => &mut self.gradients,
            MemoryKind::Optimizer => &mut self.optimizer,
            MemoryKind::Saved => &mut self.saved,
            MemoryKind::Temporary => &mut self.temporary,
        }
    }
}

/// The bytes that tensors on a device take: [`Device::memory_report`](crate::Device::memory_report).
///
/// It counts the elements of tensors and, on the CPU, of arrays that operations use inside. It does not count what allocators add:
/// rounding to sizes that can be reused, and freed memory that is kept for later tensors.
///
/// ```
/// let report = fp8_kernels::Device::cpu().memory_report();
/// assert!(report.peak.total() >= report.now.total() && report.to_string().contains("parameters"));
/// ```
///
/// Its text is a table:
///
/// ```text
///                      now          peak
/// parameters       1.2 MiB       1.2 MiB
/// gradients        1.2 MiB       1.2 MiB
/// optimizer        2.5 MiB       2.5 MiB
/// saved            0.0 MiB       6.3 MiB
/// temporary        0.1 MiB       0.9 MiB
/// total            5.0 MiB      12.1 MiB
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryReport {
    /// The bytes in use. Default: none.
    pub now: MemoryUse,
    /// The bytes in use when their sum was largest. Default: none.
    pub peak: MemoryUse,
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { now, peak } = self;
        let rows = [
            ("parameters", now.parameters, peak.parameters),
            ("gradients", now.gradients, peak.gradients),
            ("optimizer", now.optimizer, peak.optimizer),
            ("saved", now.saved, peak.saved),
            ("temporary", now.temporary, peak.temporary),
            ("total", now.total(), peak.total()),
        ];
        let mib = |bytes: usize| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        write!(f, "{:<10}  {:>12}  {:>12}", "", "now", "peak")?;
        for (name, now, peak) in rows {
            write!(f, "\n{name:<10}  {:>12}  {:>12}", mib(now), mib(peak))?;
        }
        Ok(())
    }
}

/// The counts of one device.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<MemoryReport>);

impl Ledger {
    const fn new() -> Self {
        const NONE: MemoryUse =
            MemoryUse { parameters: 0, gradients: 0, optimizer: 0, saved: 0, temporary: 0 };
        Self(Mutex::new(MemoryReport { now: NONE, peak: NONE }))
    }

    pub(crate) fn report(&self) -> MemoryReport {
        *self.0.lock()
    }

    fn add(&self, kind: MemoryKind, bytes: usize) {
        let report = &mut *self.0.lock();
        *report.now.of(kind) += bytes;
        if report.now.total() > report.peak.total() {
            report.peak = report.now;
        }
    }

    pub(crate) fn reset_peak(&self) {
        let mut report = self.0.lock();
        report.peak = report.now;
    }
}

/// Returns the ledger of the CPU, which all CPU devices share.
pub(crate) fn cpu() -> &'static Ledger {
    static CPU: Ledger = Ledger::new();
    &CPU
}

/// An entry of a ledger: some bytes of one kind, counted as long as it exists.
#[derive(Debug)]
pub(crate) struct Counted {
    /// `None` on the CPU.
    gpu: Option<Arc<Ledger>>,
    bytes: usize,
    kind: AtomicU8,
}

impl Counted {
    /// Counts `bytes` of the kind that the thread is in.
    pub(crate) fn new(gpu: Option<Arc<Ledger>>, bytes: usize) -> Self {
        let kind = CURRENT.get();
        let counted = Self { gpu, bytes, kind: AtomicU8::new(kind as u8) };
        counted.ledger().add(kind, bytes);
        counted
    }

    fn ledger(&self) -> &Ledger {
        self.gpu.as_deref().unwrap_or_else(|| cpu())
    }

    pub(crate) fn set_kind(&self, kind: MemoryKind) {
        let now = &mut self.ledger().0.lock().now;
        *now.of(MemoryKind::of(self.kind.swap(kind as u8, Relaxed))) -= self.bytes;
        *now.of(kind) += self.bytes;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let kind = MemoryKind::of(*self.kind.get_mut());
        *self.ledger().0.lock().now.of(kind) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_counted_by_kind_and_at_the_peak() {
        let ledger = Arc::new(Ledger::new());
        let count = |bytes| Counted::new(Some(ledger.clone()), bytes);
        let first = count(10);
        {
            let _saved = MemoryKind::Saved.enter();
            let inner = count(100);
            {
                let _temporary = MemoryKind::Temporary.enter();
                drop(count(1000));
            }
            drop((inner, count(5)));
        }
        first.set_kind(MemoryKind::Parameters);
        let report = ledger.report();
        assert_eq!(report.now, MemoryUse { parameters: 10, ..Default::default() });
        assert_eq!(report.peak, MemoryUse { saved: 100, temporary: 1010, ..Default::default() });
        drop(first);
        ledger.reset_peak();
        assert_eq!(ledger.report(), MemoryReport::default());
    }
}
