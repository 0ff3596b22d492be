//! Probes how a CPU rounds its product of bf16 pairs, and whether the product is worth using.

use super::lanes::{Lanes, Portable};
use super::path::{Job, Vectors};
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

/// Whether `lanes` adds a pair of products as two fused multiply-adds, the high halves first.
///
/// Intel's and AMD's descriptions of `vdpbf16ps` say so, but a CPU or an emulator may keep more bits between the two additions,
/// or add the products first. The probe compares sums in which each of these differs, besides a few thousand drawn ones.
pub(super) fn rounds_twice<L: Lanes>(lanes: L) -> bool {
    let model = Portable::<16, true>;
    assert!(L::WIDTH == 16 && L::PAIRS);
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    // A bf16 value that a code of either format can have, between 2⁻¹⁶ and 2¹⁵.
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (state >> 33) as u32;
        (bits & 0x8000) | (111 + bits % 32) << 7 | (bits >> 20 & 7) << 4
    };
    let mut sums = [0.0; 16];
    (0..256).all(|_| {
        let [a, b] = [(); 2].map(|()| [(); 16].map(|()| draw() << 16 | draw()));
        let (mut got, mut want) = ([0.0; 16], [0.0; 16]);
        multiply_add(lanes, &sums, &a, &b, &mut got);
        multiply_add(model, &sums, &a, &b, &mut want);
        sums = want;
        got.map(f32::to_bits) == want.map(f32::to_bits)
    })
}

fn multiply_add<L: Lanes>(lanes: L, sums: &[f32; 16], a: &[u32; 16], b: &[u32; 16], out: &mut [f32; 16]) {
    // SAFETY: each array has 16 elements, the width of the lanes.
    let sums = unsafe { lanes.sums(sums.as_ptr()) };
    // SAFETY: as above.
    let a = unsafe { lanes.words(a.as_ptr()) };
    // SAFETY: as above.
    let b = unsafe { lanes.words(b.as_ptr()) };
    // SAFETY: as above.
    unsafe { lanes.store(lanes.multiply_add(sums, a, b), out.as_mut_ptr()) };
}
