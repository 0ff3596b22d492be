//! What a commit needs of many ranks.

use crate::Result;
use fp8_kernels::Arena;
use std::fmt::Debug;
use std::sync::Arc;

/// The ranks that share a model's scales. Each call carries the arena's key, so that ranks which come with different
/// ones get an error; none waits for ever.
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

    /// Replaces row 0 of `arena` by its maximum over the ranks.
    ///
    /// # Errors
    /// A rank that is away, failed or elsewhere.
    fn all_reduce_max(&self, key: &str, arena: &Arena) -> Result<()>;

    /// This rank gave up: the others' pending and later calls fail with the reason.
    fn poison(&self, reason: &str);
}
