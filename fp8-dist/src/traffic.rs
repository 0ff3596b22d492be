//! Counts of what a rank has sent to the others of its group.

/// The collectives that a rank has called in one group, and the bytes that it has sent in them.
///
/// Bytes are those of elements, as a ring or a full mesh of n ranks sends them: of a tensor of s bytes, `all_reduce` sends
/// 2 (n − 1) / n · s, `reduce_scatter` (n − 1) / n · s, `all_gather` (n − 1) · s, and the root of a `broadcast` (n − 1) · s; `send` s, and
/// `all_to_all` the rows for other ranks. Names, shapes and small tensors that travel by way of rank 0 take a little more, and NCCL may choose another way. Replays of a graph
/// count like the steps that they repeat.
///
/// ```
/// use fp8_dist::{ReduceOp, local};
/// use fp8_kernels::{DType, Device, Tensor};
/// use std::{thread, time::Duration};
///
/// thread::scope(|scope| {
///     for group in local("dp", 2, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || {
///             let x = Tensor::zeros([100], DType::F32, &Device::cpu()).unwrap();
///             group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
///             let sent = group.traffic().reductions;
///             assert_eq!((sent.calls, sent.bytes), (1, 400));
///         });
///     }
/// });
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Sums, averages and maxima: `all_reduce`, `all_reduce_in_place`, `start_all_reduce`, `reduce_scatter`.
    pub reductions: Sent,
    /// Reductions of amaxes: [`AmaxGroup::all_reduce_max`](crate::AmaxGroup::all_reduce_max).
    pub amaxes: Sent,
    /// Gathers, broadcasts, `all_to_all` and `send`, of codes and values.
    pub moves: Sent,
    /// Exchanges of messages between all hosts, by which ranks compare calls and states. On CPUs each collective is one, or begins with
    /// one; `send` and `recv` take none. On GPUs the collectives of a training step take none once they are known, and replays of a graph never do. (Every second at
    /// most, ranks also tell rank 0 which known calls they have made.)
    pub exchanges: u64,
}

impl Traffic {
    /// Returns the bytes of all collectives together.
    pub const fn bytes(&self) -> u64 {
        self.reductions.bytes + self.amaxes.bytes + self.moves.bytes
    }
}

/// Collectives of one kind.
///
/// ```
/// use fp8_dist::local;
/// use std::time::Duration;
///
/// let alone = local("dp", 1, Duration::from_secs(10))?.remove(0);
/// let sent = alone.traffic().moves;
/// assert_eq!((sent.calls, sent.bytes), (0, 0));
/// # Ok::<(), fp8_dist::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// The number of calls.
    pub calls: u64,
    /// The bytes of elements that this rank has sent in them.
    pub bytes: u64,
}
