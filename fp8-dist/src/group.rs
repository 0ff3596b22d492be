//! The collectives: what many ranks compute together.

use crate::{Result, gather};
use fp8_kernels::{Operand, Slot, Tensor};
use fp8_recipe::AmaxGroup;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How values of the ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// `((rank 0 + rank 1) + rank 2) + …`: always in this order, so that all ranks get the same bits.
    Sum,
    /// The largest. −0 lies below 0, infinity above all numbers, NaN above infinity.
    Max,
}

impl ReduceOp {
    /// `sum` or `max`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One rank's handle on a group of ranks.
///
/// All ranks make the same calls in the same order; `what` says what a call is for, and must be equal too. Ranks that
/// come with different calls, a rank that leaves, gives up or stays away longer than the group's deadline: an error on
/// every rank, after which the group is of no more use (a rank that is behind gets [`Error::Poisoned`]). Nothing waits
/// for ever.
///
/// Arguments that are wrong on all ranks alike are errors on all ranks, and the group lives on. Results share no storage
/// with arguments or with other ranks.
///
/// An `Arc<dyn ProcessGroup>` upcasts to the `Arc<dyn AmaxGroup>` that a recipe's scopes take.
///
/// [`Error::Poisoned`]: crate::Error::Poisoned
pub trait ProcessGroup: AmaxGroup {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// A number that no other handle in this process has, now or earlier. Parameters remember by it with whom their values
    /// were compared. The default, 0, is for groups that are not told apart: with another such group, values that have
    /// been compared once are not compared again.
    fn handle_number(&self) -> u64 {
        0
    }

    /// Elementwise over the ranks. `x` is f32 and has one shape on all ranks.
    ///
    /// # Errors
    /// Another dtype, different shapes; a rank that is away, failed or elsewhere.
    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor>;

    /// [`all_reduce`](Self::all_reduce) into `x` itself, which nobody else may hold: for gradients.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); shared storage, which poisons the group.
    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()>;

    /// The shards of all ranks, one after the other along dimension 0. Any dtype, the same on all ranks; shards may have
    /// different extents in dimension 0, also 0, and in no other.
    ///
    /// # Errors
    /// A scalar, different dtypes or other extents; a rank that is away, failed or elsewhere.
    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor>;

    /// Elementwise over the ranks, of which rank r keeps the r-th of `world_size` equal parts along dimension 0. `x` is
    /// f32 and has one shape on all ranks.
    ///
    /// # Errors
    /// Dimension 0 that is not a multiple of the world size, another dtype, different shapes; a rank that is away, failed
    /// or elsewhere.
    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor>;

    /// The `root`'s `x`, on all ranks. Any dtype; on the other ranks `x` says which dtype and shape they expect.
    ///
    /// # Errors
    /// A root that is no rank, different dtypes or shapes; a rank that is away, failed or elsewhere.
    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor>;

    /// How this backend does [`quantized_all_gather`](crate::quantized_all_gather()), which is the function to call: it also
    /// tells the other ranks when this one fails. By default the hosts exchange scales at each call.
    ///
    /// # Errors
    /// As [`quantized_all_gather`](crate::quantized_all_gather()).
    fn quantized_all_gather(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        gather::by_exchange(self, what, shard, slot)
    }

    /// Returns when all ranks have come here.
    ///
    /// # Errors
    /// A rank that is away, failed or elsewhere.
    fn barrier(&self) -> Result<()>;
}

/// The [`handle_number`](ProcessGroup::handle_number) of a new handle.
pub(crate) fn next_handle_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}
