//! The trait of process groups.

use crate::gather::{codes, exchange};
use crate::{Pending, ReduceOp, Result, Traffic, output};
use fp8_kernels::{Fp8Tensor, Operand, Slot, Tensor};
use fp8_recipe::AmaxGroup;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

    /// Sends each rank some of the rows of `x`, which are its elements along dimension 0: the first `counts[0]` to rank 0, the next
    /// `counts[1]` to rank 1, and so on. Returns the rows that come to this rank, in rank order, and how many come from each. The dtype
    /// is any, the same on all ranks; the other dimensions too. Counts may be 0. The hosts tell each other the counts in each call.
    ///
    /// ```
    /// use fp8_dist::local;
    /// use fp8_kernels::{Device, Tensor};
    /// use std::{thread, time::Duration};
    ///
    /// thread::scope(|scope| {
    ///     for group in local("ep", 2, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || {
    ///             // Rank 0 has tokens 0, 1 and 2 and keeps the first. Rank 1 has token 10, which it keeps.
    ///             let (tokens, counts) = [(vec![0, 1, 2], [1, 2]), (vec![10], [0, 1])][group.rank()].clone();
    ///             let x = Tensor::from_vec(tokens, [counts.iter().sum()], &Device::cpu()).unwrap();
    ///             let (mine, from) = group.all_to_all("tokens", &x, &counts).unwrap();
    ///             let expected = [(vec![0], [1, 0]), (vec![1, 2, 10], [2, 1])][group.rank()].clone();
    ///             assert_eq!((mine.to_vec::<i32>().unwrap(), [from[0], from[1]]), expected);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    /// A scalar; counts that are not one for each rank, or that do not add up to the rows; different dtypes or shapes of rows; any
    /// failure of the group.
    fn all_to_all(&self, what: &str, x: &Tensor, counts: &[usize]) -> Result<(Tensor, Vec<usize>)>;

    /// Sends `x`, of any dtype, to rank `to`, which calls [`recv`](Self::recv) for it. Only these two ranks take part. Tensors from one
    /// rank to another arrive in the order in which they were sent.
    ///
    /// Between CPUs this returns when `x` has been read, which is before it is received, and it is stored until then. Between processes
    /// it travels by way of rank 0, which must not leave before it has arrived, and has the group's deadline for each part of the way,
    /// together with what is sent behind it.
    ///
    /// On GPUs, this device's work that is queued later waits until the other device receives: two GPUs that both send to each other
    /// before they receive wait for each other until the deadline. Let one of them receive first, or use
    /// [`all_to_all`](Self::all_to_all).
    ///
    /// ```
    /// use fp8_dist::local;
    /// use fp8_kernels::{DType, Device, Tensor};
    /// use std::{thread, time::Duration};
    ///
    /// thread::scope(|scope| {
    ///     for group in local("pp", 2, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || {
    ///             let mut x = Tensor::scalar(5.0, &Device::cpu()).unwrap();
    ///             if group.rank() == 0 {
    ///                 group.send("activations", &x, 1).unwrap();
    ///             } else {
    ///                 x = Tensor::zeros([], DType::F32, &Device::cpu()).unwrap();
    ///                 group.recv("activations", &mut x, 0).unwrap();
    ///             }
    ///             assert_eq!(x.item().unwrap(), 5.0);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    /// `to` is not another rank, or has left, which ends the group; any failure of the group.
    fn send(&self, what: &str, x: &Tensor, to: usize) -> Result<()>;

    /// Stores the next tensor that rank `from` [sends](Self::send) to this rank in `x`, whose storage must not be shared.
    ///
    /// # Errors
    /// `from` is not another rank; another name, dtype or shape than that rank has sent, which ends the group; shared storage, which
    /// ends it too; nothing was sent within the deadline, or before that rank left; any failure of the group. On GPUs, the hosts
    /// compare the first message of a name, dtype and shape. Later ones are compared by the receiving device: the next call that waits
    /// for it returns the error, and the group goes on.
    fn recv(&self, what: &str, x: &mut Tensor, from: usize) -> Result<()>;

    /// Concatenates the shards of all ranks along dimension 0, in rank order, and returns the result on every rank. The dtype is
    /// any, the same on all ranks. Shards may differ in dimension 0, which may be 0, but not in the other dimensions.
    ///
    /// # Errors
    /// A scalar; different dtypes, or different shapes apart from dimension 0; any failure of the group.
    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor>;

    /// Like [`all_gather`](Self::all_gather), but stores the result in `out`, whose storage must not be shared. It has the result's shape
    /// and dtype.
    ///
    /// By default the result is copied.
    ///
    /// # Errors
    /// Another shape or dtype of `out`; those of [`all_gather`](Self::all_gather); shared storage, which ends the group.
    fn all_gather_into(&self, what: &str, x: &Tensor, out: &mut Tensor) -> Result<()> {
        let call = || format!("all_gather `{what}`");
        output::store(out, what, call, |_| self.all_gather(what, x), |why| self.poison(why))
    }

    /// Combines `x` of all ranks elementwise, cuts the result into `world_size` equal parts along dimension 0 and returns part r on
    /// rank r. `x` is as for [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// Dimension 0 is not a multiple of the world size; those of [`all_reduce`](Self::all_reduce).
    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor>;

    /// Like [`reduce_scatter`](Self::reduce_scatter), but stores this rank's part in `out`, whose storage must not be shared. It has the
    /// part's shape and dtype.
    ///
    /// By default the part is copied.
    ///
    /// # Errors
    /// Another shape or dtype of `out`; those of [`reduce_scatter`](Self::reduce_scatter); shared storage, which ends the group.
    fn reduce_scatter_into(&self, what: &str, x: &Tensor, op: ReduceOp, out: &mut Tensor) -> Result<()> {
        let call = || format!("reduce_scatter({op}) `{what}`");
        output::store(out, what, call, |_| self.reduce_scatter(what, x, op), |why| self.poison(why))
    }

    /// Returns the `x` of rank `root` on every rank. The dtype is any. The other ranks pass a tensor of the same dtype and shape,
    /// whose values are ignored.
    ///
    /// # Errors
    /// `root` is not a rank; different dtypes or shapes; any failure of the group.
    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor>;

    /// Replaces `x` by that of rank `root`, as [`broadcast`](Self::broadcast) returns it. Its storage must not be shared.
    ///
    /// By default the result is copied.
    ///
    /// # Errors
    /// Those of [`broadcast`](Self::broadcast); shared storage, which ends the group.
    fn broadcast_in_place(&self, what: &str, x: &mut Tensor, root: usize) -> Result<()> {
        let call = || format!("broadcast(from rank {root}) `{what}`");
        output::store(x, what, call, |x| self.broadcast(what, x, root), |why| self.poison(why))
    }

    /// The backend's part of [`quantized_all_gather`](crate::quantized_all_gather()). Call that function instead: it also tells the
    /// other ranks when this one fails. By default the hosts exchange scales in each call.
    ///
    /// # Errors
    /// Those of [`quantized_all_gather`](crate::quantized_all_gather()).
    fn quantized_all_gather(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        exchange::by_exchange(&|what, x| self.all_gather(what, x), self.rank(), what, shard, slot)
    }

    /// The backend's part of [`gather_codes`](crate::gather_codes()). Call that function instead. By default the hosts exchange scales in
    /// each call.
    ///
    /// # Errors
    /// Those of [`gather_codes`](crate::gather_codes()).
    fn gather_codes(&self, what: &str, shard: &Fp8Tensor) -> Result<Fp8Tensor> {
        codes::gather(&|what: &str, x: &Tensor| self.all_gather(what, x), what, shard)
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
