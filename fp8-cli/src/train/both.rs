//! Numbers that both trainings have.

use serde::Serialize;

use crate::train::trainer::Run;
use crate::train::training::Outcome;

/// One number of each training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Both {
    pub(crate) high_precision: Option<f64>,
    pub(crate) fp8: Option<f64>,
}

impl Both {
    pub(crate) fn new(outcomes: &[Outcome], value: impl Fn(&Outcome) -> Option<f64>) -> Self {
        let of = |run| outcomes.iter().find(|outcome| outcome.run == run).and_then(&value);
        Self { high_precision: of(Run::HighPrecision), fp8: of(Run::Fp8) }
    }
}
