//! The attributes of each kind of descriptor, and the values that a caller gives for them.

use super::objects::Values;
use crate::code::{Code, Outcome};
use crate::ffi::{Array, Host};

/// `cudnnBackendAttributeType_t`.
pub(super) const HANDLE: i32 = 0;
const DATA_TYPE: i32 = 1;
const BOOLEAN: i32 = 2;
pub(super) const INT64: i32 = 3;
const DOUBLE: i32 = 5;
const POINTER: i32 = 6;
const HEURISTICS_MODE: i32 = 8;
const KNOB_TYPE: i32 = 9;
const POINTWISE_MODE: i32 = 14;
pub(super) const DESCRIPTOR: i32 = 15;
const REDUCTION_OPERATOR: i32 = 18;

/// The type of an attribute and the largest number of its values; `None` where a kind of descriptor has no such attribute.
pub(super) fn expected(kind: i32, attribute: i32) -> Option<(i32, i64)> {
    const MANY: i64 = 256;
    Some(match (kind, attribute) {
        // POINTWISE: MODE, MATH_PREC, AXIS.
        (0, 0) => (POINTWISE_MODE, 1),
        (0, 1) => (DATA_TYPE, 1),
        (0, 9) => (INT64, 1),
        // ENGINE: OPERATION_GRAPH, GLOBAL_INDEX.
        (2, 1300) => (DESCRIPTOR, 1),
        (2, 1301) => (INT64, 1),
        // ENGINECFG: ENGINE, KNOB_CHOICES.
        (3, 300) => (DESCRIPTOR, 1),
        (3, 302) => (DESCRIPTOR, MANY),
        // ENGINEHEUR: MODE, OPERATION_GRAPH.
        (4, 200) => (HEURISTICS_MODE, 1),
        (4, 201) => (DESCRIPTOR, 1),
        // EXECUTION_PLAN: HANDLE, ENGINE_CONFIG.
        (5, 400) => (HANDLE, 1),
        (5, 401) => (DESCRIPTOR, 1),
        // KNOB_CHOICE: KNOB_TYPE, KNOB_VALUE.
        (7, 600) => (KNOB_TYPE, 1),
        (7, 601) => (INT64, 1),
        // OPERATION_POINTWISE: PW_DESCRIPTOR, XDESC, BDESC, YDESC, TDESC.
        (13, 750..=753 | 758) => (DESCRIPTOR, 1),
        // OPERATIONGRAPH: HANDLE, OPS.
        (15, 800) => (HANDLE, 1),
        (15, 801) => (DESCRIPTOR, MANY),
        // VARIANT_PACK: UNIQUE_IDS, DATA_POINTERS, WORKSPACE.
        (16, 1000) => (INT64, MANY),
        (16, 1001) => (POINTER, MANY),
        (16, 1003) => (POINTER, 1),
        // TENSOR: BYTE_ALIGNMENT, DATA_TYPE, DIMENSIONS, STRIDES, UNIQUE_ID, IS_VIRTUAL, IS_BY_VALUE, RAGGED_OFFSET_DESC.
        (17, 900 | 906) => (INT64, 1),
        (17, 901) => (DATA_TYPE, 1),
        (17, 902 | 903) => (INT64, 8),
        (17, 907 | 908) => (BOOLEAN, 1),
        (17, 913) => (DESCRIPTOR, 1),
        // MATMUL: COMP_TYPE, PADDING_VALUE.
        (18, 1500) => (DATA_TYPE, 1),
        (18, 1503) => (DOUBLE, 1),
        // OPERATION_MATMUL: ADESC, BDESC, CDESC, DESC, GEMM_M, _N and _K_OVERRIDE_DESC.
        (19, 1520..=1523 | 1525..=1527) => (DESCRIPTOR, 1),
        // REDUCTION: OPERATOR, COMP_TYPE.
        (21, 1600) => (REDUCTION_OPERATOR, 1),
        (21, 1601) => (DATA_TYPE, 1),
        // OPERATION_REDUCTION: XDESC, YDESC, DESC.
        (22, 1610..=1612) => (DESCRIPTOR, 1),
        // OPERATION_RESHAPE: XDESC, YDESC.
        (31, 2200 | 2201) => (DESCRIPTOR, 1),
        _ => return None,
    })
}

/// Whether there is such a kind of descriptor.
pub(super) const fn is_kind(kind: i32) -> bool {
    matches!(kind, 0 | 2..=5 | 7 | 13 | 15..=19 | 21 | 22 | 31)
}

/// Copies an attribute's values.
pub(super) fn read(kind: i32, count: usize, from: Host) -> Outcome<Values> {
    let null = |_| Code::DNN_NULL_POINTER;
    Ok(match kind {
        INT64 => Values::Ints(Array::at(from).take(count).map_err(null)?),
        DOUBLE => Values::Doubles(Array::at(from).take(count).map_err(null)?),
        BOOLEAN => {
            let bytes: Vec<u8> = Array::at(from).take(count).map_err(null)?;
            Values::Flags(bytes.into_iter().map(|byte| byte != 0).collect())
        }
        HANDLE | POINTER | DESCRIPTOR => Values::Words(Array::at(from).take(count).map_err(null)?),
        _ => Values::Numbers(Array::at(from).take(count).map_err(null)?),
    })
}
