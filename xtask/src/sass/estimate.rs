//! An estimate of a kernel's time on an H100 from its counts.
//!
//! The time is the largest of three: the bytes of device memory at 0.88 of what a copy reaches, the instructions at 0.75 of the
//! issue slots, and the cycles of shared memory or tensor cores. Both rates are calibrated on the results of 2026-11-22; a test
//! compares them. Latency is not modelled: a kernel with few warps and no loads under way takes longer than estimated.

use super::table::Row;

/// Multiprocessors, lanes that each issues a clock, and clocks a microsecond.
const MULTIPROCESSORS: f64 = 132.0;
const LANES: f64 = 128.0;
const CLOCK: f64 = 1980.0;
/// The share of the copy's bandwidth and of the issue slots that kernels reach.
const SHARE_OF_COPY: f64 = 0.88;
const SHARE_OF_ISSUE: f64 = 0.75;
/// Bytes of shared memory a clock and multiprocessor.
const SHARED: f64 = 128.0;
/// Operations of `mma.sync` on 16-bit floats a clock and multiprocessor, as 620 TFLOP/s are reached; and those of one HMMA.
const OPERATIONS: f64 = 2560.0;
const OPERATIONS_OF_HMMA: f64 = 16.0 * 8.0 * 16.0 * 2.0;

/// The time in µs that each resource takes, by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) memory: f64,
    pub(super) issue: f64,
    pub(super) shared: f64,
    pub(super) tensor: f64,
}

impl Estimate {
    /// `elements` of a row's case, where a copy moves so many bytes a µs.
    pub(super) fn new(row: &Row, elements: f64, copy: f64) -> Self {
        let threads = elements * f64::from(row.lanes);
        let counts = &row.counts;
        let clocks = |work: f64| work / MULTIPROCESSORS / CLOCK;
        Self {
            memory: elements * row.bytes / (SHARE_OF_COPY * copy),
            issue: clocks(threads * (counts.instructions + counts.once) / LANES) / SHARE_OF_ISSUE,
            shared: clocks(threads * counts.shared / SHARED),
            // A warp issues one product for its 32 lanes.
            tensor: clocks(threads / 32.0 * counts.hmma * OPERATIONS_OF_HMMA / OPERATIONS),
        }
    }

    pub(super) fn time(&self) -> f64 {
        self.memory.max(self.issue).max(self.shared).max(self.tensor)
    }

    /// The name of the resource that takes longest.
    pub(super) fn bound(&self) -> &'static str {
        let time = self.time();
        match () {
            () if time <= self.memory => "memory",
            () if time <= self.issue => "issue",
            () if time <= self.shared => "shared",
            () => "tensor",
        }
    }
}
