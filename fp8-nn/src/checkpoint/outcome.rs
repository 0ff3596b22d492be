//! The outcome of a call that all ranks make: an error on all if one of them fails.

use crate::{Error, Result};
use fp8_dist::{ProcessGroup, StateDigest};

/// Returns this rank's result if the results of all ranks are good, and otherwise an error on each: its own, or that of the first rank
/// that failed. All ranks call it. The group remains usable after an error of a rank.
pub(super) fn outcome<T>(group: &dyn ProcessGroup, call: &'static str, result: Result<T>) -> Result<T> {
    // Ranks without an error have nothing to compare, so the first difference is an error of a rank.
    let failed = result.as_ref().err().map(|error| StateDigest::new(error.to_string(), [""]));
    let agreed = group.agree_on_state(call, failed.as_slice());
    let value = result?;
    match agreed.map_err(Error::from) {
        Ok(()) => Ok(value),
        Err(Error::Dist(fp8_dist::Error::State { name, rank, is_there, other, .. })) => {
            let rank = if is_there { rank } else { other };
            Err(Error::OtherRank { call, rank, problem: name.to_string() })
        }
        Err(error) => Err(error),
    }
}
