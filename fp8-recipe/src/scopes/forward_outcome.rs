//! The outcome of a forward scope, which its backward scope reads.

use fp8_kernels::{Cell, DropoutDraw};
use std::sync::OnceLock;

/// The outcome of a forward scope. All [`Origin`](crate::Origin)s and [`Snapshot`](crate::Snapshot)s of the scope share
/// it. It has no ending while the scope is open.
#[derive(Debug, Default)]
pub(crate) struct ForwardOutcome {
    /// The number of the scope; 0 for an evaluation.
    scope: u64,
    ending: OnceLock<Ending>,
    /// The random numbers of the scope's dropout, once it has drawn any.
    draw: OnceLock<DropoutDraw>,
}

#[derive(Debug)]
pub(crate) enum Ending {
    Committed {
        /// The domains that it touched. Backward touches them all, so that ranks on which some layer had nothing to do
        /// still take part in its reduction.
        touched: Vec<usize>,
        /// Forward scales by domain and slot, if a snapshot was taken.
        scales: Option<Vec<Vec<Cell>>>,
    },
    Discarded,
    /// Its guard was dropped, or its commit failed.
    Left,
}

impl ForwardOutcome {
    pub(crate) fn of_scope(scope: u64) -> Self {
        Self { scope, ..Self::default() }
    }

    pub(crate) fn scope(&self) -> u64 {
        self.scope
    }

    /// Sets the outcome, unless it was set before.
    pub(crate) fn end(&self, ending: Ending) {
        self.ending.get_or_init(|| ending);
    }

    pub(crate) fn draw(&self) -> Option<&DropoutDraw> {
        self.draw.get()
    }

    /// Sets the scope's random numbers, unless they were set before.
    pub(crate) fn set_draw(&self, draw: DropoutDraw) {
        self.draw.get_or_init(|| draw);
    }

    /// The domains that a committed scope touched, or what the scope was instead.
    pub(crate) fn touched(&self) -> Result<&[usize], &'static str> {
        match self.ending.get() {
            Some(Ending::Committed { touched, .. }) => Ok(touched),
            Some(Ending::Discarded) => Err("a forward scope that was discarded"),
            Some(Ending::Left) | None => Err(
                "a forward scope that was left without commit (call `commit` on its guard before backward)",
            ),
        }
    }

    /// The scales of a committed scope in which a snapshot was taken.
    pub(crate) fn scales(&self) -> Option<&[Vec<Cell>]> {
        match self.ending.get() {
            Some(Ending::Committed { scales, .. }) => scales.as_deref(),
            _ => None,
        }
    }
}
