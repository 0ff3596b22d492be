//! What a commit needs of many ranks.

use crate::{Result, StateDigest};
use fp8_kernels::Arena;
use std::fmt::Debug;
use std::sync::Arc;

/// The ranks that share a model's scales.
///
/// Each call carries a key that names the arena: direction, recipe and group. Ranks that come with different keys get an
/// error; none waits for ever.
pub trait AmaxGroup: Debug + Send + Sync {
    /// The group's part in the job ("dp"), the same on all ranks and after a restart.
    fn id(&self) -> &str;

    /// How many ranks.
    fn world_size(&self) -> usize;

    /// Compares slot names before the first reduction of an arena.
    ///
    /// # Errors
    /// Names that differ, on every rank, with the first difference; a rank that is away, failed or elsewhere.
    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> Result<()>;

    /// Compares training state that all ranks should have in common; `what` says which. Scopes call it before they reduce
    /// an arena for the first time, and again after [`Scaling::load_state`](crate::Scaling::load_state).
    ///
    /// The default compares names with their digests by [`agree_on_names`](Self::agree_on_names). The groups of fp8-dist
    /// have a collective for it, whose error names the piece that differs and after which the group remains usable.
    ///
    /// # Errors
    /// State that differs, on every rank, with the first difference in the order of `state`; a rank that is away, failed
    /// or elsewhere.
    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> Result<()> {
        let text = |piece: &StateDigest| {
            format!("{} (digest {:032x})", piece.name, u128::from_be_bytes(piece.digest)).into()
        };
        self.agree_on_names(what, &state.iter().map(text).collect::<Vec<_>>())
    }

    /// Replaces row 0 of `arena` by its maximum over the ranks.
    ///
    /// # Errors
    /// A rank that is away, failed or elsewhere.
    fn all_reduce_max(&self, key: &str, arena: &Arena) -> Result<()>;

    /// This rank gave up: the others' pending and later calls fail with the reason.
    fn poison(&self, reason: &str);
}
