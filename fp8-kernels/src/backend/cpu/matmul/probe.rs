//! Probes whether a CPU's product of bf16 pairs is worth using.

use super::lanes::{Job, Lanes};
use super::vectors::Vectors;
use crate::Result;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Returns whether lanes of pairs multiply faster than lanes of f32 values: each of them is timed for some microseconds.
///
/// Zen 4 executes as many `vdpbf16ps` as 512-bit multiply-adds, so pairs are twice as fast. An Intel Xeon with AMX executes a
/// quarter as many, so pairs take twice as long.
pub(super) fn is_faster(pairs: Vectors, singles: Vectors) -> bool {
    // The first turns wake the vector units; the best of several is not disturbed by other processes.
    let best = |vectors: Vectors| (0..8).map(|_| time(vectors)).min();
    // One instruction has the products of two of the other's.
    best(pairs) < best(singles).map(|singles| singles * 2)
}

fn time(vectors: Vectors) -> Duration {
    struct Products<'a>(&'a mut Duration);
    impl Job for Products<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Result<()> {
            // Independent sums, as many as the largest tile of the micro-kernel has in half of its columns.
            let mut sums = [lanes.zero(); 12];
            let [a, b] = [black_box(0x3F80_3F80), black_box(0x4000_4000)].map(|word| lanes.splat(word));
            let start = Instant::now();
            for _ in 0..512 {
                for sum in &mut sums {
                    *sum = lanes.multiply_add(*sum, a, b);
                }
            }
            black_box(&sums);
            *self.0 = start.elapsed();
            Ok(())
        }
    }
    let mut elapsed = Duration::MAX;
    // It cannot fail; one that did would not be the fastest.
    let _ = vectors.run(Products(&mut elapsed));
    elapsed
}
