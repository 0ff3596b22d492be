//! The trait of process groups.

use crate::gather::exchange;
use crate::{Pending, Result, Traffic};
use fp8_kernels::{Operand, Slot, Tensor};
use fp8_recipe::AmaxGroup;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The operation that combines the values of all ranks, elementwise.
///
/// f32, bf16 and f16 have all operations, i32 has `Sum` and `Max`. See the example of [`ProcessGroup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. `local` and `tcp` add in rank order, `((rank 0 + rank 1) + rank 2) + …`, in f32, and round the sum to the dtype
    /// once. `nccl` adds in an order of its own, and may round 16-bit values after each addition. All ranks of a group get the
    /// same bits. A sum of i32 that does not fit into i32 is an error.
    Sum,
    /// The sum, as `Sum` computes it in f32, divided by the number of ranks before it is rounded. `nccl` multiplies each value by
    /// 1 / n instead, in its dtype, and adds then. Not for i32.
    Avg,
    /// The maximum. −0 is less than 0; NaN is greater than infinity, so it wins. (NCCL does not define the maximum of NaN.)
    Max,
}

impl ReduceOp {
    /// Returns `sum`, `avg` or `max`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
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

    /// Combines `x` of all ranks elementwise and returns the result on every rank. `x` has the same shape and dtype on all
    /// ranks: f32, bf16, f16, or i32, for which GPUs wait and the hosts add.
    ///
    /// # Errors
    /// A dtype that [`op`](ReduceOp) does not have; a sum of i32 that does not fit; different dtypes or shapes; any failure of the
    /// group.
    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor>;

    /// Like [`all_reduce`](Self::all_reduce), but stores the result in `x`, whose storage must not be shared. Use it for gradients.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); shared storage, which ends the group.
    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()>;

    /// Reduces each of `tensors` in place, as [`all_reduce_in_place`](Self::all_reduce_in_place) does, in one call. They have the same
    /// shapes and dtypes on all ranks, in the same order.
    ///
    /// By default it takes a call for each tensor.
    ///
    /// # Errors
    /// Those of [`all_reduce_in_place`](Self::all_reduce_in_place).
    fn all_reduce_coalesced(&self, what: &str, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
        let mut each = tensors.iter_mut().enumerate();
        each.try_for_each(|(index, x)| self.all_reduce_in_place(&format!("{what}, tensor {index}"), x, op))
    }

    /// Starts [`all_reduce_coalesced`](Self::all_reduce_coalesced), and returns while that goes on: on another thread of a CPU, on
    /// another queue of a GPU. Use it for gradients, which are reduced while backward goes on.
    ///
    /// Calls of a group have one order: a collective that follows waits until what was started before is done. (On GPUs, only the
    /// device does.) Errors come from [`Pending::wait`].
    ///
    /// ```
    /// use fp8_dist::{ReduceOp, local};
    /// use fp8_kernels::{Device, Tensor};
    /// use std::{thread, time::Duration};
    ///
    /// thread::scope(|scope| {
    ///     for group in local("dp", 2, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || {
    ///             let x = Tensor::scalar(group.rank() as f32 + 1.0, &Device::cpu()).unwrap();
    ///             let pending = group.start_all_reduce("gradients", vec![x], ReduceOp::Sum);
    ///             // … compute …
    ///             assert_eq!(pending.wait().unwrap()[0].item().unwrap(), 3.0);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// By default the reduction is done when this returns.
    fn start_all_reduce(&self, what: &str, mut tensors: Vec<Tensor>, op: ReduceOp) -> Pending {
        let reduced = self.all_reduce_coalesced(what, &mut tensors, op);
        Pending::done(reduced.map(|()| tensors))
    }

    /// Returns what this handle has sent to the other ranks so far. The default implementation returns zeros.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    /// Concatenates the shards of all ranks along dimension 0, in rank order, and returns the result on every rank. The dtype is
    /// any, the same on all ranks. Shards may differ in dimension 0, which may be 0, but not in the other dimensions.
    ///
    /// # Errors
    /// A scalar; different dtypes, or different shapes apart from dimension 0; any failure of the group.
    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor>;

    /// Combines `x` of all ranks elementwise, cuts the result into `world_size` equal parts along dimension 0 and returns part r on
    /// rank r. `x` is as for [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// Dimension 0 is not a multiple of the world size; those of [`all_reduce`](Self::all_reduce).
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

    /// Divides the group: the ranks that pass the same `color` form a group called `id`, in the order of `key`, and of this
    /// group's ranks where keys are equal. A rank that passes `None` joins no group and gets `None`. Every rank of this group calls
    /// it, with the same `id`.
    ///
    /// A new group is independent: it has this group's backend, device and deadline, and connections of its own. The end or the
    /// failure of one group does not end another, but for groups of GPUs with collectives that are queued or recorded: what a failed
    /// group leaves undone makes the device unusable for all.
    ///
    /// ```
    /// use fp8_dist::{Result, local};
    /// use std::{thread, time::Duration};
    ///
    /// let run = |world: &dyn fp8_dist::ProcessGroup| -> Result<()> {
    ///     let rank = world.rank();
    ///     let pair = world.split("tp", Some(rank / 2), rank)?.expect("it has a color"); // 0 and 1, 2 and 3
    ///     assert_eq!((pair.id(), pair.rank(), pair.world_size()), ("tp", rank % 2, 2));
    ///     assert_eq!(pair.members(), [rank / 2 * 2, rank / 2 * 2 + 1]);
    ///     pair.barrier()
    /// };
    /// thread::scope(|scope| {
    ///     for world in local("world", 4, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || run(&*world).unwrap());
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    /// A new group that cannot be formed; any failure of this group.
    fn split(&self, id: &str, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn ProcessGroup>>>;

    /// Forms the group of some ranks of this one, in the order of `ranks`, and returns it on these; on the others `None`. Every rank
    /// of this group calls it, with the same `id` and `ranks`.
    ///
    /// # Errors
    /// No rank, a number that is not a rank of this group, or one that occurs twice; other ranks than another rank passes; those of
    /// [`split`](Self::split).
    fn subgroup(&self, id: &str, ranks: &[usize]) -> Result<Option<Arc<dyn ProcessGroup>>>;

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
