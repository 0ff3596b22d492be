//! The arguments and the kind of an open scope.

use crate::scopes::forward_outcome::ForwardOutcome;
use crate::{Error, Result};
use fp8_kernels::DType;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The arguments of one scope or nested scope.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScopeSettings {
    /// The recipe and group.
    pub(crate) plan: usize,
    pub(crate) enabled: bool,
    pub(crate) calibrating: bool,
    pub(crate) compute_dtype: Option<DType>,
    /// Whether each rank may have scales of its own.
    pub(crate) allows_scales_per_rank: bool,
}

impl ScopeSettings {
    /// Returns whether amaxes are recorded.
    pub(crate) const fn records(&self) -> bool {
        self.enabled || self.calibrating
    }
}

/// The mode of a forward scope: whether it records amaxes, and which scales it uses.
#[derive(Debug, Clone)]
pub(crate) enum Mode {
    /// Records amaxes and uses the present scales.
    Record,
    /// Records nothing.
    Evaluate,
    /// Records nothing and uses the scales of a snapshot.
    Replay {
        outcome: Arc<ForwardOutcome>,
        /// The number of the next dropout mask.
        draws: Arc<AtomicU64>,
    },
}

/// Refuses a dtype of operations in high precision that is not a float.
pub(crate) fn check_compute_dtype(dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    let (value, remedy) = (dtype.to_string(), "expected f32, bf16 or f16");
    Err(Error::Recipe { recipe: "autocast", option: "compute_dtype", value, remedy })
}
