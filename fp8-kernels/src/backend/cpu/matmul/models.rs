//! The models of vectors that this CPU may not have, as tests run them.

use super::lanes::{Job, Lanes};
use crate::Result;

/// A function of its own for each model: the compiler's time grows faster than the length of a function.
#[inline(never)]
pub(super) fn run<L: Lanes>(job: impl Job, lanes: L) -> Result<()> {
    job.run(lanes)
}
