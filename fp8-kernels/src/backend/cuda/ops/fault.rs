//! The errors of what kernels report: an id out of range, ranks that differ.

use super::Faults;
use crate::Error;

/// Makes an error of a report. The states are numbers that the kernels write; `prelude.cuh` and `compare_calls.cu` use them.
pub(in crate::backend::cuda) fn error([state, value, position, limit]: [i64; 4], faults: &Faults) -> Error {
    let count = |number: i64| usize::try_from(number).unwrap_or_default();
    let (op, what) = match state {
        1 => ("embedding", "id"),
        2 => ("embedding_backward", "id"),
        3 => ("cross_entropy", "target"),
        5 => ("attention", "key length"),
        6 => ("attention_backward", "key length"),
        9 => ("attention", "query length"),
        10 => ("attention_backward", "query length"),
        11 => ("rope", "position"),
        12 => ("rope_backward", "position"),
        13 => ("kv_cache_append", "cache position"),
        14 => ("kv_cache_append", "length"),
        7 => {
            // The rank's bits, and above them those of rank 0.
            let [value, other_value] = [value, value >> 32].map(|bits| f32::from_bits(bits as u32));
            return Error::RankScales { what: faults.name(limit), rank: count(position), value, other_value };
        }
        8 => return Error::RankCalls { what: faults.name(limit), rank: count(position) },
        _ => ("cross_entropy_backward", "target"),
    };
    Error::Index { op, what, value, position: count(position), limit: count(limit) }
}
