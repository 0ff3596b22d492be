//! What a forward scope leaves to its backward, and by which a `Saved` finds it.

use crate::Scaling;
use fp8_kernels::{Cell, DType};
use std::sync::{Arc, OnceLock};

/// How a forward scope ended. Shared by all its [`Origin`]s and [`Snapshot`]s; empty while the scope is open.
#[derive(Debug, Default)]
pub(crate) struct Legacy(OnceLock<Ending>);

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

impl Legacy {
    /// The first ending is the one that counts.
    pub(crate) fn end(&self, ending: Ending) {
        self.0.get_or_init(|| ending);
    }

    /// The domains that a committed scope touched, or what the scope was instead.
    pub(crate) fn touched(&self) -> Result<&[usize], &'static str> {
        match self.0.get() {
            Some(Ending::Committed { touched, .. }) => Ok(touched),
            Some(Ending::Discarded) => Err("a forward scope that was discarded"),
            Some(Ending::Left) | None => Err(
                "a forward scope that was left without commit: call `commit` on its guard before backward",
            ),
        }
    }

    /// The scales of a committed scope in which a snapshot was taken.
    pub(crate) fn scales(&self) -> Option<&[Vec<Cell>]> {
        match self.0.get() {
            Some(Ending::Committed { scales, .. }) => scales.as_deref(),
            _ => None,
        }
    }
}

/// The arguments of one scope or nested scope.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) domain: usize,
    pub(crate) enabled: bool,
    pub(crate) calibrating: bool,
    pub(crate) compute_dtype: Option<DType>,
}

impl Frame {
    /// Whether amaxes are taken down.
    pub(crate) const fn records(&self) -> bool {
        self.enabled || self.calibrating
    }
}

/// Where a `Saved` comes from: how its backward finds recipe, group and arena.
///
/// [`Backward::slot`](crate::Backward::slot) takes the origins of committed forward scopes of the same [`Scaling`]. It
/// refuses those of an evaluation, and those of a scope that was discarded or whose guard was dropped: what such a scope
/// recorded has been thrown away.
#[derive(Debug, Clone)]
pub struct Origin {
    pub(crate) owner: Arc<()>,
    pub(crate) frame: Frame,
    /// None for an evaluation.
    pub(crate) legacy: Option<Arc<Legacy>>,
    pub(crate) layer: Arc<str>,
}

impl Origin {
    /// The domains that its forward scope touched, or why its backward cannot run under `scaling`.
    pub(crate) fn touched(&self, scaling: &Scaling) -> Result<&[usize], &'static str> {
        if !Arc::ptr_eq(&self.owner, &scaling.identity) {
            return Err("another Scaling");
        }
        self.legacy.as_ref().ok_or("an evaluation scope")?.touched()
    }
}

/// A scope's scales: one float per slot, one copy for all layers that recompute, filled at the commit.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) owner: Arc<()>,
    pub(crate) frame: Frame,
    pub(crate) legacy: Arc<Legacy>,
}
