//! Probes how a CPU rounds its product of bf16 pairs.

use super::lanes::{Lanes, Portable};

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
