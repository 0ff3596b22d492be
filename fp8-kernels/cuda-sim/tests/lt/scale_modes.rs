//! Factors for rows and blocks: which modes, pairs, GPUs and versions there are, and that each factor reaches its block.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use crate::lt::{BF16, Case, E4M3, F32, INVALID, Lab, NOT_SUPPORTED};
use crate::rig;

pub(crate) const SCALAR: i32 = 0;
pub(crate) const VEC16: i32 = 1;
pub(crate) const VEC32: i32 = 2;
const OUTER: i32 = 3;
const VEC128: i32 = 4;
const TILE128: i32 = 5;

/// The codes of a product with these modes: of its heuristics, and of the call.
pub(crate) fn code(lab: &Lab<'_>, case: &Case, modes: [i32; 2]) -> i32 {
    let buffer = lab.stream.alloc_zeros::<u8>(1 << 16).unwrap();
    let at = lab.address(&buffer);
    let operation = lab.operation(case);
    for (attribute, mode) in [31, 32].into_iter().zip(modes) {
        let status = lab.set(operation, attribute, &mode.to_le_bytes());
        if status != 0 {
            lab.destroy_operation(operation);
            return status;
        }
        assert_eq!(lab.set(operation, attribute - 14, &at.to_le_bytes()), 0);
    }
    let code = lab.multiply(operation, case.layouts(), [at, at, at, at + (1 << 15)], case.beta, None, (0, 0));
    let asked = lab.heuristics_of(operation, case).err().unwrap_or(0);
    assert_eq!(asked, code, "{modes:?} {case:?}");
    lab.destroy_operation(operation);
    code
}

#[test]
fn modes_belong_to_gpus_and_to_versions() {
    let pairs = [[OUTER; 2], [VEC128; 2], [VEC128, TILE128], [TILE128, VEC128], [TILE128; 2], [VEC32; 2]];
    let (no, old) = (NOT_SUPPORTED, INVALID);
    for (arch, version, expected) in [
        ("90", "130100", [0, 0, 0, 0, no, no]),
        ("90", "120900", [0, 0, 0, 0, no, no]),
        ("90", "120805", [no; 6]),
        ("90", "120600", [old; 6]),
        ("89", "130100", [no; 6]),
        ("100", "130100", [no, no, no, no, no, 0]),
        ("120", "120800", [no, no, no, no, no, 0]),
    ] {
        let (control, turn) = rig::turn();
        control.set("arch", arch).unwrap();
        control.set("cublas", version).unwrap();
        let rig = rig::rig_on(control, turn);
        let lab = Lab::new(&rig);
        let case = Case { sizes: [32, 16, 128], ..Case::default() };
        assert_eq!(pairs.map(|modes| code(&lab, &case, modes)), expected, "sm_{arch} {version}");
        drop(lab);
        rig.finish();
    }
}

#[test]
fn what_modes_do_not_go_with_is_refused() {
    let rig = rig::rig();
    let lab = Lab::new(&rig);
    let case = Case { sizes: [32, 16, 128], ..Case::default() };
    for modes in [[VEC128, SCALAR], [SCALAR, TILE128], [OUTER, SCALAR], [OUTER, VEC128]] {
        assert_eq!(code(&lab, &case, modes), NOT_SUPPORTED, "{modes:?}");
    }
    let cases = [
        ("no FP8", Case { types: [BF16, BF16, F32, F32], ..case }),
        ("an FP8 output", Case { types: [E4M3, E4M3, BF16, E4M3], ..case }),
        ("fast accumulation", Case { fast: true, ..case }),
        ("blocks across memory", Case { transposed: [false, false], ..case }),
    ];
    for (what, case) in cases {
        assert_eq!(code(&lab, &case, [VEC128; 2]), NOT_SUPPORTED, "{what}");
    }
    assert_eq!(code(&lab, &Case { fast: true, ..case }, [OUTER; 2]), 0, "one block has fast sums");
    // Vectors of factors are 16 bytes aligned and lie in one allocation.
    let buffer = lab.stream.alloc_zeros::<u8>(1 << 15).unwrap();
    let at = lab.address(&buffer);
    let factors = lab.stream.alloc_zeros::<u8>(256).unwrap();
    let place = lab.address(&factors);
    for (offset, expected) in [(0, 0), (8, INVALID), (144, INVALID)] {
        let operation = lab.operation(&case);
        for (attribute, value) in [(31, OUTER), (32, OUTER)] {
            assert_eq!(lab.set(operation, attribute, &value.to_le_bytes()), 0);
        }
        assert_eq!(lab.set(operation, 17, &(place + offset).to_le_bytes()), 0);
        assert_eq!(lab.set(operation, 18, &place.to_le_bytes()), 0);
        let places = [at, at, at, at + (1 << 14)];
        assert_eq!(lab.multiply(operation, case.layouts(), places, 0.0, None, (0, 0)), expected, "+{offset}");
        lab.destroy_operation(operation);
    }
    drop((buffer, factors, lab));
    rig.finish();
}
