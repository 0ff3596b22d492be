//! What a forward scope leaves to its backward, and by which a `Saved` finds it.

use crate::frame::Frame;
use crate::outcome::Outcome;
use std::sync::Arc;

/// Where a `Saved` comes from: how its backward finds recipe, group and arena.
///
/// [`Backward::slot`](crate::Backward::slot) takes the origins of committed forward scopes of the same [`Scaling`](crate::Scaling). It
/// refuses those of an evaluation, and those of a scope that was discarded or whose guard was dropped: what such a scope
/// recorded has been thrown away.
#[derive(Debug, Clone)]
pub struct Origin {
    pub(crate) owner: Arc<()>,
    pub(crate) frame: Frame,
    /// None for an evaluation.
    pub(crate) outcome: Option<Arc<Outcome>>,
    pub(crate) layer: Arc<str>,
}

impl Origin {
    /// Returns the domains that its forward scope touched, or why its backward cannot run under the `Scaling` with this
    /// identity.
    pub(crate) fn touched(&self, identity: &Arc<()>) -> Result<&[usize], &'static str> {
        if !Arc::ptr_eq(&self.owner, identity) {
            return Err("another Scaling");
        }
        self.outcome.as_ref().ok_or("an evaluation scope")?.touched()
    }
}

/// A scope's scales: one float per slot, one copy for all layers that recompute, filled at the commit.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) owner: Arc<()>,
    pub(crate) frame: Frame,
    pub(crate) outcome: Arc<Outcome>,
}
