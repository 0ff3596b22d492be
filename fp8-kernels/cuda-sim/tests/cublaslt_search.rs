//! cuBLASLt's search for kernels: what it demands of a descriptor, and what a kernel that it found may be used for.
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

mod lt;
mod rig;

use lt::{BF16, Case, E4M3, F32, Found, INVALID, Lab, NOT_SUPPORTED};
use rig::rig;

/// An output in FP8, and operands in bf16.
const FP8_OUTPUT: [i32; 4] = [E4M3, E4M3, BF16, E4M3];
const WIDE: [[i32; 4]; 2] = [[BF16; 4], [BF16, BF16, F32, F32]];

#[test]
fn heuristics_keep_to_the_workspace() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case::default();
    let found = |room, most| -> Vec<usize> {
        lab.heuristics(&case, room, most).unwrap().iter().map(|found| found.workspace).collect()
    };
    assert_eq!(found(0, 8), [0]);
    assert_eq!(found((64 << 10) - 1, 8), [0]);
    assert_eq!(found(64 << 10, 8), [0, 64 << 10]);
    assert_eq!(found(32 << 20, 8), [0, 64 << 10, 1 << 20]);
    assert_eq!((found(32 << 20, 2).len(), found(32 << 20, 1).len()), (2, 1));
    assert_eq!(lab.heuristics(&case, 0, 0).err(), Some(INVALID));
    drop(lab);
    rig.finish();
}

#[test]
fn a_kernel_needs_its_workspace_and_its_product() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case::default();
    let buffer = lab.stream.alloc_zeros::<u8>(4096).unwrap();
    let room = lab.stream.alloc_zeros::<u8>(64 << 10).unwrap();
    let (at, workspace) = (lab.address(&buffer), lab.address(&room));
    let found = lab.heuristics(&case, 1 << 20, 3).unwrap();
    let run = |case: &Case, found: &Found, workspace| {
        let operation = lab.addressed(&case.scaled());
        let code = lab.multiply(operation, case.layouts(), [at; 4], 0.0, Some(&found.algo), workspace);
        lab.destroy_operation(operation);
        code
    };
    let enough = (workspace, 64 << 10);
    assert_eq!((run(&case, &found[0], (0, 0)), run(&case, &found[1], enough)), (0, 0));
    assert_eq!(run(&case, &found[1], (workspace, (64 << 10) - 1)), INVALID, "too small");
    assert_eq!(run(&case, &found[1], (workspace + 8, 64 << 10)), INVALID, "beyond its allocation");
    assert_eq!(run(&case, &found[1], (0, 64 << 10)), INVALID, "null");
    assert_eq!(run(&case, &found[2], enough), INVALID, "of another kernel");
    let other = Case { sizes: [32, 32, 32], ..case };
    let fast = Case { fast: true, ..case };
    for (what, other) in [("other sizes", &other), ("fewer bits in sums", &fast)] {
        assert_eq!(run(other, &found[0], (0, 0)), NOT_SUPPORTED, "{what}");
        assert_eq!(lab.check(other, &found[0].algo).err(), Some(NOT_SUPPORTED), "{what}");
    }
    for found in &found {
        assert_eq!(lab.check(&case, &found.algo).map(|checked| checked.workspace), Ok(found.workspace));
    }
    let mut invented = found[0];
    invented.algo[0] ^= 7;
    assert_eq!(run(&case, &invented, (0, 0)), INVALID);
    lab.stream.synchronize().unwrap();
    // What a kernel was lent is not as before.
    assert_ne!(lab.stream.clone_dtoh(&room).unwrap()[0], 0);
    drop((buffer, room, lab));
    rig.finish();
}

#[test]
fn kernels_are_searched_for_and_checked_with_every_address_set() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let (a, b, d, bias) = (17, 18, 20, 8);
    for (case, needed) in [
        (Case::default(), vec![a, b]),
        (Case { bias: Some(BF16), ..Case::default() }, vec![a, b, bias]),
        (Case { types: FP8_OUTPUT, ..Case::default() }, vec![a, b, d]),
        (Case { types: FP8_OUTPUT, bias: Some(BF16), amax: true, ..Case::default() }, vec![a, b, d, bias]),
        (Case { types: WIDE[0], bias: Some(BF16), ..Case::default() }, vec![bias]),
        (Case { types: WIDE[1], ..Case::default() }, vec![]),
    ] {
        let algo = lab.heuristics(&case, 0, 1).unwrap()[0].algo;
        assert_eq!(lab.check(&case, &algo).err(), None);
        for missing in &needed {
            let operation = lab.addressed(&case.scaled());
            assert_eq!(lab.set(operation, *missing, &0u64.to_le_bytes()), 0);
            let what = format!("{case:?} without attribute {missing}");
            assert_eq!(lab.heuristics_of(operation, &case).err(), Some(INVALID), "{what}");
            assert_eq!(lab.check_of(operation, &case, &algo).err(), Some(INVALID), "{what}");
            lab.destroy_operation(operation);
        }
    }
    drop(lab);
    rig.finish();
}

#[test]
fn a_kernel_found_without_an_amax_computes_none() {
    let rig = rig();
    let lab = Lab::new(&rig);
    let case = Case { types: FP8_OUTPUT, ..Case::default() };
    let with_amax = Case { amax: true, ..case };
    let [without, with] = [&case, &with_amax].map(|case| lab.heuristics(case, 0, 1).unwrap()[0].algo);
    assert_eq!(lab.check(&with_amax, &without).err(), Some(NOT_SUPPORTED));
    assert_eq!(lab.check(&case, &with).err(), Some(NOT_SUPPORTED));
    let buffer = lab.stream.alloc_zeros::<u8>(4096).unwrap();
    let at = lab.address(&buffer);
    for (case, algo, expected) in
        [(&case, &without, 0), (&with_amax, &with, 0), (&with_amax, &without, NOT_SUPPORTED)]
    {
        let operation = lab.addressed(&case.scaled());
        let code = lab.multiply(operation, case.layouts(), [at, at, 0, at], 0.0, Some(algo), (0, 0));
        assert_eq!(code, expected, "{case:?}");
        lab.destroy_operation(operation);
    }
    drop((buffer, lab));
    rig.finish();
}
