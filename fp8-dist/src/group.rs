//! The trait of process groups.

use crate::Result;
use crate::gather::exchange;
use fp8_kernels::{Operand, Slot, Tensor};
use fp8_recipe::AmaxGroup;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The operation that combines the values of all ranks, elementwise.
///
/// Every backend computes f32. See the example of [`ProcessGroup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. `local` and `tcp` add in rank order, `((rank 0 + rank 1) + rank 2) + …`; `nccl` in an order of its own. All ranks
    /// of a group get the same bits.
    Sum,
    /// The maximum. −0 is less than 0; NaN is greater than infinity, so it wins. (NCCL does not define the maximum of NaN.)
    Max,
}

impl ReduceOp {
    /// Returns `sum` or `max`.
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

/// One rank's handle on a group of ranks: the collectives.
///
/// All ranks must make the same calls in the same order, with the same `what`, a name that says what a call is for. If ranks make
/// different calls, or if a rank leaves, gives up or does not arrive within the group's deadline, every rank gets an error and the
/// group can no longer be used: later calls return [`Error::Poisoned`]. No call waits forever.
///
/// An argument that is wrong in the same way on all ranks is an error on all ranks, and the group remains usable. Results share no
/// storage with arguments or with other ranks.
///
/// An `Arc<dyn ProcessGroup>` upcasts to the `Arc<dyn AmaxGroup>` that a recipe's scopes take.
///
/// ```
/// use fp8_dist::{ProcessGroup, ReduceOp, Result, local};
/// use fp8_kernels::{Device, Tensor};
/// use std::{thread, time::Duration};
///
/// let run = |group: &dyn ProcessGroup| -> Result<()> {
///     let x = Tensor::from_vec(vec![group.rank() as f32, 1.0], [2], &Device::cpu())?; // [0, 1] and [1, 1]
///     assert_eq!(group.all_reduce("x", &x, ReduceOp::Sum)?.to_vec::<f32>()?, [1.0, 2.0]);
///     assert_eq!(group.all_reduce("x", &x, ReduceOp::Max)?.to_vec::<f32>()?, [1.0, 1.0]);
///     assert_eq!(group.all_gather("x", &x)?.to_vec::<f32>()?, [0.0, 1.0, 1.0, 1.0]);
///     assert_eq!(group.broadcast("x", &x, 1)?.to_vec::<f32>()?, [1.0, 1.0]);
///     let part = group.reduce_scatter("x", &x, ReduceOp::Sum)?; // element r of the sum, on rank r
///     assert_eq!(part.item()?, [1.0, 2.0][group.rank()]);
///     group.barrier()
/// };
/// thread::scope(|scope| {
///     for group in local("dp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || run(&*group).unwrap());
///     }
/// });
/// ```
///
/// [`Error::Poisoned`]: crate::Error::Poisoned
pub trait ProcessGroup: AmaxGroup {
    /// Returns this rank: 0 to `world_size - 1`.
    fn rank(&self) -> usize;

    /// Returns a number that is unique among all handles this process has ever had. Parameters use it to remember with which
    /// groups their values have been compared.
    ///
    /// The default implementation returns 0. Groups that return 0 are not told apart: values that have been compared in one of
    /// them are not compared again in another.
    fn handle_number(&self) -> u64 {
        0
    }

    /// Combines `x` of all ranks elementwise and returns the result on every rank. `x` is f32 and has the same shape on all
    /// ranks.
    ///
    /// # Errors
    /// Another dtype; different shapes; any failure of the group.
    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor>;

    /// Like [`all_reduce`](Self::all_reduce), but stores the result in `x`, whose storage must not be shared. Use it for gradients.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); shared storage, which ends the group.
    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()>;

    /// Concatenates the shards of all ranks along dimension 0, in rank order, and returns the result on every rank. The dtype is
    /// any, the same on all ranks. Shards may differ in dimension 0, which may be 0, but not in the other dimensions.
    ///
    /// # Errors
    /// A scalar; different dtypes, or different shapes apart from dimension 0; any failure of the group.
    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor>;

    /// Combines `x` of all ranks elementwise, cuts the result into `world_size` equal parts along dimension 0 and returns part r on
    /// rank r. `x` is f32 and has the same shape on all ranks.
    ///
    /// # Errors
    /// Dimension 0 is not a multiple of the world size; another dtype; different shapes; any failure of the group.
    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor>;

    /// Returns the `x` of rank `root` on every rank. The dtype is any. The other ranks pass a tensor of the same dtype and shape,
    /// whose values are ignored.
    ///
    /// # Errors
    /// `root` is not a rank; different dtypes or shapes; any failure of the group.
    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor>;

    /// The backend's part of [`quantized_all_gather`](crate::quantized_all_gather()). Call that function instead: it also tells the
    /// other ranks when this one fails. By default the hosts exchange scales in each call.
    ///
    /// # Errors
    /// Those of [`quantized_all_gather`](crate::quantized_all_gather()).
    fn quantized_all_gather(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        exchange::by_exchange(&|what, x| self.all_gather(what, x), what, shard, slot)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Any failure of the group.
    fn barrier(&self) -> Result<()>;
}

/// Returns the [`handle_number`](ProcessGroup::handle_number) of a new handle.
pub(crate) fn next_handle_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}
