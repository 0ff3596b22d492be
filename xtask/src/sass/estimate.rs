//! An estimate of a kernel's time on an H100 from its counts.
//!
//! The time is the largest of three: the bytes of device memory at 0.88 of what a copy reaches, the instructions at 0.75 of the
//! issue slots, and the cycles of shared memory or tensor cores. Both rates are calibrated on the results of 2026-11-22; a test
//! compares them.
//!
//! Beside it stands what the loads wait for: the bytes that are read, as many at once as are in flight. A kernel with few warps and
//! one load at a time takes that long, however few instructions it has: so did those of 2026-11-22 that transpose or normalize.

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
/// The µs from the issue of a load to that of the next that waits for it, as the kernels of 2026-11-22 took them.
const ROUND: f64 = 1.55;
const OPERATIONS_OF_HMMA: f64 = 16.0 * 8.0 * 16.0 * 2.0;

/// The time in µs that each resource takes, by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) memory: f64,
    pub(super) issue: f64,
    pub(super) shared: f64,
    pub(super) tensor: f64,
    /// The time that the loads wait, which is not part of the estimate.
    pub(super) latency: f64,
}

impl Estimate {
    /// `elements` of a row's case, where a copy moves so many bytes a µs.
    pub(super) fn new(row: &Row, elements: f64, copy: f64) -> Self {
        let threads = elements * f64::from(row.lanes);
        let counts = &row.counts;
        let rounds = elements * row.read / MULTIPROCESSORS / (row.in_flight.max(1) as f64 * 1024.0);
        let clocks = |work: f64| work / MULTIPROCESSORS / CLOCK;
        Self {
            memory: elements * row.bytes / (SHARE_OF_COPY * copy),
            issue: clocks(threads * (counts.instructions + counts.once) / LANES) / SHARE_OF_ISSUE,
            shared: clocks(threads * counts.shared / SHARED),
            // A warp issues one product for its 32 lanes.
            tensor: clocks(threads / 32.0 * counts.hmma * OPERATIONS_OF_HMMA / OPERATIONS),
            latency: if row.lanes == 1 { rounds * ROUND } else { 0.0 },
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sass::results::{OURS, Results};
    use crate::sass::table;

    /// The kernels that were measured, as they were then.
    const THEN: &str = include_str!("calibration.txt");
    /// The rates are calibrated on these works.
    const WORKS: [(&str, &str); 5] = [
        ("cast", "bf16"),
        ("dequantize", "bf16"),
        ("transpose", "u8"),
        ("gelu+cast", "bf16"),
        ("gelu+cast+T", "bf16"),
    ];

    #[test]
    fn estimates_are_within_a_tenth_of_what_was_measured() {
        let (table, results) = (table::read(THEN).unwrap(), Results::committed().unwrap());
        let copy = results.copy().unwrap();
        for (work, dtype) in WORKS {
            for size in ["8192x8192", "16384x4096"] {
                let estimate = Estimate::new(table.row(work, dtype).unwrap(), 8192.0 * 8192.0, copy);
                let measured = results.time("memory", &format!("{work} {size}"), OURS).unwrap();
                let error = estimate.time() / measured - 1.0;
                assert!(error.abs() <= 0.1, "{work} {size}: {estimate:?}, measured {measured}: {error:+.3}");
            }
        }
    }

    /// Works whose threads had one load at a time under way.
    const WAITING: [&str; 8] = [
        "cast+T",
        "swiglu+cast",
        "swiglu+cast+T",
        "dgelu+cast+T+dbias",
        "dswiglu+cast+T+dbias",
        "layernorm+cast",
        "rmsnorm+cast",
        "gelu+cast+T",
    ];

    #[test]
    fn with_latency_the_other_kernels_are_explained_as_well() {
        let (table, results) = (table::read(THEN).unwrap(), Results::committed().unwrap());
        let copy = results.copy().unwrap();
        for work in WAITING {
            let estimate = Estimate::new(table.row(work, "bf16").unwrap(), 16384.0 * 4096.0, copy);
            let measured = results.time("memory", &format!("{work} 16384x4096"), OURS).unwrap();
            let error = estimate.time().max(estimate.latency) / measured - 1.0;
            assert!(error.abs() <= 0.15, "{work}: {estimate:?}, measured {measured}: {error:+.3}");
        }
    }

    #[test]
    fn the_slowest_resource_decides() {
        let table = table::read(THEN).unwrap();
        let row = |change: fn(&mut Row)| {
            let mut row = table.row("cast", "bf16").unwrap().clone();
            change(&mut row);
            Estimate::new(&row, 1e6, 2_979_000.0)
        };
        assert_eq!(row(|_| {}).bound(), "memory");
        assert_eq!(row(|row| row.counts.instructions = 60.0).bound(), "issue");
        // 128 threads read 1 KiB each: 1024 clocks an element of a tile.
        let shared = row(|row| (row.lanes, row.counts.shared) = (128, 1024.0));
        assert_eq!(shared.bound(), "shared");
        assert!((shared.time() - 1e6 * 1024.0 / 132.0 / 1980.0).abs() < 1e-6, "{shared:?}");
        let tensor = row(|row| (row.lanes, row.counts.hmma) = (128, 192.0));
        // Four warps issue 192 products of 4096 operations, of which 2560 end in a clock.
        assert_eq!(tensor.bound(), "tensor");
        assert!((tensor.time() - 1e6 * 4.0 * 192.0 * 1.6 / 132.0 / 1980.0).abs() < 1e-6, "{tensor:?}");
    }
}
